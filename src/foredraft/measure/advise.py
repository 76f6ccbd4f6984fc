"""Predictions: speed-up by method, budget and load, from replayed acceptance and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from foredraft.engine.protocols import Proposer, Target
from foredraft.measure.costs import BUDGETS, LoadCosts, measure_draft, measure_load
from foredraft.measure.replay import Known, replay
from foredraft.types import SpecStats

LOOKUPS = ("ngram", "suffix", "suffix-shared")
LOW, GOOD = 0.4, 0.7  # accept rates below and above which a draft is bad and good
_SHORT = 24  # tokens: answers in which there is little to gain
_HOT = 1.2
_UNSURE = -1.5  # nats: mean log-probability of answers that nothing predicts
WORTH = 1.03  # a gain below this is not worth switching anything on
_MODEL_BUDGETS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft: `make` returns a fresh proposer whose cache serves so many tokens. bytes: of its
    weights.
    """

    name: str
    make: Callable[[int], Proposer]
    bytes: int = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets worth a try."""
        return tuple(b for b in BUDGETS if b) if self.name in LOOKUPS else _MODEL_BUDGETS


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one method does with one budget at one load."""

    method: str
    budget: int
    load: int
    speedup: float
    accept_rate: float
    mean_emitted: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is known of the requests. logprob: mean of the answers' tokens, in nats."""

    known: tuple[Known, ...]
    temperature: float
    logprob: float

    @property
    def answer(self) -> float:
        """The mean length of an answer in tokens."""
        return sum(len(one.answer) for one in self.known) / len(self.known)


@dataclass(frozen=True, slots=True)
class Advice:
    """Predictions, costs, the best of each load and what speaks against drafting."""

    predictions: tuple[Prediction, ...]
    costs: tuple[LoadCosts, ...]
    reasons: tuple[str, ...]

    def best(self, load: int) -> Prediction:
        """Return the best prediction at a load."""
        return max((p for p in self.predictions if p.load == load), key=lambda p: p.speedup)

    @property
    def loads(self) -> list[int]:
        """The loads, in order."""
        return [costs.seqs for costs in self.costs]

    def break_even(self, method: str) -> float | None:
        """Return the load from which the method does not pay with any budget; None if it pays at all."""
        return break_even([(load, self.of(method, load).speedup) for load in self.loads])

    def of(self, method: str, load: int) -> Prediction:
        """Return the best prediction of a method at a load."""
        mine = [p for p in self.predictions if (p.method, p.load) == (method, load)]
        return max(mine, key=lambda p: p.speedup)


def break_even(points: Sequence[tuple[float, float]]) -> float | None:
    """Return where speed-ups by load fall to 1, in a line between loads; None if they do not."""
    last: tuple[float, float] | None = None
    for load, speedup in points:
        if speedup <= 1:
            if last is None:
                return load
            return last[0] + (load - last[0]) * (last[1] - 1) / (last[1] - speedup)
        last = (load, speedup)
    return None


def predict(
    target: Target,
    methods: Sequence[Method],
    traffic: Traffic,
    loads: Sequence[int],
    on_part: Callable[[str], None] = lambda part: None,
) -> Advice:
    """Replay every method at every budget, time the target at every load, and put both together."""
    costs = []
    for load in loads:
        on_part(f"timing steps at load {load}")
        costs.append(measure_load(target, traffic.known, load))
    predictions: list[Prediction] = []
    for method in methods:
        tokens = max(len(one.prompt) + len(one.answer) for one in traffic.known) + 64
        replayed = {}
        for budget in method.budgets:
            on_part(f"replaying {method.name}, {budget} a step")
            replayed[budget] = _sum(replay(method.make(tokens), target, traffic.known, budget))
        for at in costs:
            on_part(f"timing {method.name} at load {at.seqs}")
            drafting = _draft_seconds(method, target, traffic, at.seqs, replayed)
            predictions += [
                _together(method.name, budget, at, stats, drafting[budget], traffic)
                for budget, stats in replayed.items()
            ]
    return Advice(tuple(predictions), tuple(costs), tuple(_reasons(predictions, methods, traffic, loads)))


def _sum(many: Sequence[SpecStats]) -> SpecStats:
    whole = SpecStats()
    for one in many:
        whole.add(one)
    return whole


def _draft_seconds(
    method: Method, target: Target, traffic: Traffic, seqs: int, replayed: Mapping[int, SpecStats]
) -> dict[int, float]:
    """Lookups take their time for each request alone; models draft for all requests together."""
    if method.name in LOOKUPS:
        return {budget: seqs * stats.draft_s / stats.steps for budget, stats in replayed.items()}
    room = 4096 * seqs
    return measure_draft(method.make(room), target, traffic.known, seqs, method.budgets)


def _together(
    name: str, budget: int, load: LoadCosts, stats: SpecStats, draft_s: float, traffic: Traffic
) -> Prediction:
    """A request sees the prompts of all that run beside it, then its steps."""
    requests = len(traffic.known)
    tokens, steps = stats.emitted / requests, stats.steps / requests
    prompts_s = load.seqs * load.prompt_s
    plain_s = prompts_s + (tokens - 1) * load.step_s(load.seqs)
    rows = load.seqs * (1 + stats.drafted / stats.steps)
    drafted_s = prompts_s + (steps - 1) * (load.step_s(rows) + draft_s)
    return Prediction(name, budget, load.seqs, plain_s / drafted_s, stats.accept_rate, stats.mean_emitted)


def _reasons(
    predictions: Sequence[Prediction], methods: Sequence[Method], traffic: Traffic, loads: Sequence[int]
) -> list[str]:
    """Return what speaks against drafting, with the numbers."""
    found = []
    for method in methods:
        mine = [p for p in predictions if p.method == method.name]
        rate = max(p.accept_rate for p in mine)
        if rate < LOW:
            found.append(
                f"{method.name}: at most {rate:.0%} accepted, under {LOW:.0%}: a poor draft for this"
            )
        elif rate > GOOD:
            found.append(f"{method.name}: up to {rate:.0%} accepted, over {GOOD:.0%}: a good draft for this")
        even = break_even([(load, max(p.speedup for p in mine if p.load == load)) for load in sorted(loads)])
        if even is not None:
            found.append(
                f"{method.name}: a server with {even:.0f} requests at once or more is too busy for it"
            )
        if method.bytes:
            found.append(
                f"{method.name}: takes {method.bytes / 1e6:.0f} MB for weights, and a KV cache of its own"
            )
    if median(len(one.answer) for one in traffic.known) < _SHORT:
        found.append(f"half of the answers are shorter than {_SHORT} tokens: most time goes to the prompt")
    if traffic.temperature > _HOT:
        found.append(
            f"temperature {traffic.temperature:g} is hot: guesses are rejected more often than replayed"
        )
    if traffic.logprob < _UNSURE:
        found.append(
            f"the text is hard to predict: its tokens have a mean log-probability of {traffic.logprob:.2f}"
        )
    return found
