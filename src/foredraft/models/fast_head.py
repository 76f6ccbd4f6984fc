"""Heads as they draft: the numbers of models/heads.py with fused and packed projections. A few rows of an
EAGLE head on a CPU take one kernel, with weights in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import BLOCK, BlockTable, KVCache, LayerShape
from foredraft.models import kernels
from foredraft.models.attention import Attend, Head, quick
from foredraft.models.fused import DecoderLayer, KnownAngles, Linear, Rotary, norm
from foredraft.models.heads import EagleLayer, MedusaHeads
from foredraft.models.packed import pack
from foredraft.types import NO_DRAFT

_FEW = 8  # rows up to which one kernel is faster


class FastEagle:
    """Drafting passes of a head. embedding: [vocab, hidden]; projection: [draft vocab, hidden]."""

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        self.cos_sin, self.embedding = head.cos_sin, embedding
        self.fuse = pack(head.fc.weight)
        self.layer = DecoderLayer(head.midlayer, Head())
        self.to_logits = pack(projection)
        on_cpu = embedding.device.type == "cpu"
        self.angles = KnownAngles(self._rotary) if on_cpu else self._rotary
        self.of_features, self.last = norm(head.midlayer.hidden_norm), norm(head.norm)
        few = quick(embedding) and head.config.head_dim % kernels.LEAST == 0
        self._few = _FewRowsHead(head, embedding, projection) if few else None
        if few:
            self._compile(LayerShape(head.config.kv_heads, head.config.head_dim, head.config.head_dim))

    def __call__(self, token_ids: Tensor, positions: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: int64 [rows]; features: [rows, hidden]. Returns the features of the next
        positions [rows, hidden] and writes the cache.
        """
        embeds = self.layer.before_attention(self.embedding[token_ids])
        normed = torch.cat([embeds, self.of_features(features)], -1)
        found, _ = self.layer.run(
            features, normed, len(features), 0, self.angles(positions), attend, self.last
        )
        return found

    def run(self, batch: Batch, features: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run over a batch; features: [rows, hidden]. Returns, of its logit rows, the features of the next
        positions [outputs, hidden] and the logits after them, float32 [outputs, draft vocab].
        """
        device = features.device
        if self._few is not None and len(features) <= _FEW:
            return self._few(batch, features, self.angles(batch.positions), attend)
        found = self(batch.token_ids.to(device), batch.positions.to(device), features, attend)
        found = found[batch.logit_rows.to(device)]
        return found, self.logits(found)

    def _compile(self, shape: LayerShape) -> None:
        """Run once, so that no request waits for the compiler."""
        kv, table = KVCache([shape], BLOCK, dtype=self.embedding.dtype, turned=True), BlockTable()
        kv.pool.grow(table, 1)
        batch = make_batch([Feed([0], 0, table, NO_DRAFT)])
        features = self.embedding.new_zeros(1, self.embedding.shape[1])
        self.run(batch, features, Attend(batch, kv, kv.device, features.dtype))

    def logits(self, features: Tensor) -> Tensor:
        """features: [rows, hidden]. Returns float32 [rows, draft vocab]."""
        if len(features) == 0:
            return torch.zeros(0, self.to_logits.out_features, device=features.device)
        found: Tensor = self.to_logits(self.last(features))
        return found.float()

    def _rotary(self, positions: Tensor) -> Rotary:
        cos, sin = (part.unsqueeze(1).to(self.embedding.dtype) for part in self.cos_sin(positions))
        return Rotary(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


class _FewRowsHead:
    """The same by kernels.head_pass; holds what the addresses point to."""

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        config, layer = head.config, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._norms = [
            part.weight.detach().to(embedding.dtype)
            for part in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        ]
        together = [
            torch.cat([part.weight.detach() for part in parts])
            for parts in (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (attention.o_proj,),
                (mlp.gate_proj, mlp.up_proj),
                (mlp.down_proj,),
            )
        ]
        self._packed = [part for weight in (*together, projection) for part in in_bytes(weight)]
        held = (embedding, *self._norms, *self._packed)
        self._weights = np.array([part.data_ptr() for part in held], np.int64)
        shape = (config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim)
        self._sizes = np.array([*shape, len(projection)], np.int64)
        self._work = torch.empty(kernels.work_size(_FEW, *shape), dtype=torch.uint8)
        self._eps, self._heads = config.norm_eps, (config.heads, config.kv_heads, config.head_dim)

    def __call__(
        self, batch: Batch, features: Tensor, rotary: Rotary, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        assert attend.few is not None
        keys, values = attend.kv.keys[0], attend.kv.values[0]
        found, wanted = torch.empty_like(features), batch.logit_rows
        logits = torch.empty(len(wanted), int(self._sizes[-1]))
        seen, attending = attend.few.told(*self._heads)
        scratch = torch.empty(attending)
        kernels.head_pass(
            self._weights,
            self._sizes,
            self._eps,
            batch.token_ids.data_ptr(),
            len(features),
            features.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            (keys.data_ptr(), values.data_ptr()),
            seen,
            (wanted.data_ptr(), len(wanted)),
            found.data_ptr(),
            logits.data_ptr(),
            (self._work.data_ptr(), scratch.data_ptr()),
        )
        return found[wanted], logits


class FastMedusa:
    """Guesses of Medusa heads. projection: [draft vocab, hidden]."""

    def __init__(self, heads: MedusaHeads, projection: Tensor) -> None:
        self._heads: list[list[Linear]] = [
            [pack(block.linear.weight, block.linear.bias) for block in cast(Iterable[Any], head)]
            for head in heads.heads
        ]
        self._to_logits = pack(projection)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden]. Returns logits, float32 [rows, heads, draft vocab]."""
        found = []
        for blocks in self._heads:
            x = hidden
            for linear in blocks:
                x = x + F.silu(linear(x))
            found.append(x)
        logits: Tensor = self._to_logits(torch.stack(found, 1))
        return logits.float()


def in_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [out, in] as kernels.head_pass takes it: int8 [tiles, in, kernels.TILE], and the scale of
    each output, float32 [out].
    """
    scales = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    small = (weight.float() / scales[:, None]).round().to(torch.int8)
    small = torch.cat([small, small.new_zeros(-len(small) % kernels.TILE, small.shape[1])])
    return small.view(-1, kernels.TILE, small.shape[1]).transpose(1, 2).contiguous(), scales
