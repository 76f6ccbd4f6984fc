"""What an engine is told at its start, and what it tells of how busy it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.errors import CapacityError, ConfigError
from foredraft.params import require, whole


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """max_seqs run at once; texts end at max_len tokens; a step feeds at most max_batch_tokens pending
    tokens; the cache holds kv_tokens positions in all, and with prefix_cache a request that begins like an
    earlier one finds that part done.
    """

    max_seqs: int = 16
    max_len: int = 2048
    max_batch_tokens: int = 512
    kv_tokens: int = 16 * 2048
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_seqs", 1), ("max_len", 2), ("max_batch_tokens", 1), ("kv_tokens", 2)):
            value = whole(name, getattr(self, name), f"a whole number, {least} or more", least)
            object.__setattr__(self, name, value)
        require(isinstance(self.prefix_cache, bool), "prefix_cache", self.prefix_cache, "True or False")
        if self.max_batch_tokens < self.max_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} cannot feed max_seqs={self.max_seqs} sequences: "
                f"use {self.max_seqs} or more"
            )

    def fitted(
        self, *, max_len: int | None, context: int, memory: float, bytes_per_token: int
    ) -> EngineConfig:
        """Return this with as much cache as `memory` bytes hold, and texts of at most max_len tokens (None:
        the model's context, or what the cache holds). Raises CapacityError if not even one text fits.
        """
        fit, least = int(memory / bytes_per_token), max_len or 2
        if fit < least:
            raise CapacityError(
                f"{memory / 1e9:.3g} GB hold a KV cache of {fit} tokens, but one text may take {least}: "
                "lower max_len or raise kv_gb"
            )
        longest = max_len or min(context, fit)
        most = self.max_seqs * BlockPool.needed(longest) * BLOCK
        return replace(self, max_len=longest, kv_tokens=min(fit, most))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run and wait, and the share of the cache that the running ones hold."""

    running: int
    waiting: int
    kv_use: float
