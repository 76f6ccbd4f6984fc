"""An EAGLE head as it drafts: the numbers of models/heads.py with fused and packed projections."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.models.attention import Attend, Head
from foredraft.models.fused import Norm, Rotary, swiglu
from foredraft.models.heads import EagleLayer
from foredraft.models.packed import pack, pack_together


class FastEagle:
    """Drafting passes of a head. embedding: [vocab, hidden]; projection: [draft vocab, hidden]."""

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        layer, config = head.midlayer, head.config
        attention, mlp = layer.self_attn, layer.mlp
        self.cos_sin, self.embedding, self.dim = head.cos_sin, embedding, config.head_dim
        self.queries, self.turned = config.heads, config.heads + config.kv_heads
        self.fuse = pack(head.fc.weight.detach())
        self.qkv = pack_together([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = pack(attention.o_proj.weight.detach())
        self.gate_up = pack_together([mlp.gate_proj, mlp.up_proj])
        self.down = pack(mlp.down_proj.weight.detach())
        self.to_logits = pack(projection)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        self.of_embeds, self.of_features, self.before_mlp, self.last = (
            Norm(norm.weight.detach(), config.norm_eps) for norm in norms
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: int64 [rows]; features: [rows, hidden]. Returns the features of the next
        positions [rows, hidden] and writes the cache.
        """
        embeds = self.of_embeds(self.embedding[token_ids])
        qkv = self.qkv(torch.cat([embeds, self.of_features(features)], -1)).view(len(token_ids), -1, self.dim)
        both = self._rotary(positions, qkv.dtype)(qkv[:, : self.turned])
        query, key, value = both[:, : self.queries], both[:, self.queries :], qkv[:, self.turned :]
        found = attend(0, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), Head())
        x: Tensor = features + self.out(found.flatten(1))
        made: Tensor = self.down(swiglu(self.gate_up(self.before_mlp(x))))
        return made.add_(x)

    def logits(self, features: Tensor) -> Tensor:
        """features: [rows, hidden]. Returns float32 [rows, draft vocab]."""
        found: Tensor = self.to_logits(self.last(features))
        return found.float()

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        cos, sin = (part.unsqueeze(1).to(dtype) for part in self.cos_sin(positions))
        return Rotary(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
