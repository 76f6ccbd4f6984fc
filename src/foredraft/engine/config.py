"""What an engine is told at its start, and what it tells of how busy it is."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import ConfigError


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
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: use {least} or more")
        if self.max_batch_tokens < self.max_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} cannot feed max_seqs={self.max_seqs} sequences: "
                f"use {self.max_seqs} or more"
            )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run and wait, and the share of the cache that the running ones hold."""

    running: int
    waiting: int
    kv_use: float
