"""Passes of fixed shape: a step of a few rows a sequence, padded to a bucket, over inputs that stay in place.

What such a pass does depends on its bucket alone, never on the numbers in it: on a CUDA device it is recorded
once and then replayed in one launch, on a CPU the same code runs as it is. Host work is one list of integers
a step, copied to the device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foredraft.engine.batch import Batch, Span
from foredraft.engine.kv import KVCache, blocks_of
from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.models.attention import Head, attention

MOST_SEQS = 32
MOST_ROWS = 32  # of a sequence, nodes of earlier passes included
_LAST_BIT = 63  # never set: rows are fewer

Outputs = tuple[Tensor, ...]
Work = Callable[[], Outputs]
Record = Callable[[Work], Work]  # from a pass to one that does the same to the same tensors


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a pass: sequences, rows of each, and blocks of cache that each can see."""

    seqs: int
    rows: int
    blocks: int

    @classmethod
    def of(cls, batch: Batch) -> Bucket | None:
        """Return the smallest bucket that a batch fits in, or None if it is too large for any."""
        seqs = len(batch.spans)
        rows = max(span.length - span.kv_len for span in batch.spans)
        if seqs > MOST_SEQS or rows > MOST_ROWS:
            return None
        blocks = max(BlockPool.needed(span.length) for span in batch.spans)
        return cls(_power(seqs), _power(rows), _power(blocks))

    @property
    def size(self) -> int:
        """All rows, padding included."""
        return self.seqs * self.rows


class Inputs:
    """What one pass reads: views of one int64 buffer on the device, and features if rows bring any.

    tokens, positions, slots: [seqs * rows], a row's token, its position in the text and where it is written.
    seen: [seqs * rows], bit j set where the row sees position `base + j` of its sequence. base: [seqs], the
    positions below which all is seen. blocks: [seqs * blocks], of the cache. real: [seqs * rows], where the
    rows of the batch are, and wanted: [seqs * rows], where its logit rows are, both filled up with zeros.
    features: [seqs * rows, width], old ones in padding rows.
    """

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        self.bucket, self.device = bucket, like.device
        self.features = like.new_zeros(bucket.size, like.shape[-1])
        rows, per_seq = bucket.size, [bucket.seqs * bucket.blocks, bucket.seqs]
        self._all = torch.zeros(6 * rows + sum(per_seq), dtype=torch.int64, device=like.device)
        parts = torch.split(self._all, [*[rows] * 6, *per_seq])
        self.tokens, self.positions, self.slots, self.seen, self.real, self.wanted = parts[:6]
        self.blocks, self.base = parts[6:]

    def fill(self, batch: Batch, padding: int, features: Tensor | None = None) -> None:
        """Copy in a batch that fits the bucket, without waiting; padding is written to block `padding`.
        features: [rows of the batch, width].
        """
        values = packed(batch, self.bucket, padding)
        pinned = self.device.type == "cuda"
        self._all.copy_(torch.tensor(values, dtype=torch.int64, pin_memory=pinned), non_blocking=True)
        if features is not None:
            self.features.index_copy_(0, self.real[: len(features)], features)


