"""Heads as they draft: the numbers of models/heads.py with fused and packed projections."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.models.attention import Attend, Head
from foredraft.models.fused import DecoderLayer, KnownAngles, Linear, Rotary, norm
from foredraft.models.heads import EagleLayer, MedusaHeads
from foredraft.models.packed import pack


class FastEagle:
    """Drafting passes of a head. embedding: [vocab, hidden]; projection: [draft vocab, hidden]."""

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        self.embedding = embedding
        self.fuse = pack(head.fc.weight)
        self.layer = DecoderLayer(head.midlayer, Head())
        self.to_logits = pack(projection)
        on_cpu = embedding.device.type == "cpu"
        angles = partial(eagle_angles, head, embedding.dtype)
        self.angles = KnownAngles(angles) if on_cpu else angles
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

    def run(self, batch: Batch, features: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run over a batch; features: [rows, hidden]. Returns, of its logit rows, the features of the next
        positions [outputs, hidden] and the logits after them, float32 [outputs, draft vocab].
        """
        device = features.device
        found = self(batch.token_ids.to(device), batch.positions.to(device), features, attend)
        found = found[batch.logit_rows.to(device)]
        return found, self.logits(found)

    def logits(self, features: Tensor) -> Tensor:
        """features: [rows, hidden]. Returns float32 [rows, draft vocab]."""
        if len(features) == 0:
            return torch.zeros(0, self.to_logits.out_features, device=features.device)
        found: Tensor = self.to_logits(self.last(features))
        return found.float()


def eagle_angles(head: EagleLayer, dtype: torch.dtype, positions: Tensor) -> Rotary:
    """The angles of a head's positions, int64 [rows]."""
    cos, sin = (part.unsqueeze(1).to(dtype) for part in head.cos_sin(positions))
    return Rotary(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


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
