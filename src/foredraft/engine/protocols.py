"""What the engine asks of a target, a proposer and a controller."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.engine.kv import KVCache
from foredraft.engine.sequence import Sequence
from foredraft.types import Draft, Needs, Source, StepOutput, Verdict


@dataclass(frozen=True, slots=True)
class ForwardOut:
    """logits: [outputs, vocab], rows as in batch.logit_rows. hidden: the layers asked for, [rows, width]
    each.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the seconds of one step went, and how many rows the target saw."""

    draft_s: float
    target_s: float
    other_s: float
    rows: int


class Target(Protocol):
    """A model whose law counts."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def max_len(self) -> int:
        """The longest text, in tokens, that the model can read."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""

    def make_kv(self, tokens: int) -> KVCache:
        """Return an empty cache for `tokens` positions in all; raises CapacityError."""

    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """Run all rows in one pass; writes their keys and values."""


class Proposer(Protocol):
    """A drafting method. Holds whatever state it keeps per request under the request's id."""

    @property
    def needs(self) -> Needs:
        """What it wants from the target, and how it draws."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one draft a sequence, of at most its budget's nodes and at most seq.levels_left levels."""

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Learn what became of the drafts, after seq.tokens and seq.kv_len have moved on; also of steps in
        which propose() was not called, as a request's first ones may be.

        hidden[i]: the layers asked for, [positions, width] each, of the positions that joined the cache of
        sequence i in this step: those up to seq.kv_len - 1. With hidden layers asked for, a chunk of a prompt
        is told too, as a verdict without path whose next token is the prompt's own.
        """

    def forget(self, request_id: str) -> None:
        """Drop what was kept for a request."""


@runtime_checkable
class Sourced(Protocol):
    """A proposer with several ways to draft, or one that can tell how good its next draft will be."""

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        """Return the ways to draft for a sequence now: none where no guess can be made, the preferred first.
        propose() follows seq.source.
        """


class Controller(Protocol):
    """Decides how many nodes each sequence may draft."""

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return a budget a sequence; batch_tokens is how many rows the step feeds before any draft. May
        set seq.source to another of seq.sources.
        """

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Learn what a step gave and took."""


@runtime_checkable
class Keeping(Protocol):
    """A proposer, or a controller that keeps something for each request."""

    def forget(self, request_id: str) -> None:
        """Drop what was kept for a request."""


@runtime_checkable
class Resting(Protocol):
    """A controller for which being asked at every step may take more than drafts give."""

    def rests(self, count: int, batch_tokens: int) -> bool:
        """True if a step of `count` sequences, which feeds batch_tokens rows before any draft, should go
        without drafts, and without asking about them.
        """
