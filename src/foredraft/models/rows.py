"""Which slots each row of a batch sees, laid out once a step, and attention of few rows by the kernels."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.engine.batch import Span
from foredraft.engine.kv import LayerShape
from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.models import kernels, threads

Ints = NDArray[np.int64]
_ALONE = 8000  # keys, read by units of rows, up to which waking threads takes longer than what they save


class Rows:
    """Where the rows of a batch are written and what they see."""

    def __init__(self, spans: Seq[Span]) -> None:
        told, blocks, most, tails = [], 0, 0, 0
        for span in spans:
            nodes = len(span.parents)
            told.append((span.start, span.pending, span.kv_len, span.cached_nodes, nodes, blocks))
            blocks, most = blocks + len(span.table.blocks), most + -(-span.rows // kernels.UNIT) + 1
            tails += nodes * nodes
        rows = spans[-1].stop
        self.written, self.prefix, self.tail_at = np.empty((3, rows + 1), np.int64)
        self.slots = np.empty(sum(span.length for span in spans), np.int64)
        self.units, self.tails = np.empty((most, 4), np.int64), np.empty(tails, np.int64)
        self.count, self.longest, self.deepest = kernels.lay_out(
            np.array(told, np.int64),
            np.array(list(chain.from_iterable(span.parents for span in spans)), np.int64),
            np.array(list(chain.from_iterable(span.table.blocks for span in spans)), np.int64),
            self.slots,
            self.written,
            self.prefix,
            self.tail_at,
            self.tails,
            self.units,
        )

    def told(self, heads: int, kv_heads: int, dim: int, value_dim: int) -> tuple[tuple[int, ...], int]:
        """Return what kernels.attended is told of the rows: where units, slots, prefix, tail_at and tails
        are, the longest text, the most queries of a key head, the longest tail, how many key heads attend
        together; and how many bytes attend works in.
        """
        parts = (self.units, self.slots, self.prefix, self.tail_at, self.tails)
        cap, most = BlockPool.needed(self.longest) * BLOCK, kernels.UNIT * heads // kv_heads
        together = kernels.heads_together(self.count, kv_heads, cap, most, torch.get_num_threads())
        sizes = (cap, most, self.deepest, together)
        size = kernels.scratch_size(dim, value_dim, *sizes)
        return (*(part.ctypes.data for part in parts), *sizes), size

    def attend(
        self,
        query: Tensor,
        cache: Ints,
        shape: LayerShape,
        out: Tensor,
        scale: float | None,
        window: int | None,
    ) -> None:
        """Write what the rows make of the values they see into out [rows, heads, value_dim].

        query: [heads, rows, dim]; cache: where keys and values are, which hold the rows' own already.
        """
        heads, _, dim = query.shape
        kv_heads, value_dim = shape.heads, shape.value_dim
        seen, size = self.told(heads, kv_heads, dim, value_dim)
        board = np.zeros(kernels.PHASE_BYTES // 8, np.int64)
        told = (
            board.ctypes.data,
            0,
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            cache,
            out.data_ptr(),
            self.count,
            np.array(seen, np.int64),
            heads,
            kv_heads,
            dim,
            value_dim,
            (dim**-0.5 if scale is None else scale) * kernels.LOG2E,
            window or 0,
        )
        alone = int(self.units[: self.count, 3].sum()) * kv_heads < _ALONE
        threads.share(kernels.attended, told, kernels.own_bytes(size), alone=alone)
