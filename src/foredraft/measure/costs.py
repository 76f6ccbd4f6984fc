"""What a step takes, by the rows it verifies and the requests that share it, measured in the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median

import numpy as np
import torch
from torch import Tensor

from foredraft.engine import Engine, EngineConfig
from foredraft.engine.kv import BLOCK
from foredraft.engine.protocols import Proposer, StepTimes, Target
from foredraft.engine.sequence import Sequence
from foredraft.measure.replay import Known
from foredraft.types import Draft, Needs, SamplingParams, StepOutput, Verdict, chain

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
_ROUNDS = 3  # over the budgets, so that what disturbs the machine for a while disturbs them alike
_STEPS = 3  # timed at each budget in a round, after one that is not
_ROOM = 256  # tokens that a request emits before another takes its place


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Seconds at one load. steps[rows]: a step over so many rows, drafting apart. prompt_s: reading one
    prompt.
    """

    seqs: int
    prompt_s: float
    steps: dict[int, float]

    def step_s(self, rows: float) -> float:
        """Return the seconds of a step over `rows` rows, in a line between what was measured."""
        known = sorted(self.steps)
        return float(np.interp(rows, known, [self.steps[n] for n in known]))


@dataclass(slots=True)
class _Timer:
    """A controller whose budget is set from outside; it keeps the times of steps that only decode."""

    budget: int = 0
    decoding: bool = False
    times: list[StepTimes] = field(default_factory=list)

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        self.decoding = batch_tokens == len(seqs)
        return [self.budget] * len(seqs)

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


def measure_load(target: Target, known: Seq[Known], seqs: int) -> LoadCosts:
    """Time steps of `seqs` requests at every budget; the prompts are the requests' own."""
    bench = _Bench(target, _Filler(target.vocab_size), known, seqs)
    found: dict[int, list[float]] = {}
    for _ in range(_ROUNDS):
        for budget in BUDGETS:
            for t in bench.times(budget):
                found.setdefault(t.rows, []).append(t.target_s + t.other_s)
    return LoadCosts(seqs, bench.prompt_s, _level({rows: median(s) for rows, s in found.items()}))


def _level(steps: dict[int, float]) -> dict[int, float]:
    """More rows never take less time: they could be fed and not used."""
    level: dict[int, float] = {}
    least = float("inf")
    for rows in sorted(steps, reverse=True):
        least = min(least, steps[rows])
        level[rows] = least
    return level


def measure_draft(
    proposer: Proposer, target: Target, known: Seq[Known], seqs: int, budgets: Seq[int]
) -> dict[int, float]:
    """Return the seconds that drafting takes per step of `seqs` requests, by budget."""
    bench = _Bench(target, proposer, known, seqs)
    return {budget: median(t.draft_s for t in bench.times(budget)) for budget in budgets}


class _Bench:
    """An engine with always as many requests as it takes, whose prompts are read."""

    def __init__(self, target: Target, proposer: Proposer, known: Seq[Known], seqs: int) -> None:
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
        )
        self._prompts = cycle(one.prompt for one in known)
        start = time.perf_counter()
        waiting = {self._add() for _ in range(seqs)}
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        self.prompt_s = (time.perf_counter() - start) / seqs

    def _add(self) -> str:
        params = SamplingParams(temperature=0, max_tokens=_ROOM, ignore_eos=True)
        return self.engine.add(next(self._prompts), params)

    def times(self, budget: int) -> list[StepTimes]:
        """Return the times of some steps at a budget; who has ended is replaced."""
        self.timer.budget = budget
        self.timer.times.clear()
        while len(self.timer.times) <= _STEPS:
            for output in self.engine.step():
                if output.finish_reason is not None:
                    self._add()
        return self.timer.times[1:]