def packed(batch: Batch, bucket: Bucket, padding: int) -> list[int]:
    """Return the numbers of Inputs in their order.

    Padding rows are token 0 at position 0. They see the context and the first position behind it, so that
    softmax has something to sum; what they compute is dropped. Padding blocks are the sequence's first.
    """
    size = bucket.size
    tokens, positions = [0] * size, [0] * size
    slots = [padding * BLOCK + row % BLOCK for row in range(size)]
    seen = [1] * size
    blocks, base = [padding] * (bucket.seqs * bucket.blocks), [0] * bucket.seqs
    flat_tokens, flat_positions = batch.token_ids.tolist(), batch.positions.tolist()
    real: list[int] = []
    for seq, span in enumerate(batch.spans):
        first = seq * bucket.rows
        here = slice(first, first + span.rows)
        tokens[here] = flat_tokens[span.start : span.stop]
        positions[here] = flat_positions[span.start : span.stop]
        table = span.table.blocks
        slots[here] = [
            table[pos // BLOCK] * BLOCK + pos % BLOCK for pos in range(span.first_slot, span.length)
        ]
        seen[here] = seen_bits(span)
        used = table[: BlockPool.needed(span.length)]
        row = seq * bucket.blocks
        blocks[row : row + bucket.blocks] = used + used[:1] * (bucket.blocks - len(used))
        base[seq] = span.kv_len
        real += range(first, first + span.rows)
    wanted = [real[row] for row in batch.logit_rows.tolist()]
    real += [0] * (size - len(real))
    wanted += [0] * (size - len(wanted))
    return [*tokens, *positions, *slots, *seen, *real, *wanted, *blocks, *base]


def seen_bits(span: Span) -> list[int]:
    """Return, for each row of a span, which positions from kv_len on it sees: bit j for kv_len + j.

    Pending tokens see those before them, nodes all of them and their ancestors; each sees itself.
    """
    pending = [(2 << row) - 1 for row in range(span.pending)]
    root = (1 << span.pending) - 1
    nodes: list[int] = []
    for node, parent in enumerate(span.parents):
        above = root if parent < 0 else nodes[parent]
        nodes.append(above | 1 << span.pending + node)
    return pending + nodes[span.cached_nodes :]


@dataclass(slots=True)
class Gathered:
    """Attention of one pass, called by layers as Attend is: writes the rows, then reads whole blocks."""

    inputs: Inputs
    keys: Seq[Tensor]
    values: Seq[Tensor]
    dtype: torch.dtype
    masks: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, head: Head) -> Tensor:
        """query: [heads, seqs * rows, dim]; key, value: [kv_heads, seqs * rows, dim]. Returns [seqs * rows,
        heads, value_dim].
        """
        assert head.window is None
        bucket = self.inputs.bucket
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self.inputs.slots, key.transpose(0, 1))
        values.index_copy_(0, self.inputs.slots, value.transpose(0, 1))
        heads, _, dim = query.shape
        q = query.view(heads, bucket.seqs, bucket.rows, dim).transpose(0, 1)
        share = heads // key.shape[0]
        out = attention(q, self._read(keys), self._read(values), self._mask(share), head, share)
        return out.transpose(1, 2).flatten(0, 1)

    def _read(self, store: Tensor) -> Tensor:
        """Return the blocks of each sequence of a store [slots, kv_heads, dim]: [seqs, kv_heads, length,
        dim].
        """
        found = blocks_of(store, self.inputs.blocks)
        return found.view(self.inputs.bucket.seqs, -1, *store.shape[1:]).transpose(1, 2)

    def _mask(self, share: int) -> Tensor:
        """Additive mask [seqs, 1, share * rows, length], made by the first layer that asks."""
        if share not in self.masks:
            inputs, bucket = self.inputs, self.inputs.bucket
            length = torch.arange(bucket.blocks * BLOCK, device=inputs.device)
            column = (length - inputs.base[:, None])[:, None]  # [seqs, 1, length], from base on
            bits = inputs.seen.view(bucket.seqs, bucket.rows, 1) >> column.clamp(0, _LAST_BIT)
            hidden = (bits & 1 == 0) & (column >= 0)  # [seqs, rows, length]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=inputs.device)
            mask.masked_fill_(hidden, float("-inf"))
            self.masks[share] = mask.repeat(1, share, 1).unsqueeze(1)
        return self.masks[share]


Body = Callable[[Inputs, Any, Hashable], Outputs]


@dataclass(frozen=True, slots=True)
class _Known:
    """What was recorded of one cache, and by what: memory that recordings share goes with all of them."""

    record: Record
    passes: dict[Hashable, tuple[Inputs, Work]] = field(default_factory=dict)


class Passes:
    """The passes of one model, one a cache, bucket and `kind`: recorded when first met, run from then on.

    body(inputs, attend, kind) runs the model over all rows and returns tensors [seqs * rows, …]. Those of a
    recorded pass are overwritten by the next one, so nothing but copies of them may leave the caller.
    like: [0, width], of the dtype and device of the model; width of the features that rows bring, if any.
    """

    def __init__(self, body: Body, like: Tensor, record: Record | None = None) -> None:
        self._body, self._like, self._record = body, like, record
        # A pass holds a cache's tensors, never the cache: it goes when the cache does.
        self._known: WeakKeyDictionary[KVCache, _Known] = WeakKeyDictionary()

    def run(
        self, batch: Batch, bucket: Bucket, kv: KVCache, kind: Hashable = (), features: Tensor | None = None
    ) -> tuple[Inputs, Outputs]:
        """Write the batch's keys and values; return where its rows are, and the body's outputs."""
        known = self._known.get(kv)
        if known is None:
            known = self._known[kv] = _Known(self._record or recorder(self._like.device))
        inputs, work = known.passes.get((bucket, kind), (None, None))
        if inputs is None or work is None:
            inputs = Inputs(bucket, self._like)
            inputs.fill(batch, kv.padding, features)  # recording runs the pass, which writes to these slots
            work = known.record(self._pass(inputs, kv, kind))
            known.passes[bucket, kind] = inputs, work
        else:
            inputs.fill(batch, kv.padding, features)
        return inputs, work()

    def _pass(self, inputs: Inputs, kv: KVCache, kind: Hashable) -> Work:
        body, keys, values, dtype = self._body, kv.keys, kv.values, self._like.dtype
        return lambda: body(inputs, Gathered(inputs, keys, values, dtype), kind)


def recorder(device: torch.device) -> Record:
    """Return what records passes on a device: CUDA graphs in one memory pool, or nothing elsewhere."""
    if device.type != "cuda":
        return lambda work: work
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(work: Work) -> Work:
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries set themselves up at a first call, which cannot be captured
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = work()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    return record


def _power(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
