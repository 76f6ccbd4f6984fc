"""One request inside the engine: plain data and a few facts derived from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.sampling import Noise
from foredraft.types import Grammar, SamplingParams, Source, SpecStats, TextSink


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens 0 … kv_len - 1 are in the cache; the rest are pending. While decoding just the last one is."""

    request_id: str
    params: SamplingParams
    tokens: list[int]  # prompt, then output
    prompt_len: int
    limit: int  # tokens at which it ends by length: prompt and max_tokens, or the context
    noise: Noise
    sink: TextSink | None
    arrived_s: float
    grammar: Grammar | None = None
    kv_len: int = 0
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of its text
    table: BlockTable = field(default_factory=BlockTable)
    stats: SpecStats = field(default_factory=SpecStats)
    sources: tuple[Source, ...] | None = None  # ways to draft in this step; None: the proposer has just one
    source: Source | None = None  # the one that is to draft
    ended: bool = False  # its text grows no more

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """How many tokens the cache lacks."""
        return len(self.tokens) - self.kv_len

    @property
    def shareable(self) -> list[bytes]:
        """The keys of the blocks that it need not fill itself: one token at least is fed."""
        return self.keys[: (len(self.tokens) - 1) // BLOCK]

    @property
    def levels_left(self) -> int:
        """How deep a draft can be of use: the last token that may be emitted is never a guess."""
        return self.limit - len(self.tokens) - 1


def token_ids(prompt: Any) -> list[int]:
    """Return the ids of a list, a tuple or an array of one dimension; raises TypeError for all else, such as
    bytes and the keys of a mapping.
    """
    ids = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    if not isinstance(ids, Seq) or isinstance(ids, str | bytes | bytearray):
        raise TypeError(f"{type(prompt).__name__} is no list")
    return [index(token) for token in ids]
