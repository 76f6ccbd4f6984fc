"""Suffix decoding: what followed the longest known suffix of the text, as a tree (Oliaro et al., arXiv
2411.04975).

Known is the request's own text and, if allowed, what earlier requests were answered. Continuations are
weighed by how often they followed and by how long the match is, so a draft is as long and as wide as its
sources are sure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.propose.automaton import Place, SuffixAutomaton
from foredraft.propose.ngram import LONGEST, LOOKUP
from foredraft.types import NO_DRAFT, Draft, Needs, Source, Verdict

DEPTH = 24  # longest match, in tokens
_DOUBT = 2.0  # what follows a match of n tokens is weighed against _DOUBT / n sightings of something else
_LEAST = 0.1  # chance below which a guess is not worth its row
_MANY = 64  # different tokens behind a match, from which on it says too little to be looked through
_END = -1  # stands behind every remembered answer
MEMORY_TOKENS = 200_000  # about 100 MB
_GRADES = 5
_SOURCES = tuple(
    Source(LONGEST, prior=(grade + 0.5) / _GRADES, method=LOOKUP, grade=grade) for grade in range(_GRADES)
)


@dataclass(slots=True)
class Growth:
    """A draft in the making. scores: the chance that the path to each node is accepted."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    @property
    def expected(self) -> float:
        """How many nodes are expected to be accepted."""
        return sum(self.scores)


@dataclass(slots=True)
class _State:
    """A request and the automaton of its text."""

    seq: Sequence
    known: SuffixAutomaton


class Memory:
    """The answers of earlier requests, `tokens` in all at most: the older half is dropped when it is full."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.halves = [SuffixAutomaton(DEPTH)]

    def add(self, answer: Seq[int]) -> None:
        """Remember an answer, or what fits of it."""
        kept = [*answer[: self.tokens // 2 - 1], _END]
        if len(self.halves[-1]) + len(kept) > self.tokens // 2:
            self.halves = [self.halves[-1], SuffixAutomaton(DEPTH)]
        self.halves[-1].extend(kept)


class SuffixProposer:
    """Drafts a tree of what followed the text's longest known suffix.

    memory_tokens: how many tokens of earlier answers are kept across requests and looked through too; 0
    keeps nothing. With it the time that an answer takes tells whether others were answered alike.
    """

    needs = Needs()

    def __init__(self, *, memory_tokens: int = 0) -> None:
        if memory_tokens != 0 and memory_tokens < 4:
            raise ConfigError(f"memory_tokens={memory_tokens} is out of range: use 0 (off), or 4 or more")
        self._memory = Memory(memory_tokens) if memory_tokens else None
        self._states: dict[str, _State] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one tree a sequence, empty where nothing is likely enough."""
        return [self._one(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        """Return the lookup, graded by the chance of the likeliest next token; none if no draft would be
        made.
        """
        nexts = [continuations(known, place)[1] for known, place in self._known(seq)]
        chance = max(
            (share for shares in nexts for token, share in shares.items() if token != _END), default=0
        )
        return (_SOURCES[int(chance * _GRADES)],) if chance >= _LEAST else ()

    def _own(self, seq: Sequence) -> SuffixAutomaton:
        """Return the automaton of the request's text, brought up to date."""
        if seq.request_id not in self._states:
            self._states[seq.request_id] = _State(seq, SuffixAutomaton(DEPTH))
        own = self._states[seq.request_id].known
        own.extend(seq.tokens[len(own) :])
        return own

    def _known(self, seq: Sequence) -> list[tuple[SuffixAutomaton, Place]]:
        """Return the automaton of the request's text and those of earlier answers, each with where the text's
        end is in it.
        """
        own, others = self._own(seq), self._memory.halves if self._memory is not None else []
        return [(own, own.newest), *((other, other.find(seq.tokens)) for other in others)]

    def _one(self, seq: Sequence, budget: int) -> Draft:
        if min(budget, seq.levels_left) <= 0:
            self._own(seq)
            return NO_DRAFT
        found = [grow(source, place, budget, seq.levels_left) for source, place in self._known(seq)]
        best = max(found, key=lambda growth: growth.expected)
        return Draft(torch.tensor(best.tokens), tuple(best.parents)) if best.tokens else NO_DRAFT

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Learn nothing: the text itself is all there is."""

    def forget(self, request_id: str) -> None:
        """Drop the request's automaton; its answer goes into the memory once it is whole."""
        state = self._states.pop(request_id, None)
        if state is not None and state.seq.ended and self._memory is not None:
            self._memory.add(state.seq.output)


def grow(source: SuffixAutomaton, place: Place, budget: int, levels: int) -> Growth:
    """Return the tree of the at most `budget` likeliest continuations of a string, likeliest first."""
    growth = Growth([], [], [])
    heap: list[tuple[float, int, int, int, int, Place]] = []  # -chance, arrival, token, parent, level, before
    arrivals = 0

    def look(score: float, place: Place, node: int, level: int) -> None:
        nonlocal arrivals
        place, shares = continuations(source, place)
        for token, share in shares.items():
            if score * share >= _LEAST and token != _END:
                heapq.heappush(heap, (-score * share, arrivals, token, node, level, place))
                arrivals += 1

    look(1.0, place, -1, 1)
    while heap and len(growth.tokens) < budget:
        score, _, token, parent, level, before = heapq.heappop(heap)
        growth.tokens.append(token)
        growth.parents.append(parent)
        growth.scores.append(-score)
        if level < levels:
            look(-score, source.step(before, token), len(growth.tokens) - 1, level + 1)
    return growth


def continuations(source: SuffixAutomaton, place: Place) -> tuple[Place, dict[int, float]]:
    """Return the longest suffix of a string that anything followed, and the chance of each such token.

    Nothing is said of what too many different tokens followed, or if only the empty string was.
    """
    state, length = place = source.followed(place)
    follow = source.follow[state]
    if not length or len(follow) > _MANY:
        return place, {}
    counts = {token: source.count[after] for token, after in follow.items()}
    total = sum(counts.values()) + _DOUBT / length
    return place, {token: count / total for token, count in counts.items()}
