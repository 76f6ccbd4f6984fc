"""An EAGLE head as it drafts: the numbers of models/heads.py with fused and packed projections."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.models.attention import Attend, Head
from foredraft.models.fused import DecoderLayer, KnownAngles, Rotary, norm
from foredraft.models.heads import EagleLayer
from foredraft.models.packed import pack


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

    def logits(self, features: Tensor) -> Tensor:
        """features: [rows, hidden]. Returns float32 [rows, draft vocab]."""
        found: Tensor = self.to_logits(self.last(features))
        return found.float()

    def _rotary(self, positions: Tensor) -> Rotary:
        cos, sin = (part.unsqueeze(1).to(self.embedding.dtype) for part in self.cos_sin(positions))
        return Rotary(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
