"""Predictions: speed-up by method, budget and load, from replayed acceptance and measured costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.control import FixedBudget
from foredraft.engine.protocols import Controller, Proposer, Target
from foredraft.measure.costs import BUDGETS, Drafting, LoadCosts, measure_load
from foredraft.measure.reasons import WORTH, AtLoad, break_even, of_draft, of_memory, of_requests
from foredraft.measure.replay import Known, Profile, replay, sources_of
from foredraft.measure.simulate import simulate

_SPARE = 600  # positions of a draft's cache beyond the longest text, as a replay's own cache has


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft: `make` returns a fresh proposer whose cache serves so many tokens, `controller` what
    chooses its budgets under "auto", up to `longest`. bytes: of its weights; kv_bytes: of its cache, for each
    token.
    """

    name: str
    make: Callable[[int], Proposer]
    controller: Callable[[], Controller]
    longest: int
    bytes: int = 0
    kv_bytes: int = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        """The fixed budgets worth a try."""
        return tuple(budget for budget in BUDGETS if 0 < budget <= self.longest)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one method does with one budget at one load. budget None: the controller's, "auto"."""

    method: str
    budget: int | None
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


@dataclass(frozen=True, slots=True)
class Advice:
    """Predictions, costs, and what speaks for and against drafting."""

    predictions: tuple[Prediction, ...]
    costs: tuple[LoadCosts, ...]
    reasons: tuple[str, ...]

    def best(self, load: int) -> Prediction:
        """Return the best prediction with a fixed budget at a load."""
        return max((self.of(p.method, load) for p in self.predictions), key=lambda p: p.speedup)

    @property
    def loads(self) -> list[int]:
        """The loads, in order."""
        return [costs.seqs for costs in self.costs]

    def break_even(self, method: str) -> float | None:
        """Return the load from which the method does not pay with any budget; None if it pays at all."""
        return break_even([(load, self.of(method, load).speedup) for load in self.loads])

    def of(self, method: str, load: int) -> Prediction:
        """Return the best prediction of a method with a fixed budget at a load."""
        mine = [p for p in self.predictions if (p.method, p.load) == (method, load) and p.budget]
        return max(mine, key=lambda p: p.speedup)

    def auto(self, method: str, load: int) -> Prediction:
        """Return the prediction of a method with the controller's budgets at a load."""
        return next(p for p in self.predictions if (p.method, p.load, p.budget) == (method, load, None))


def predict(
    target: Target,
    methods: Sequence[Method],
    traffic: Traffic,
    loads: Sequence[int],
    on_part: Callable[[str], None] = lambda part: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Advice:
    """Replay every method once, time steps and drafts at every load, and simulate runs from both."""
    tokens = max(len(one.prompt) + len(one.answer) for one in traffic.known) + _SPARE
    profiles: list[list[Profile]] = []
    for method in methods:
        on_part(f"replaying {method.name}")
        profiles.append(replay(method.make(tokens), target, traffic.known, method.longest, clock))
    plain = [Profile(one, ((),) * len(one.answer), 0.0) for one in traffic.known]
    pairs = list(zip(methods, profiles, strict=True))
    timed = [Drafting(method.make, method.budgets, sources_of(mine)) for method, mine in pairs]
    predictions: list[Prediction] = []
    costs: list[LoadCosts] = []
    for load in loads:
        on_part(f"timing steps at load {load}")
        at, drafts = measure_load(target, traffic.known, load, timed, clock)
        costs.append(at)
        speed = simulate(plain, at).tokens_per_s
        for (method, mine), drafting in zip(pairs, drafts, strict=True):
            on_part(f"simulating {method.name} at load {load}")
            for budget in (*method.budgets, None):
                controller = method.controller() if budget is None else FixedBudget(budget)
                run = simulate(mine, at, drafting, controller)
                rates = run.stats.accept_rate, run.stats.mean_emitted
                predictions.append(Prediction(method.name, budget, load, run.tokens_per_s / speed, *rates))
    return Advice(tuple(predictions), tuple(costs), tuple(_reasons(predictions, methods, traffic, loads)))


def _reasons(
    predictions: Sequence[Prediction], methods: Sequence[Method], traffic: Traffic, loads: Sequence[int]
) -> list[str]:
    """Return what speaks for and against drafting."""
    found = []
    for method in methods:
        mine = [p for p in predictions if p.method == method.name]
        found += of_draft(method.name, [_at_load(mine, load) for load in sorted(loads)])
        if method.bytes:
            longest = max(len(one.prompt) + len(one.answer) for one in traffic.known)
            found.append(of_memory(method.name, method.bytes, method.kv_bytes, longest, sorted(loads)))
    lengths = [len(one.answer) for one in traffic.known]
    return [*found, *of_requests(lengths, traffic.temperature, traffic.logprob)]


def _at_load(predictions: Sequence[Prediction], load: int) -> AtLoad:
    """Return what was predicted of a method's fixed budgets at a load."""
    mine = [p for p in predictions if p.load == load]
    best = max((p for p in mine if p.budget), key=lambda p: p.speedup)
    budget = best.budget if best.speedup >= WORTH else 0
    return AtLoad(str(load), max(p.accept_rate for p in mine), best.speedup, budget)
