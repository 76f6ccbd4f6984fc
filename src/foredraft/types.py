"""Frozen values that every layer shares. The words are those of the glossary in docs/architecture.md.

Index spaces never share a name: `seq` (sequence in the batch), `row` (token in the flat batch), `node` (guess
in a draft), `pos` (place in the text, 0 is the first prompt token), `slot` (place in the KV cache).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from foredraft.errors import ConfigError

Draw = Literal["fixed", "coupled", "iid", "distinct"]
FinishReason = Literal["stop", "length", "cancelled"]
MAX_SEED = 2**63 - 1
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is out of range: use {limit}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Validated at construction; raises ConfigError.

    The processors run in one order: penalties, logit bias, temperature, top-k, top-p, min-p.
    `temperature=0` is greedy. `repetition_penalty` looks at prompt and output (Hugging Face); presence and
    frequency penalties look at the output alone (OpenAI, vLLM). `logprobs=n` returns the target's own
    log-probability of each emitted token and of its n most likely ones, before any processor.
    `reproducible=True` makes the text a function of the seed alone, whatever drafts and batch it met
    (float32). `budget` is the most nodes drafted per step; 0 turns drafting off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    reproducible: bool = False
    budget: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check every field once; nothing later in the engine re-checks them."""
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in ("top_k", "max_tokens", "min_tokens"):
            _require(_is_int(getattr(self, name)), name, getattr(self, name), "a whole number")
        for name in ("ignore_eos", "reproducible"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 (greedy) to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, up to 1 (off)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        repetition = self.repetition_penalty
        _require(0.01 <= repetition <= 100, "repetition_penalty", repetition, "0.01 to 100; 1 is off")
        for name in _PENALTIES[1:]:
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "-2 to 2; 0 is off")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} contradicts max_tokens={self.max_tokens}: "
                f"raise max_tokens to at least {self.min_tokens} or lower min_tokens"
            )
        if self.seed is not None:
            ok = _is_int(self.seed) and 0 <= self.seed <= MAX_SEED
            _require(ok, "seed", self.seed, f"a whole number from 0 to {MAX_SEED}, or None")
        if self.logprobs is not None:
            ok = _is_int(self.logprobs) and 0 <= self.logprobs <= 20
            _require(ok, "logprobs", self.logprobs, "0 to 20, or None")
        if self.budget != "auto":
            ok = _is_int(self.budget) and 0 <= self.budget <= 256
            _require(ok, "budget", self.budget, "0 (off) to 256, or 'auto'")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, Iterable), name, value, "a list of them, () for none")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        for token in ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids, 0 or more")
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_bias(self) -> None:
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "{token id: bias}")
        for token, bias in self.logit_bias.items():
            _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids, 0 or more, as keys")
            _require(_is_number(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "-100 to 100")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0


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
    """One finished answer. token_ids hold all emitted ids, an EOS at the end included; text has no stops."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    stats: SpecStats


@dataclass(frozen=True, slots=True)
class Piece:
    """Streamed text: what one step added. finish_reason is set on the last piece only."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: SpecStats | None = None


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
