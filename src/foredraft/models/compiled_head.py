"""An EAGLE head on a CPU in bfloat16: all levels of its trees in one compiled call that the threads share.

What a head guesses need not be exact, and reading its weights is what a level takes: they are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BLOCK, BlockPool, BlockTable
from foredraft.models import kernels, threads
from foredraft.models.attention import Attend, quick
from foredraft.models.fast_head import eagle_angles
from foredraft.models.fused import KnownAngles
from foredraft.models.heads import EagleLayer
from foredraft.models.tiles import Tiles

Ints = NDArray[np.int64]
_STATES = kernels.LEVELS + 1  # of levels, the last of which feeds nothing


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a sequence's tree begins with: tokens, and the features [tokens, fused width] of the positions
    before them, whose slots in `table` are those from `first` on; how many nodes and levels it may have, 0 to
    write the cache only. Of a request that is not greedy the keys of the noise with which the target will
    draw at each level, and how much it counts beside the logits.
    """

    tokens: Seq[int]
    features: Tensor
    first: int
    table: BlockTable
    budget: int = 0
    levels: int = 0
    luck: float = 0.0
    keys: Seq[int] = ()


class Grown(NamedTuple):
    """Candidates of one tree: tokens of the target, the fed node that each hangs from (-1: the root), and the
    log-probability of its path. fed: which candidate each fed node is.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    fed: list[int]


class CompiledEagle:
    """Drafting passes of a head. embedding: [vocab, hidden]; projection: [draft vocab, hidden]."""

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        config, layer = head.config, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._embedding, self._eps = embedding, config.norm_eps
        self._ids = head.target_ids.numpy()
        widths = (config.hidden_size, config.intermediate_size)
        self._shape = (*widths, config.heads, config.kv_heads, config.head_dim)
        self._sizes = np.array([*self._shape, len(projection), head.fc.in_features], np.int64)
        self._scale = config.head_dim**-0.5 * kernels.LOG2E
        together = (attention.q_proj, attention.k_proj, attention.v_proj)
        products = [
            head.fc.weight.detach(),
            torch.cat([part.weight.detach() for part in together]),
            attention.o_proj.weight.detach(),
            kernels.interleaved(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()),
            mlp.down_proj.weight.detach(),
            projection,
        ]
        tiles = self._tiles = Tiles(outputs=max(len(weight) for weight in products))
        fc, qkv, out, gate_up, down, to_logits = (tiles.in_bytes(weight) for weight in products)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        of_tokens, of_features, before_mlp, last = ((tiles.vector(part.weight), 0) for part in norms)
        parts = [(embedding.data_ptr(), 0), of_tokens, of_features, fc, qkv, out, before_mlp, gate_up, down]
        parts += [last, to_logits, (tiles.no_bias, 0)]
        self._head, self._scales = np.ascontiguousarray(np.array(parts, np.int64).T)
        self._angles = KnownAngles(partial(eagle_angles, head, embedding.dtype))
        self._compile(LayerShape(config.kv_heads, config.head_dim, config.head_dim))

    def fuse(self, features: Tensor) -> Tensor:
        """features: [rows, fused width]. Returns [rows, hidden]."""
        features, board = features.contiguous(), np.zeros(kernels.PHASE_BYTES // 8, np.int64)
        found = features.new_empty(len(features), self._shape[0])
        told = (board.ctypes.data, 0, features.data_ptr(), *features.shape, int(self._head[3]))
        how = (int(self._scales[3]), self._tiles.no_bias, self._shape[0], found.data_ptr(), kernels.PUT)
        threads.share(kernels.product, (*told, *how), kernels.own_bytes(0, *features.shape), alone=True)
        return found

    def run(self, batch: Batch, features: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run one level over a batch; features: [rows, hidden]. Returns, of its logit rows, the features of
        the next positions [outputs, hidden] and the logits after them, float32 [outputs, draft vocab].
        """
        sight = attend.rows
        assert sight is not None
        rows, wanted, x = len(features), batch.logit_rows.numpy(), features.clone()
        told = np.zeros((7, rows + 1), np.int64)
        told[0, :rows], told[1, :rows] = batch.token_ids.numpy(), batch.positions.numpy()
        told[2], told[3], told[4], told[6, : len(wanted)] = sight.written, sight.prefix, sight.tail_at, wanted
        state = np.zeros((_STATES, 3), np.int64)
        state[0] = rows, len(wanted), sight.count
        level = _Level(
            sight.slots, told, sight.tails, sight.units, state, sight.longest, kernels.UNIT, sight.deepest
        )
        logits = self._share(attend.kv, level, _Trees.of([]), x, None, len(wanted))
        return x[batch.logit_rows], logits

    def grow(self, begun: Seq[Waiting], kv: KVCache, worth: float = 0.0) -> list[Grown]:
        """Write the cache for what waits and grow the trees of those that have levels. worth: the chance that
        one of a level's best nodes is right under which no deeper level is tried.
        """
        trees = _Trees.of(begun)
        first, grown = sum(len(tree.tokens) for tree in begun), sum(tree.levels > 0 for tree in begun)
        rows = max(first, kernels.BEST * grown)
        told, state = np.zeros((7, rows + 1), np.int64), np.zeros((_STATES, 3), np.int64)
        told[0, :first] = [token for tree in begun for token in tree.tokens]
        slots = np.concatenate([_slots(tree.table) for tree in begun])
        spans = np.zeros((grown, 4), np.int64)
        kernels.lay_out_first(trees.seqs, slots, told, spans, state[0])
        tails = np.zeros(rows * kernels.LEVELS, np.int64)
        longest = max(tree.first + len(tree.tokens) + kernels.FED for tree in begun)
        most = max([kernels.BEST, *(len(tree.tokens) for tree in begun if tree.levels > 0)])
        level = _Level(slots, told, tails, spans, state, longest, most, kernels.LEVELS)
        features = [tree.features for tree in begun]
        fused = features[0] if len(features) == 1 else torch.cat(features)
        x = fused.new_empty(rows, self._shape[0])
        self._share(kv, level, trees, x, fused.contiguous(), kernels.BEST * grown, worth)
        return trees.grown()

    def _share(
        self,
        kv: KVCache,
        level: _Level,
        trees: _Trees,
        x: Tensor,
        features: Tensor | None,
        outputs: int,
        worth: float = 0.0,
    ) -> Tensor:
        """Run the kernel in all threads. x: [rows, hidden], the first level's if no features [rows, fused
        width] are to be fused. Returns logits, float32 [outputs, draft vocab].
        """
        hidden, inner, queries, kv_heads, dim = self._shape
        # What the levels work in: x of the level before, normed, qkv, attended, gated and the wanted rows.
        widths = (hidden, 2 * hidden, (queries + 2 * kv_heads) * dim, queries * dim, inner)
        parts = np.array([0, *(len(x) * width for width in widths)], np.int64).cumsum()
        room = x.new_empty(int(parts[-1]) + outputs * hidden)
        logits = torch.empty(outputs, int(self._sizes[5]))
        buffers = (x.data_ptr(), *(room.data_ptr() + x.itemsize * parts), logits.data_ptr())
        known = self._angles.until(int(level.rows[1].max()) + kernels.LEVELS)
        row_at = [row.ctypes.data for row in level.rows]
        longest, most = BlockPool.needed(level.longest) * BLOCK, level.most * queries // kv_heads
        spans, slots, tails = (part.ctypes.data for part in (level.spans, level.slots, level.tails))
        board = np.zeros(_STATES * kernels.LEVEL_PHASES * kernels.PHASE_BYTES // 8, np.int64)
        together = kernels.heads_together(len(level.spans), kv_heads, longest, most, torch.get_num_threads())
        sizes = (longest, most, level.deepest, together)
        most = max(2 * hidden, inner, queries * dim, int(self._sizes[6]))
        size = kernels.own_bytes(kernels.scratch_size(dim, dim, *sizes), max(len(x), outputs), most)
        told = (
            board.ctypes.data,
            self._head,
            self._scales,
            self._sizes,
            np.array([*buffers, 0 if features is None else features.data_ptr()], np.int64),
            kv.addresses[0],
            *trees,
            level.slots,
            level.rows,
            level.tails,
            level.spans,
            level.state,
            self._ids,
            np.array([known.cos.data_ptr(), known.sin.data_ptr(), row_at[1]], np.int64),
            np.array([spans, slots, *row_at[3:5], tails, *sizes], np.int64),
            self._eps,
            self._scale,
            worth,
        )
        threads.share(kernels.run_head, told, size)
        return logits

    def _compile(self, shape: LayerShape) -> None:
        """Run once, so that no request waits for the compiler."""
        kv, table = KVCache([shape], BLOCK, dtype=self._embedding.dtype, turned=True), BlockTable()
        kv.pool.grow(table, 1)
        self.grow([Waiting([0], self._embedding.new_zeros(1, int(self._sizes[6])), 0, table, 1, 1)], kv)


class _Level(NamedTuple):
    """What the kernel is told of a level, see run_head; the longest text, the most rows of a span and the
    longest tail.
    """

    slots: Ints
    rows: Ints
    tails: Ints
    spans: Ints
    state: Ints
    longest: int
    most: int
    deepest: int


class _Trees(NamedTuple):
    """What it is told of sequences, and what it finds."""

    seqs: Ints
    luck: NDArray[np.float64]
    keys: Ints
    found: tuple[Ints, Ints, NDArray[np.float64]]
    fed: Ints

    @classmethod
    def of(cls, begun: Seq[Waiting]) -> _Trees:
        """Lay out sequences whose trees begin."""
        seqs, at = np.zeros((len(begun), kernels.SEQ_FIELDS), np.int64), 0
        for row, tree in zip(seqs, begun, strict=True):
            room = min(kernels.FED, tree.table.capacity - tree.first - len(tree.tokens))
            row[:6] = len(tree.tokens), tree.first, at, tree.budget, tree.levels, room
            at += tree.table.capacity
        luck = np.array([tree.luck for tree in begun], np.float64)
        keys = np.zeros((len(begun), kernels.LEVELS), np.int64)
        for row, tree in zip(keys, begun, strict=True):
            row[: len(tree.keys)] = tree.keys
        candidates = (len(begun), kernels.CANDIDATES)
        found = (np.zeros(candidates, np.int64), np.zeros(candidates, np.int64), np.zeros(candidates))
        return cls(seqs, luck, keys, found, np.zeros((len(begun), kernels.FED), np.int64))

    def grown(self) -> list[Grown]:
        """Return the trees."""
        tokens, parents, scores = self.found
        return [
            Grown(
                tokens[place, : seq[kernels.FOUND]].tolist(),
                parents[place, : seq[kernels.FOUND]].tolist(),
                scores[place, : seq[kernels.FOUND]].tolist(),
                self.fed[place, : seq[kernels.TAKEN]].tolist(),
            )
            for place, seq in enumerate(self.seqs)
        ]


def can_compile_head(head: EagleLayer, embedding: Tensor) -> bool:
    """True in bfloat16 on a CPU, for a layer and shapes that the kernels take."""
    config = head.config
    even = all(width % 2 == 0 for width in (config.hidden_size, config.intermediate_size))
    return quick(embedding) and config.plain and even and config.head_dim % kernels.LEAST == 0


def _slots(table: BlockTable) -> Ints:
    """Return the slots of all positions of a sequence, int64 [capacity]."""
    return (np.array(table.blocks, np.int64)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
