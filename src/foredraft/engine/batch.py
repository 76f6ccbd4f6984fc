"""The flat batch of one step: the real tokens of all sequences, one after another, without padding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.engine.pool import BlockTable
from foredraft.tree import depths, is_chain
from foredraft.types import Draft


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence feeds in this step: tokens its cache lacks, then the nodes of a draft below the last
    one.
    """

    tokens: Seq[int]
    kv_len: int  # positions 0 … kv_len - 1 are in the cache
    table: BlockTable
    draft: Draft | None  # None: not all pending tokens fit, so nothing is emitted and no logits are needed
    cached_nodes: int = 0  # the first nodes of the draft, fed in earlier passes; then no token is pending


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence: `pending` tokens in a row, then the nodes of its draft that are not cached.

    Row start + pending - 1 is the root; row start + pending + node - cached_nodes is `node`. Row start + i is
    written to the slot of position first_slot + i, whatever its position in the text is: siblings share a
    position, never a slot.
    """

    start: int
    pending: int
    parents: tuple[int, ...]
    kv_len: int
    table: BlockTable
    cached_nodes: int

    @property
    def rows(self) -> int:
        """All rows of this sequence."""
        return self.length - self.first_slot

    @property
    def first_slot(self) -> int:
        """The cache position of the first row."""
        return self.kv_len + self.cached_nodes

    @property
    def length(self) -> int:
        """How many cache positions are in use after this pass."""
        return self.kv_len + self.pending + len(self.parents)

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.rows

    @property
    def is_chain(self) -> bool:
        """True when every row continues the one before it."""
        return is_chain(self.parents)


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions: int64 [rows]. logit_rows: int64 [outputs], the rows whose logits are wanted.

    logits_of[seq] is where the outputs of that sequence lie in the logits: its root and its nodes, or
    nothing.
    """

    token_ids: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    logit_rows: Tensor
    logits_of: tuple[range, ...]


def make_batch(feeds: Seq[Feed]) -> Batch:
    """Lay the feeds out as one flat batch (on the CPU)."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    spans: list[Span] = []
    logits_of: list[range] = []
    for feed in feeds:
        parents = feed.draft.parents if feed.draft is not None else ()
        assert not (feed.tokens and feed.cached_nodes)
        span = Span(len(token_ids), len(feed.tokens), parents, feed.kv_len, feed.table, feed.cached_nodes)
        root_pos = feed.kv_len + span.pending - 1
        token_ids += feed.tokens
        positions += range(feed.kv_len, root_pos + 1)
        if feed.draft is not None and parents:
            token_ids += feed.draft.tokens[feed.cached_nodes :].tolist()
            positions += [root_pos + depth for depth in depths(parents)[feed.cached_nodes :]]
        first = len(logit_rows)
        if feed.draft is not None:
            root = span.start + span.pending - 1
            logit_rows += range(max(root, span.start), span.stop)
        spans.append(span)
        logits_of.append(range(first, len(logit_rows)))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        spans=tuple(spans),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logits_of=tuple(logits_of),
    )
