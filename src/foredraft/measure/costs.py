"""What a step takes, by the rows it verifies and the requests that share it, measured in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from statistics import median

import numpy as np
import torch
from torch import Tensor

from foredraft.control.cost import level, on_line
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.pool import BLOCK
from foredraft.engine.protocols import Proposer, StepTimes, Target
from foredraft.engine.sequence import Sequence
from foredraft.measure.replay import Known
from foredraft.types import Draft, Needs, SamplingParams, Source, StepOutput, Verdict, chain

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
_ROUNDS = 4
_STEPS = 3  # timed at each budget in a round, after one that is not
_TRIES = 40  # steps after which a way to draft that is not met is given up
_PROMPTS = 8  # read to find what a prompt takes
_ALIKE = 1.3  # steps with less than so many times the rows of others are timed as one
_APART = 0.618  # of an answer, how much farther than the one before a request begins: all parts alike
_ROOM = 4096  # positions of a draft's cache for each request


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


@dataclass(slots=True)
class _Timer:
    """A controller whose budget is set from outside; it keeps the times of steps that only decode, in which
    not all answers are about to end, and in which all drafts were made by `method`, if one is set.
    """

    budget: int = 0
    method: str | None = None
    decoding: bool = False
    times: list[StepTimes] = field(default_factory=list)

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        uncut = self.budget <= max((seq.levels_left for seq in seqs), default=0)
        self.decoding = batch_tokens == len(seqs) and uncut
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


@dataclass(frozen=True, slots=True)
class Drafting:
    """A way to draft that is to be timed: `make` returns a fresh proposer whose cache serves so many tokens,
    and `sources` are its ways to draft.
    """

    make: Callable[[int], Proposer]
    budgets: Seq[int]
    sources: Seq[Source | None]


def measure_load(
    target: Target,
    known: Seq[Known],
    seqs: int,
    drafting: Seq[Drafting],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LoadCosts, list[DraftCosts]]:
    """Time steps of `seqs` requests at every budget, and their drafts; the contexts are the requests' own.

    All are timed in turn, so that what disturbs the machine for a while disturbs them alike.
    """
    longest = max(budget for one in drafting for budget in one.budgets)
    prompts: dict[int, list[float]] = {}
    steps: dict[int, list[float]] = {}
    drafts: list[dict[tuple[str, int], list[StepTimes]]] = [{} for _ in drafting]
    hands_over = [False for _ in drafting]
    for order in (Random(seed) for seed in range(_ROUNDS)):
        for rows, seconds in _time_prompts(target, known, clock):
            prompts.setdefault(rows, []).append(seconds)
        bench = _Bench(target, _Filler(target.vocab_size), known, seqs, clock)
        for budget in _shuffled(BUDGETS[: BUDGETS.index(longest) + 1], order):
            for t in bench.times(budget):
                steps.setdefault(t.rows, []).append(t.target_s + t.other_s)
        for place, (one, times) in enumerate(zip(drafting, drafts, strict=True)):
            proposer = one.make(_ROOM * seqs)
            hands_over[place] = bool(proposer.needs.hidden_layers)
            bench = _Bench(target, proposer, known, seqs, clock)
            for method in dict.fromkeys(source.method if source else None for source in one.sources):
                bench.timer.method = method
                for budget in _shuffled((0, *one.budgets), order):
                    times.setdefault((method or "", budget), []).extend(bench.times(budget))
    read = _medians(prompts)
    few = {1: read[1]}  # where requests have ended
    costs = LoadCosts(seqs, few | _medians(steps), read)
    return costs, [_draft_costs(*one, costs) for one in zip(drafts, hands_over, strict=True)]


def _shuffled(budgets: Seq[int], order: Random) -> list[int]:
    """Return the budgets in some order, as contexts grow from one to the next."""
    return order.sample(budgets, len(budgets))


def _time_prompts(
    target: Target, known: Seq[Known], clock: Callable[[], float]
) -> Iterator[tuple[int, float]]:
    """Yield rows and seconds of steps that read some of the requests' own prompts alone, and of one row."""
    longest = max(len(one.prompt) for one in known) + 3
    config = EngineConfig(max_seqs=1, max_len=longest, kv_tokens=longest + BLOCK, prefix_cache=False)
    engine = Engine(target, config=config, clock=clock)
    for one in known[:_PROMPTS]:
        engine.add(one.prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        left = len(one.prompt)
        while engine.has_work:
            rows = min(left, config.max_batch_tokens) or 1
            start = clock()
            engine.step()
            yield rows, clock() - start
            left -= min(left, rows)


def _draft_costs(
    times: dict[tuple[str, int], list[StepTimes]], hands_over: bool, costs: LoadCosts
) -> DraftCosts:
    """Return what drafts take by method and budget, and what steps take longer if they hand states over."""
    extra: dict[str, dict[int, float]] = {}
    for (method, budget), found in times.items():
        if found or not budget:
            extra.setdefault(method, {})[budget] = sum(t.draft_s for t in found) / max(len(found), 1)
    beside = [t.target_s + t.other_s - costs.step_s(t.rows) for found in times.values() for t in found]
    return DraftCosts(extra, max(0.0, median(beside)) if hands_over and beside else 0.0)


def _medians(found: dict[int, list[float]]) -> dict[int, float]:
    """Return the median seconds by rows, of about as many rows together: the line between two points that are
    near would say little of what one more row takes.
    """
    groups: list[list[tuple[int, float]]] = []
    for rows in sorted(found):
        if not groups or rows >= _ALIKE * groups[-1][0][0]:
            groups.append([])
        groups[-1] += [(rows, seconds) for seconds in found[rows]]
    points = [median(seconds for _, seconds in group) for group in groups]
    level(points)
    return {round(median(rows for rows, _ in group)): s for group, s in zip(groups, points, strict=True)}


class _Bench:
    """An engine with always as many requests as it takes, whose prompts are read. The first ones begin
    somewhere in their answers, so that contexts are as long as in a run from its first step on.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        known: Seq[Known],
        seqs: int,
        clock: Callable[[], float],
    ) -> None:
        longest = max(len(one.prompt) + len(one.answer) for one in known) + 1
        self.timer = _Timer()
        self.engine = Engine(
            target,
            proposer,
            config=EngineConfig(
                max_seqs=seqs,
                max_len=min(longest, target.max_len),
                max_batch_tokens=max(512, seqs),
                kv_tokens=seqs * (longest + 2 * BLOCK),
                prefix_cache=False,
            ),
            controller=self.timer,
            clock=clock,
        )
        self._known = cycle(known)
        waiting = {self._add(_APART * n % 1) for n in range(seqs)}
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}

    def _add(self, begin: float = 0.0) -> str:
        one = next(self._known)
        told = int(begin * len(one.answer))
        params = SamplingParams(temperature=0, max_tokens=len(one.answer) - told, ignore_eos=True)
        return self.engine.add((*one.prompt, *one.answer[:told]), params)

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
