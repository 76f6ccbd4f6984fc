"""How one request is sampled, and how numbers that callers give are checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Real
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from foredraft.errors import ConfigError

MAX_SEED = 2**63 - 1
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is out of range: use {limit}")


def whole(name: str, value: Any, limit: str, least: float = -inf, most: float = inf) -> int:
    """Return a whole number within its limits, numpy's too, as Python's own; raises ConfigError."""
    try:
        found = None if isinstance(value, bool) else index(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= most:
        raise ConfigError(f"{name}={value!r} is out of range: use {limit}")
    return found


def number(name: str, value: Any, limit: str, least: float = -inf, most: float = inf) -> float:
    """Return a finite number within its limits, numpy's too, as Python's own; raises ConfigError."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    require(real and -inf < value < inf and least <= value <= most, name, value, limit)
    return value if isinstance(value, int) else float(value)


class _Bias(dict[int, float]):
    """A logit bias, and the row that it adds to logits: made once a request, since a step has no time for
    it.
    """

    row: Tensor | None = None

    def over(self, vocab_size: int, device: torch.device) -> Tensor:
        if self.row is None or len(self.row) != vocab_size or self.row.device != device:
            if (largest := max(self)) >= vocab_size:
                raise ConfigError(
                    f"logit_bias names token {largest}, but the model has tokens 0 to {vocab_size - 1} only"
                )
            row = torch.zeros(vocab_size)
            row[list(self)] = torch.tensor(list(self.values()), dtype=torch.float32)
            self.row = row.to(device)
        return self.row


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
            self._keep(name, number(name, getattr(self, name), "a finite number"))
        for name in ("top_k", "max_tokens", "min_tokens"):
            self._keep(name, whole(name, getattr(self, name), "a whole number"))
        for name in ("ignore_eos", "reproducible"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 (greedy) to 100")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, up to 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        repetition = self.repetition_penalty
        require(0.01 <= repetition <= 100, "repetition_penalty", repetition, "0.01 to 100; 1 is off")
        for name in _PENALTIES[1:]:
            require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "-2 to 2; 0 is off")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} contradicts max_tokens={self.max_tokens}: "
                f"raise max_tokens to at least {self.min_tokens} or lower min_tokens"
            )
        if self.seed is not None:
            limit = f"a whole number from 0 to {MAX_SEED}, or None"
            self._keep("seed", whole("seed", self.seed, limit, 0, MAX_SEED))
        if self.logprobs is not None:
            self._keep("logprobs", whole("logprobs", self.logprobs, "0 to 20, or None", 0, 20))
        if self.budget != "auto":
            self._keep("budget", whole("budget", self.budget, "0 (off) to 256, or 'auto'", 0, 256))
        self._check_stops()
        self._check_bias()

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            require(isinstance(value, Iterable), name, value, "a list of them, () for none")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        self._keep("stop", stop)
        limit = "token ids, 0 or more"
        ids = [whole("stop_token_ids", token, limit, 0) for token in self.stop_token_ids]
        self._keep("stop_token_ids", tuple(ids))

    def _check_bias(self) -> None:
        require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "{token id: bias}")
        biases = _Bias()
        for key, bias in self.logit_bias.items():
            token = whole("logit_bias", key, "token ids, 0 or more, as keys", 0)
            biases[token] = number(f"logit_bias[{token}]", bias, "-100 to 100", -100, 100)
        self._keep("logit_bias", biases)

    def bias_row(self, vocab_size: int, device: torch.device) -> Tensor:
        """Return what logit_bias adds to logits, float32 [vocab_size]; raises ConfigError if it names a token
        that the model does not have.
        """
        assert isinstance(self.logit_bias, _Bias)
        return self.logit_bias.over(vocab_size, device)

    def numbered(self, answer: int) -> SamplingParams:
        """Return these for one of several answers to a prompt, each with a seed of its own."""
        if self.seed is None or answer == 0:
            return self
        return replace(self, seed=(self.seed + answer) % (MAX_SEED + 1))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0
