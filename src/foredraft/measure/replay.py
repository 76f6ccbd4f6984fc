"""Teacher-forced replay: what would a draft have got right in answers that are already known?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Batch
from foredraft.engine.drafter import Drafter
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.protocols import ForwardOut, Proposer, StepTimes, Target
from foredraft.engine.sequence import Sequence as Running
from foredraft.tree import children
from foredraft.types import NO_DRAFT, Draft, SamplingParams, Source, StepOutput


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and the target's own answer to it, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft, and which of its nodes the target says: `path`, from the root. source: which way it was made.

    Drafts of a smaller budget are its first nodes, as proposers put the most promising first.
    """

    parents: tuple[int, ...]
    path: tuple[int, ...]
    source: Source | None


@dataclass(frozen=True, slots=True)
class Profile:
    """A known answer with the drafts at each of its places, by the tokens answered before.

    start_s: seconds by which drafting takes longer in the first two steps, for the prompt.
    """

    known: Known
    places: tuple[tuple[Judged, ...], ...]
    start_s: float


@dataclass(slots=True)
class _Teacher:
    """A target that says the known answer. Only a draft that asks for hidden layers makes it run the model.

    One request runs at a time, so a row's position tells what comes after it.
    """

    target: Target
    needs_model: bool
    text: list[int] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def max_len(self) -> int:
        return self.target.max_len

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if not self.needs_model else self.target.device

    def make_kv(self, tokens: int) -> KVCache:
        if self.needs_model:
            return self.target.make_kv(tokens)
        return KVCache([LayerShape(1, 1, 1)], tokens, dtype=torch.float32)

    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        hidden = self.target.forward(batch, kv, hidden_layers).hidden if self.needs_model else ()
        places = batch.positions[batch.logit_rows.cpu()].tolist()
        logits = torch.zeros(len(places), self.vocab_size, device=self.device)
        for row, place in enumerate(places):
            if place + 1 < len(self.text):
                logits[row, self.text[place + 1]] = 1.0
        return ForwardOut(logits, hidden)


class _Judge(Drafter):
    """Keeps the drafts for every step, of every source, and lets the engine go on without one."""

    def __init__(self, proposer: Proposer, controller: _Times) -> None:
        super().__init__(proposer, controller)
        self.answer: tuple[int, ...] = ()
        self.places: list[tuple[Judged, ...]] = []

    def _propose(self, seqs: list[Running], budgets: list[int]) -> dict[Running, Draft]:
        assert self.proposer is not None
        (seq,) = seqs
        found = []
        for source in (None,) if seq.sources is None else seq.sources:
            seq.source = source
            (draft,) = self.proposer.propose(seqs, budgets)
            if draft.parents:
                path = _right(draft, self.answer[len(seq.output) :])
                found.append(Judged(draft.parents, path, source))
        self.places.append(tuple(found))
        return {seq: NO_DRAFT}


def _right(draft: Draft, after: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes along which a draft says what comes after."""
    tokens, below = draft.tokens.tolist(), children(draft.parents)
    path: list[int] = []
    for token in after:
        row = path[-1] + 1 if path else 0
        node = next((node for node in below[row] if tokens[node] == token), None)
        if node is None:
            break
        path.append(node)
    return tuple(path)


@dataclass(slots=True)
class _Times:
    """A controller with one budget; it keeps the times of steps."""

    budget: int
    steps: list[StepTimes] = field(default_factory=list)

    def budgets(self, seqs: Sequence[Running], batch_tokens: int) -> list[int]:
        return [self.budget] * len(seqs)

    def observe(self, outputs: Sequence[StepOutput], times: StepTimes) -> None:
        self.steps.append(times)

    def forget(self, request_id: str) -> None:
        pass


def replay(
    proposer: Proposer,
    target: Target,
    known: Sequence[Known],
    budget: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Profile]:
    """Return what a proposer would draft at every place of each answer, with so many nodes, and what of that
    is right.

    The answers must be the target's own, greedy: what a draft gets right in a run depends on the text alone.
    """
    longest = max(len(one.prompt) + len(one.answer) for one in known) + 1
    teacher = _Teacher(target, bool(proposer.needs.hidden_layers))
    engine = Engine(
        teacher,
        config=EngineConfig(max_seqs=1, max_len=longest, kv_tokens=longest + 512, prefix_cache=False),
        clock=clock,
    )
    times = _Times(budget)
    engine.drafter = judge = _Judge(proposer, times)
    return [_one(engine, teacher, judge, times, one) for one in known]


def _one(engine: Engine, teacher: _Teacher, judge: _Judge, times: _Times, one: Known) -> Profile:
    teacher.text = [*one.prompt, *one.answer]
    judge.answer, judge.places = one.answer, []
    times.steps.clear()
    params = SamplingParams(temperature=0, max_tokens=len(one.answer), ignore_eos=True)
    engine.add(one.prompt, params)
    said: list[int] = []
    while engine.has_work:
        for output in engine.step():
            said += output.token_ids
    assert said == list(one.answer)
    around = [step.draft_s + step.other_s for step in times.steps]
    later = around[-len(one.answer) :][2:]
    start_s = max(0.0, sum(around) - sum(later) - 2 * median(later)) if later else 0.0
    return Profile(one, tuple(judge.places), start_s)


def sources_of(profiles: Sequence[Profile]) -> list[Source | None]:
    """Return all sources that drafted, in the order they were met."""
    met = (judged.source for profile in profiles for place in profile.places for judged in place)
    return list(dict.fromkeys(met)) or [None]
