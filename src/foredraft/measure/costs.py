"""What a step takes, by the rows it verifies and the requests that share it, measured in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median

import numpy as np
import torch
from torch import Tensor

from foredraft.control.cost import level, on_line
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.kv import BLOCK
from foredraft.engine.protocols import Proposer, StepTimes, Target
from foredraft.engine.sequence import Sequence
from foredraft.measure.replay import Known
from foredraft.types import Draft, Needs, SamplingParams, Source, StepOutput, Verdict, chain

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
_ROUNDS = 3  # over the budgets, so that what disturbs the machine for a while disturbs them alike
_STEPS = 3  # timed at each budget in a round, after one that is not
_DRAFTS = 6  # steps with a real draft timed at each budget
_TRIES = 40  # steps after which a way to draft that is not met is given up
_PROMPTS = 8  # read to find what a prompt takes
_ROOM = 256  # tokens that a request emits before another takes its place


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Seconds at one load, by rows. steps: steps that decode, drafting apart; prompts: steps that read one
    prompt.
    """

    seqs: int
    steps: dict[int, float]
    prompts: dict[int, float]

    def step_s(self, rows: float, prompt_rows: int = 0) -> float:
        """Return the seconds of a step over `rows` rows, in a line between what was measured, and over some
        rows of prompts beside them, which add what they add to a prompt of so many rows.
        """
        if not prompt_rows:
            return _at(self.steps, rows)
        added_s = _at(self.prompts, rows + prompt_rows) - _at(self.prompts, rows)
        return _at(self.steps, rows) + added_s


def _at(known: dict[int, float], rows: float) -> float:
    """As on_line, for points in any order."""
    points = sorted(known)
    return on_line(points, [known[n] for n in points], rows)


@dataclass(slots=True)
class _Timer:
    """A controller whose budget is set from outside; it keeps the times of steps that only decode, and in
    which all drafts were made by `method`, if one is set.
    """

    budget: int = 0
    method: str | None = None
    decoding: bool = False
    times: list[StepTimes] = field(default_factory=list)

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        self.decoding = batch_tokens == len(seqs)
        for seq in seqs if self.method is not None else ():
            seq.source = next((s for s in seq.sources or () if s.method == self.method), None)
            self.decoding &= seq.source is not None
        return [self.budget if self.method is None or seq.source else 0 for seq in seqs]

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        if self.decoding:
            self.times.append(times)

    def forget(self, request_id: str) -> None:
        pass


