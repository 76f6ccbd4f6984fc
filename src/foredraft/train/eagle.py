"""The loss of an EAGLE head, unrolled as it drafts (EAGLE-3, Li et al., arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.models.heads import EagleLayer
from foredraft.train.data import Batch, mean

DECAY = 0.8  # of a level's weight in the loss, per level
FIRST = 2  # levels of the first epoch: while these are bad, later ones teach nothing
_PROJECTED = 0.5  # share of the places whose later levels are projected to the vocabulary: that costs most


@dataclass(frozen=True, slots=True)
class Places:
    """The places from which drafts start, and where they lie in a padded batch.

    answer, row, column: int64 [places]; a place drafts from the token of its row on. column counts the rows
    of an answer from its first place on.
    """

    answer: Tensor
    row: Tensor
    column: Tensor
    left: Tensor  # how many rows follow in the answer
    shape: tuple[int, int]  # answers, most columns

    @classmethod
    def of(cls, batch: Batch) -> Places:
        answer, row = batch.places()
        column = row - (batch.prompts[answer] - 1)
        left = batch.rows[answer] - 1 - row
        return cls(answer, row, column, left, (len(batch.rows), int(column.max()) + 1))

    def padded(self, values: Tensor) -> Tensor:
        """values: [places, ...]. Returns [answers, columns, ...], zeros where there is no place."""
        out = values.new_zeros(*self.shape, *values.shape[1:])
        return out.index_put((self.answer, self.column), values)


class EagleLoss(nn.Module):
    """Cross-entropy of `levels` guesses in a row against the target's laws, from every token of an answer.

    embedding: [vocab, hidden] and lm_head: [vocab, hidden] are the target's. Level 0 reads the target's
    features, each later one the head's own output and the answer's next token. first: levels of epoch 0.
    """

    def __init__(
        self, head: EagleLayer, embedding: Tensor, lm_head: Tensor, levels: int, first: int = FIRST
    ) -> None:
        super().__init__()
        self.head, self.levels, self.first = head, levels, first
        self.embedding = embedding
        self.vocabulary = lm_head[head.target_ids]

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and of each level the share of places where the likeliest guess is the target's,
        given that those before were, float32 [levels].
        """
        tree = Places.of(batch)
        with torch.no_grad():
            wanted = torch.softmax(batch.logits(tree.answer, tree.row, self.vocabulary), -1)
            best = wanted.argmax(-1)
        # Seeded by the batch, so that a run that goes on after a kill takes the same places.
        generator = torch.Generator().manual_seed(int(batch.ids.sum()))
        loss = wanted.new_zeros(())
        right = torch.ones_like(best, dtype=torch.bool)
        shares = []
        for level, features in enumerate(self.unroll(batch, tree, self.levels if epoch else self.first)):
            judged = (tree.left >= level).nonzero().flatten()
            if level:
                taken = torch.rand(len(judged), generator=generator) < _PROJECTED
                judged = judged[taken.to(judged.device)]
            logits = self.project(features[judged])
            # The law after a place's token stands at its own row, and `level` rows further down.
            law = wanted[judged + level]
            loss = loss - DECAY**level * mean((law * torch.log_softmax(logits.float(), -1)).sum(-1))
            hit = logits.argmax(-1) == best[judged + level]
            known = right[judged]
            shares.append((hit & known).sum() / known.sum().clamp(min=1))
            right = torch.zeros_like(right).index_put((judged,), hit & known)
        return loss, torch.stack(shares)

    def unroll(self, batch: Batch, tree: Places, levels: int) -> Iterator[Tensor]:
        """Yield what the head makes of each place at each level, [places, hidden], fed the answer's own
        tokens.
        """
        head = self.head
        width = len(head.config.hidden_layers) * head.config.hidden_size
        fused = head.fuse(batch.states[:, :-1, :width].to(head.fc.weight.dtype))
        keys, values = self._context(batch, fused)
        extra: list[tuple[Tensor, Tensor]] = []
        features = fused[tree.answer, tree.row - 1]
        last = batch.ids.shape[1] - 1
        for level in range(levels):
            embeds = self.embedding[batch.ids[tree.answer, (tree.row + level).clamp(max=last)]]
            angles = head.cos_sin(tree.row + level)
            x, read = head.enter(embeds.to(features.dtype), features)
            query, key, value = head.qkv(read, angles)
            if level:
                extra.append((key, value))
            features = head.finish(x, attend(tree, query, keys, values, extra))
            yield features

    def project(self, features: Tensor) -> Tensor:
        """Return logits over the draft's vocabulary."""
        x = self.head.normed(features)
        weight = self.vocabulary if self.head.lm_head is None else self.head.lm_head.weight
        return nn.functional.linear(x, weight.to(x.dtype))

    def _context(self, batch: Batch, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [answers, rows - 1, kv_heads, dim] of all that the target has read."""
        answers, rows, _ = fused.shape
        positions = torch.arange(1, rows + 1, device=fused.device).repeat(answers)
        embeds = self.embedding[batch.ids[:, 1 : rows + 1]].to(fused.dtype)
        _, read = self.head.enter(embeds.flatten(0, 1), fused.flatten(0, 1))
        _, key, value = self.head.qkv(read, self.head.cos_sin(positions))
        shape = (answers, rows, self.head.config.kv_heads, self.head.config.head_dim)
        return key.view(shape), value.view(shape)


def attend(
    tree: Places, query: Tensor, keys: Tensor, values: Tensor, extra: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend from each place to what the target has read up to its row, and to its own earlier levels.

    query: [places, heads, dim]; keys, values: [answers, rows - 1, kv_heads, dim], of rows 1 …; extra: of each
    level the keys and values [places, kv_heads, dim]. Returns [places, heads * dim].
    """
    dim, kv_heads, share = query.shape[-1], keys.shape[2], query.shape[1] // keys.shape[2]
    q = tree.padded((query * dim**-0.5).view(len(query), kv_heads, share, dim))
    q = q.permute(0, 2, 3, 1, 4)  # [answers, kv_heads, share, columns, dim]
    turned = keys.permute(0, 2, 3, 1).unsqueeze(2).to(q.dtype)  # [answers, kv_heads, 1, dim, rows]
    scores = q @ turned  # [answers, kv_heads, share, columns, rows]
    first = tree.padded(tree.row)
    seen = torch.arange(1, keys.shape[1] + 1, device=q.device) <= first[..., None]  # [answers, columns, rows]
    scores = scores.masked_fill(~seen[:, None, None], -1e4)
    beside = [[tree.padded(part).permute(0, 2, 1, 3).unsqueeze(2) for part in pair] for pair in extra]
    own = [(q * key).sum(-1, keepdim=True) for key, _ in beside]  # [answers, kv_heads, share, columns, 1]
    weights = torch.softmax(torch.cat([scores, *own], -1).float(), -1).to(values.dtype)
    count = keys.shape[1]
    out = weights[..., :count] @ values.transpose(1, 2).unsqueeze(2)
    for number, (_, value) in enumerate(beside):
        out = out + weights[..., count + number, None] * value
    return out.permute(0, 3, 1, 2, 4)[tree.answer, tree.column].flatten(1)


def from_last_layer(head: EagleLayer, target: Any) -> None:
    """Begin with the target's last layer and norm, fed with the last fused features: a start that already
    speaks the target's language.
    """
    last = target.model.layers[-1]
    middle, width = head.midlayer, head.config.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            own: nn.Linear = getattr(middle.self_attn, name)
            own.weight[:, width:] = getattr(last.self_attn, name).weight
        same = torch.empty(head.config.kv_heads * head.config.head_dim, width)
        nn.init.orthogonal_(same)
        share = head.config.heads // head.config.kv_heads
        each = same.view(head.config.kv_heads, 1, -1, width).expand(-1, share, -1, -1)
        middle.self_attn.k_proj.weight[:, :width] = same
        middle.self_attn.q_proj.weight[:, :width] = each.reshape(-1, width)
        middle.self_attn.v_proj.weight[:, :width] = same
        middle.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        middle.mlp.load_state_dict(last.mlp.state_dict())
        middle.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        middle.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.fc.weight.normal_(std=0.01)
        head.fc.weight[:, -width:] += torch.eye(width)
