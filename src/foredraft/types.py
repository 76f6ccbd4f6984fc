"""Frozen values that every layer shares. The words are those of the glossary in docs/architecture.md.

Index spaces never share a name: `seq` (sequence in the batch), `row` (token in the flat batch), `node` (guess
in a draft), `pos` (place in the text, 0 is the first prompt token), `slot` (place in the KV cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from foredraft.params import MAX_SEED as MAX_SEED
from foredraft.params import SamplingParams as SamplingParams

Draw = Literal["fixed", "coupled", "iid", "distinct"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens as a tree below the root (the last emitted token).

    tokens: int64 [n]. parents[node] is a smaller node, or -1 for the root; a chain is (-1, 0, 1, …). Siblings
    are ordered as they were drawn. laws: float32 [n + 1, vocab], row 0 after the root, row node + 1 after
    node (None for "fixed" and "coupled"). draw: how siblings were chosen: deterministically; by the noise
    with which the target itself will draw, which leaves no rule but `verify_matched`; i.i.d. from their law;
    or without replacement.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    laws: Tensor | None = None
    draw: Draw = "fixed"

    def __post_init__(self) -> None:
        """Raises ValueError for what is no tree, and for a drawn one without laws."""
        if not isinstance(self.tokens, Tensor):
            object.__setattr__(self, "tokens", torch.tensor(self.tokens, dtype=torch.int64))
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens have {len(self.parents)} parents: give one each")
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents {self.parents} are no tree: each is -1 or a smaller node")
        if self.draw not in get_args(Draw):
            raise ValueError(f"draw={self.draw!r} is unknown: use {', '.join(get_args(Draw))}")
        if self.is_drawn and self.laws is None and self.parents:
            raise ValueError(f"a draft that was drawn ({self.draw}) needs its laws")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_drawn(self) -> bool:
        """True if siblings were drawn from laws, which the rejection rule weighs."""
        return self.draw in ("iid", "distinct")


NO_DRAFT = Draft(tokens=torch.empty(0, dtype=torch.int64), parents=())


def chain(tokens: Sequence[int] | Tensor, laws: Tensor | None = None, draw: Draw = "fixed") -> Draft:
    """Return the draft that is one path."""
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    return Draft(tokens=ids, parents=tuple(range(-1, len(ids) - 1)), laws=laws, draw=draw)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided: accepted nodes from the root side, then one token of the target's own.

    `recovered` is True when next_token replaces a rejected guess, False when it is the bonus (or plain
    decoding).
    """

    path: tuple[int, ...]
    next_token: int
    recovered: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability (nats) of an emitted token, and of its most likely tokens, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpecStats:
    """Counts and times of one request, or the sum over many. Definitions: docs/architecture.md, glossary.

    Times are in seconds. Of a step shared by several requests each gets an equal share of the draft, target
    and other time. ttft_s and total_s run from the request's arrival.
    """

    steps: int = 0
    drafted: int = 0
    levels: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    prompt_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    other_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def accept_rate(self) -> float:
        """accepted / levels; 0 when nothing was drafted."""
        return self.accepted / self.levels if self.levels else 0.0

    @property
    def mean_emitted(self) -> float:
        """emitted / steps, bonus included."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def conditional_at(self) -> list[float]:
        """Of the steps whose path reached a depth, the share that reached the next: accepted_at[d] over
        accepted_at[d - 1], over steps for the first.
        """
        before = [self.steps, *self.accepted_at]
        return [count / max(reached, 1) for count, reached in zip(self.accepted_at, before, strict=False)]

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of total time, prefill included."""
        return self.emitted / self.total_s if self.total_s else 0.0

    def copy(self) -> SpecStats:
        """Return a record of its own."""
        return replace(self, accepted_at=list(self.accepted_at))

    def add(self, other: SpecStats) -> None:
        """Add another record to this one, field by field."""
        for item in fields(self):
            if item.name != "accepted_at":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        pairs = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        self.accepted_at = [mine + theirs for mine, theirs in pairs]

    def note_path(self, length: int) -> None:
        """Count one step whose path reached `length` nodes."""
        self.accepted_at.extend([0] * (length - len(self.accepted_at)))
        for depth in range(length):
            self.accepted_at[depth] += 1


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. token_ids hold all emitted ids; text leaves out what ended it: an EOS, a stop
    token or a stop string.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    stats: SpecStats

    @classmethod
    def of(cls, outputs: Sequence[StepOutput]) -> Completion:
        """Return what all outputs of a request say together."""
        finish = outputs[-1].finish_reason
        assert finish is not None
        logprobs: list[TokenLogprob] | None = None
        if any(output.logprobs is not None for output in outputs):
            logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        return cls(
            text="".join(output.text for output in outputs),
            token_ids=[token for output in outputs for token in output.token_ids],
            finish_reason=finish,
            logprobs=logprobs,
            stats=outputs[-1].stats,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Streamed text: what one step added. finish_reason is set on the last piece only."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: SpecStats | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants: hidden states of these layers of the target, and while it drafts some more slots
    in the cache than its budget, where these are free; and how it draws siblings.
    """

    hidden_layers: tuple[int, ...] = ()
    draw: Draw = "fixed"
    spare_slots: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """One way to draft for a sequence at one step. Drafts of one `method` take equally long; those of one
    method and `grade` are about equally often accepted.

    longest: the most nodes worth drafting. prior: how often the first guess is accepted, as far as is known
    before any was judged. tree: whether it drafts trees.
    """

    longest: int
    prior: float = 0.6
    tree: bool = False
    method: str = ""
    grade: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step gave one request. `origins` says where each token came from, one letter a token:
    a(ccepted), r(ecovered), b(onus). `stats` is the request's record so far. `parents` is the tree that
    was drafted for the step, `path` its accepted nodes.
    """

    request_id: str
    token_ids: list[int]
    origins: str
    logprobs: list[TokenLogprob] | None
    text: str
    finish_reason: FinishReason | None
    stats: SpecStats
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


class TextSink(Protocol):
    """Turns one request's tokens into text and watches for stop strings. The engine owns one per request."""

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take new tokens; if a stop string ends the answer return how many of them count, else None."""

    def take(self, *, final: bool) -> str:
        """Return the text that is safe to show and was not shown before; everything that is left if final."""


class Grammar(Protocol):
    """What one request may say next. It stands behind the emitted tokens; the engine owns one per request."""

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return which tokens may follow each path of guesses, bool [paths, vocab] (CPU); () is the root.

        After a path that the grammar itself forbids every token is: no such node can be reached.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move behind tokens that were emitted."""