class _Filler:
    """Drafts tokens that mean nothing, exactly as many as it may."""

    needs = Needs()

    def __init__(self, vocab_size: int) -> None:
        self._generator, self._vocab_size = torch.Generator().manual_seed(0), vocab_size

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [chain(torch.randint(self._vocab_size, (n,), generator=self._generator)) for n in budgets]

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def measure_prompts(
    target: Target, known: Seq[Known], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Return the seconds of steps that read some of the requests' own prompts alone, by rows; the first is a
    step of one row.
    """
    longest = max(len(one.prompt) for one in known) + 3
    config = EngineConfig(max_seqs=1, max_len=longest, kv_tokens=longest + BLOCK, prefix_cache=False)
    engine = Engine(target, config=config, clock=clock)
    found: dict[int, list[float]] = {}
    for one in (*known[:1], *known[:_PROMPTS]):  # the first again, once it is warm
        engine.add(one.prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        left = len(one.prompt)
        while engine.has_work:
            rows = min(left, config.max_batch_tokens) or 1
            start = clock()
            engine.step()
            found.setdefault(rows, []).append(clock() - start)
            left -= min(left, rows)
    return _leveled({rows: min(seconds) for rows, seconds in found.items()})


def measure_load(
    target: Target,
    known: Seq[Known],
    seqs: int,
    prompts: dict[int, float],
    longest: int = BUDGETS[-1],
    clock: Callable[[], float] = time.perf_counter,
) -> LoadCosts:
    """Time steps of `seqs` requests at every budget up to the longest; the contexts are the requests' own."""
    bench = _Bench(target, _Filler(target.vocab_size), known, seqs, clock)
    found: dict[int, list[float]] = {}
    for _ in range(_ROUNDS):
        for budget in (budget for budget in BUDGETS if budget <= longest):
            for t in bench.times(budget):
                found.setdefault(t.rows, []).append(t.target_s + t.other_s)
    return LoadCosts(seqs, _leveled({rows: median(s) for rows, s in found.items()}), prompts)


def _leveled(steps: dict[int, float]) -> dict[int, float]:
    """As level, for points in any order."""
    rows = sorted(steps)
    points = [steps[n] for n in rows]
    level(points)
    return dict(zip(rows, points, strict=True))


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Seconds that drafting adds to a step at one load. extra: the draft, by the method of a source, by
    budget; beside_s: for handing over hidden states, drafted or not.
    """

    extra: dict[str, dict[int, float]]
    beside_s: float = 0.0

    def extra_s(self, method: str, budget: float) -> float:
        """Return the seconds at a budget, in a line between what was measured."""
        known = self.extra[method]
        return float(np.interp(budget, sorted(known), [known[b] for b in sorted(known)]))


def measure_draft(
    proposer: Proposer,
    target: Target,
    known: Seq[Known],
    costs: LoadCosts,
    budgets: Seq[int],
    sources: Seq[Source | None],
    clock: Callable[[], float] = time.perf_counter,
) -> DraftCosts:
    """Time drafts of all requests of a load at every budget, made by each of the sources' methods.

    Of a draft that reads hidden states, handing them over counts too.
    """
    bench = _Bench(target, proposer, known, costs.seqs, clock)
    beside: list[float] = []
    extra: dict[str, dict[int, float]] = {}
    for method in dict.fromkeys(source.method if source is not None else None for source in sources):
        bench.timer.method = method
        found = {budget: bench.times(budget, _DRAFTS) for budget in (0, *budgets)}
        extra[method or ""] = {b: sum(t.draft_s for t in ts) / len(ts) for b, ts in found.items() if ts}
        extra[method or ""].setdefault(0, 0.0)
        beside += [t.target_s + t.other_s - costs.step_s(t.rows) for ts in found.values() for t in ts]
    hands_over = bool(proposer.needs.hidden_layers and beside)
    return DraftCosts(extra, max(0.0, median(beside)) if hands_over else 0.0)


class _Bench:
    """An engine with always as many requests as it takes, whose prompts are read."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        known: Seq[Known],
        seqs: int,
        clock: Callable[[], float],
    ) -> None:
        longest = min(max(len(one.prompt) for one in known) + _ROOM + 1, target.max_len)
        self.timer = _Timer()
        self.engine = Engine(
            target,
            proposer,
            config=EngineConfig(
                max_seqs=seqs,
                max_len=longest,
                max_batch_tokens=max(512, seqs),
                kv_tokens=seqs * (longest + 2 * BLOCK),
                prefix_cache=False,
            ),
            controller=self.timer,
            clock=clock,
        )
        self._prompts = cycle(one.prompt for one in known)
        waiting = {self._add() for _ in range(seqs)}
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}

    def _add(self) -> str:
        params = SamplingParams(temperature=0, max_tokens=_ROOM, ignore_eos=True)
        return self.engine.add(next(self._prompts), params)

    def times(self, budget: int, count: int = _STEPS) -> list[StepTimes]:
        """Return the times of some steps at a budget, fewer if they are hardly met; who has ended is
        replaced.
        """
        self.timer.budget = budget
        self.timer.times.clear()
        for _ in range(count + _TRIES):
            if len(self.timer.times) > count:
                break
            for output in self.engine.step():
                if output.finish_reason is not None:
                    self._add()
        return self.timer.times[1:]
