"""What a run would take: the engine itself, with known answers, drafts made before, and time added up.

Requests come and go as in a measurement, so prompts are read between other requests' steps, rows differ from
step to step, and the controller decides as it would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Batch
from foredraft.engine.drafter import Drafter
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BLOCK
from foredraft.engine.protocols import Controller, ForwardOut
from foredraft.engine.sequence import Sequence
from foredraft.measure.costs import DraftCosts, LoadCosts
from foredraft.measure.replay import Judged, Profile, sources_of
from foredraft.measure.workload import how_many, in_blocks
from foredraft.types import NO_DRAFT, Draft, Needs, SamplingParams, Source, SpecStats, Verdict

RIGHT, WRONG = 0, 1  # all there is to say of a token


@dataclass(slots=True)
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Simulated:
    """tokens_per_s: of the time that requests took, as each user sees it."""

    tokens_per_s: float
    stats: SpecStats


class _Target:
    """Always says what is right, and takes the time it was measured to take."""

    vocab_size = 2
    eos_ids: frozenset[int] = frozenset()
    device = torch.device("cpu")

    def __init__(self, max_len: int, costs: LoadCosts, beside_s: float, clock: _Clock) -> None:
        self.max_len, self.costs, self.beside_s, self.clock = max_len, costs, beside_s, clock

    def make_kv(self, tokens: int) -> KVCache:
        return KVCache([LayerShape(1, 1, 1)], tokens, dtype=torch.float32)

    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        prompt_rows = sum(max(span.pending - 1, 0) for span in batch.spans)
        decoding = len(batch.token_ids) - prompt_rows
        self.clock.now += self.costs.step_s(decoding, prompt_rows) + self.beside_s
        logits = torch.zeros(len(batch.logit_rows), 2)
        logits[:, RIGHT] = 1.0
        return ForwardOut(logits)


class _Proposer:
    """Drafts what was drafted at the same place before. A request's id begins with its profile's number."""

    needs = Needs()

    def __init__(self, profiles: Seq[Profile], costs: DraftCosts, clock: _Clock) -> None:
        self.profiles, self.costs, self.clock = profiles, costs, clock

    def at(self, seq: Sequence) -> tuple[Judged, ...]:
        """The drafts that are known at the place of a sequence."""
        return _profile(self.profiles, seq.request_id).places[len(seq.output)]

    def chosen(self, seq: Sequence) -> Judged | None:
        """The draft to use for a sequence."""
        return next(iter(self.at(seq)), None)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return the first nodes of one draft a sequence; those of one method are made together."""
        drafts: list[Draft] = []
        most: dict[str, int] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            judged = self.chosen(seq)
            drafts.append(NO_DRAFT if judged is None else _first(judged, budget))
            if budget and judged is not None:
                method = judged.source.method if judged.source is not None else ""
                most[method] = max(budget, most.get(method, 0))
            if not seq.output:
                self.clock.now += _profile(self.profiles, seq.request_id).start_s
        idle_s = min(self.costs.extra_s(method, 0) for method in self.costs.extra)
        self.clock.now += idle_s + sum(self.costs.extra_s(m, b) - idle_s for m, b in most.items())
        return drafts

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Learn nothing."""

    def forget(self, request_id: str) -> None:
        """Keep nothing."""


class _SourcedProposer(_Proposer):
    """One that had sources, among which a controller may choose."""

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        """Return those that drafted at the place of a sequence."""
        return tuple(one.source for one in self.at(seq) if one.source is not None)

    def chosen(self, seq: Sequence) -> Judged | None:
        """The draft of the source that a sequence is to use."""
        return next((one for one in self.at(seq) if one.source == seq.source), None)


class _Drafter(Drafter):
    """One in which a fault is a fault: nobody goes on without drafts."""

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> dict[Sequence, Draft]:
        assert self.proposer is not None
        return dict(zip(seqs, self.proposer.propose(seqs, budgets), strict=True))


def _profile(profiles: Seq[Profile], request_id: str) -> Profile:
    """Return the profile with whose number a request's id begins."""
    return profiles[int(request_id.partition("#")[0])]


def _first(judged: Judged, budget: int) -> Draft:
    parents = judged.parents[:budget]
    tokens = torch.full((len(parents),), WRONG)
    tokens[[node for node in judged.path if node < len(parents)]] = RIGHT
    return Draft(tokens, parents) if parents else NO_DRAFT


def simulate(
    profiles: Seq[Profile],
    costs: LoadCosts,
    drafting: DraftCosts | None = None,
    controller: Controller | None = None,
) -> Simulated:
    """Answer all requests at the load of `costs`, as often and in such blocks as `measure` does; without
    drafting, plainly.
    """
    clock = _Clock()
    longest = max(len(one.known.prompt) + len(one.known.answer) for one in profiles) + 1
    engine = Engine(
        _Target(longest, costs, drafting.beside_s if drafting is not None else 0.0, clock),
        config=EngineConfig(
            max_seqs=costs.seqs,
            max_len=longest,
            max_batch_tokens=max(512, costs.seqs),
            kv_tokens=costs.seqs * (longest + 2 * BLOCK),
            prefix_cache=False,
        ),
        clock=clock,
    )
    if drafting is not None:
        make = _Proposer if None in sources_of(profiles) else _SourcedProposer
        engine.drafter = _Drafter(make(profiles, drafting, clock), controller)
    order = [f"{place % len(profiles)}#{place}" for place in range(how_many(len(profiles), costs.seqs))]
    taken_s = sum(_block(engine, clock, profiles, ids) for ids in in_blocks(order, costs.seqs))
    return Simulated(engine.stats.emitted / taken_s, engine.stats)


def _block(engine: Engine, clock: _Clock, profiles: Seq[Profile], ids: Seq[str]) -> float:
    """Return the seconds that the requests of a block took, each from its start."""
    waiting, begun, taken_s = deque(ids), dict[str, float](), 0.0
    while waiting or begun:
        while waiting and len(begun) < engine.config.max_seqs:
            request_id = waiting.popleft()
            known = _profile(profiles, request_id).known
            params = SamplingParams(temperature=0, max_tokens=len(known.answer), ignore_eos=True)
            engine.add([RIGHT] * len(known.prompt), params, request_id)
            begun[request_id] = clock.now
        for output in engine.step():
            if output.finish_reason is not None:
                taken_s += clock.now - begun.pop(output.request_id)
    return taken_s
