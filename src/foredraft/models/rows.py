"""Attention of a few rows a sequence by the kernels: which slots each row sees, laid out once a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.engine.batch import Span
from foredraft.engine.kv import BLOCK, BlockPool, BlockTable
from foredraft.models import kernels, threads
from foredraft.tree import path_to

Ints = NDArray[np.int64]
# What attending takes: of one key head's key, and of one query beside it. Threads join in for more than
# _LEAST_NS, as waking one takes a tenth of that.
_KEY_NS, _QUERY_NS, _LEAST_NS = 38, 5, 300_000
_SPAN_BYTES = 4 * 8
MANY = 32  # rows of one part of a prompt


def parts(span: Span) -> list[Span]:
    """Part a span into some of few rows, which see no more than their last row does: a prompt's, then the
    nodes of its draft.
    """
    if span.rows <= MANY:
        return [span]
    found = []
    for first in range(0, span.pending, MANY):
        rows, kv_len = min(MANY, span.pending - first), span.kv_len + first
        found.append(replace(span, start=span.start + first, pending=rows, parents=(), kv_len=kv_len))
    if span.parents:
        start, kv_len = span.start + span.pending, span.kv_len + span.pending
        found.append(replace(span, start=start, pending=0, kv_len=kv_len))
    return found


class FewRows:
    """The rows of a batch, where they are written, and of some spans the slots that each row sees."""

    def __init__(self, batch: Seq[Span], spans: Seq[Span], rows: int) -> None:
        longest = max((span.length for span in spans), default=0)
        self.longest = BlockPool.needed(longest) * BLOCK
        self.most = max((span.rows for span in spans), default=0)
        ends: list[int] = [0] * rows
        tails: list[list[int]] = [[] for _ in range(rows)]
        shapes, at = [], 0
        for span in spans:
            shapes.append((span.start, span.rows, at, span.length))
            at += span.length
            _see(span, ends, tails)
        begins = np.zeros(rows + 1, np.int64)
        np.cumsum([len(tail) for tail in tails], out=begins[1:])
        slots = {id(span.table): slots_of(span.table) for span in batch}
        written = [slots[id(span.table)][span.first_slot : span.length] for span in batch]
        self.written = np.concatenate(written)
        self.arrays: tuple[Ints, ...] = (
            np.array(shapes, np.int64),
            np.concatenate([slots[id(span.table)][: span.length] for span in spans] or [self.written[:0]]),
            np.array(ends, np.int64),
            begins,
            np.array([column for tail in tails for column in tail], np.int64),
        )
        self._spans, *others = (array.ctypes.data for array in self.arrays)
        self._lists, self._written = tuple(others), self.written.ctypes.data
        self._plans: dict[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]] = {}

    def turn_and_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
        """Turn queries and keys of all rows, in place, and write keys and values; kernels.turn_and_write."""
        _, kv_heads, dim, _ = keys.shape
        kernels.turn_and_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._written,
            keys.data_ptr(),
            values.data_ptr(),
            len(self.written),
            qkv.shape[1] - 2 * kv_heads,
            kv_heads,
            dim,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scale: float | None,
        window: int | None,
    ) -> None:
        """Write what the rows make of the values they see into out [rows, heads, value_dim].

        query: [heads, rows, dim]; keys: [blocks, kv_heads, dim, BLOCK], values: [slots, kv_heads, value_dim],
        which hold the rows' own already.
        """
        heads, _, dim = query.shape
        _, kv_heads, value_dim = values.shape
        strides = (query.stride(1), query.stride(0))
        addresses = (query.data_ptr(), *strides, keys.data_ptr(), values.data_ptr(), out.data_ptr())
        scale = (dim**-0.5 if scale is None else scale) * kernels.LOG2E
        sizes = (dim, value_dim, scale, window or 0)
        most = self.most * heads // kv_heads

        def run(part: tuple[int, ...], scratch: Tensor) -> None:
            first, count, *some_heads = part
            kernels.attend(
                *addresses,
                self._spans + first * _SPAN_BYTES,
                count,
                *self._lists,
                heads,
                kv_heads,
                *some_heads,
                *sizes,
                scratch.data_ptr(),
                self.longest,
                most,
            )

        (part, scratch), *others = self._plan(heads, kv_heads, dim, value_dim)
        running = [threads.pool().submit(run, *other) for other in others]
        run(part, scratch)
        for other in running:
            other.result()

    def told(self, heads: int, kv_heads: int, dim: int) -> tuple[tuple[int, ...], int]:
        """Return what kernels that attend are told: spans, slots, ends, where tails begin, tails, the longest
        span and most queries of a key head; and how many numbers attending works in.
        """
        most = self.most * heads // kv_heads
        seen = (self._spans, *self._lists, self.longest, most)
        return seen, kernels.scratch_size(dim, dim, self.longest, most)

    @property
    def places(self) -> tuple[int, int]:
        """Where the slots of the rows are, and how many spans there are."""
        return self._written, len(self.arrays[0])

    def _plan(
        self, heads: int, kv_heads: int, dim: int, value_dim: int
    ) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return what each thread does, and where it works: the first span, how many spans, the first and the
        last of the key heads.
        """
        key = (heads, kv_heads, dim, value_dim)
        if key not in self._plans:
            size = kernels.scratch_size(dim, value_dim, self.longest, self.most * heads // kv_heads)
            self._plans[key] = [(part, torch.empty(size)) for part in self._parts(heads, kv_heads)]
        return self._plans[key]

    def _parts(self, heads: int, kv_heads: int) -> list[tuple[int, ...]]:
        spans, (_, rows, _, lengths) = len(self.arrays[0]), self.arrays[0].T
        costs = lengths * (_KEY_NS * kv_heads + _QUERY_NS * rows * heads)
        count = threads.count()
        if count == 1 or costs.sum() < _LEAST_NS:
            return [(0, spans, 0, kv_heads)]
        if spans < count:
            ends = _divided(np.ones(kv_heads), count)
            return [(0, spans, first, last) for first, last in pairwise(ends)]
        return [(first, last - first, 0, kv_heads) for first, last in pairwise(_divided(costs, count))]


def _divided(costs: NDArray[Any], parts: int) -> list[int]:
    """Return where to cut a row of costs so that each part has about as much: 0, …, how many."""
    until = np.cumsum(costs)
    cuts = np.searchsorted(until, until[-1] * np.arange(1, parts) / parts)
    return sorted({0, *(int(cut) + 1 for cut in cuts), len(costs)})


def slots_of(table: BlockTable) -> Ints:
    """Return the slots of all positions of a sequence, int64 [capacity]."""
    return (np.array(table.blocks, np.int64)[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def _see(span: Span, ends: list[int], tails: list[list[int]]) -> None:
    """Note how many positions in a row each row of a span sees, and which others after these."""
    for row in range(span.pending):
        ends[span.start + row] = span.kv_len + row + 1
    text, chain = span.kv_len + span.pending, span.is_chain
    for node in range(span.cached_nodes, len(span.parents)):
        row = span.start + span.pending + node - span.cached_nodes
        if chain:
            ends[row] = text + node + 1
        else:
            ends[row] = text
            tails[row] = [text + above for above in path_to(span.parents, node)]
