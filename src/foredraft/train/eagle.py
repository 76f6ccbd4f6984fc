"""The loss of an EAGLE head, unrolled as it drafts (EAGLE-3, Li et al., arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.models.heads import EagleLayer
from foredraft.train.data import Batch, mean

DECAY = 0.8  # of a level's weight in the loss, per level
FIRST = 2  # levels of the first epoch: while these are bad, later ones teach nothing
FLOOR = 0.01  # a path that the head finds less likely is seldom drafted, so nothing is learnt below it


@dataclass(frozen=True, slots=True)
class Places:
    """The places from which drafts start, by answer and row, and where they lie in a padded batch.

    answer, row, column: int64 [places]; a place drafts from the token of its row on. column counts the places
    of an answer.
    """

    answer: Tensor
    row: Tensor
    left: Tensor  # how many rows follow in the answer
    column: Tensor
    shape: tuple[int, int]  # answers, most columns

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """All places of a batch."""
        answer, row = batch.places()
        return cls._of(answer, row, batch.rows[answer] - 1 - row, len(batch.rows))

    def part(self, kept: Tensor) -> Places:
        """Some of them, int64 [n], ascending."""
        return self._of(self.answer[kept], self.row[kept], self.left[kept], self.shape[0])

    @classmethod
    def _of(cls, answer: Tensor, row: Tensor, left: Tensor, answers: int) -> Places:
        counts = torch.bincount(answer, minlength=answers)
        number = torch.arange(len(answer), device=answer.device)
        column = number - (counts.cumsum(0) - counts)[answer]
        return cls(answer, row, left, column, (answers, int(counts.max())))

    def padded(self, values: Tensor) -> Tensor:
        """values: [places, ...]. Returns [answers, columns, ...], zeros where there is no place."""
        out = values.new_zeros(*self.shape, *values.shape[1:])
        return out.index_put((self.answer, self.column), values)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts under way, along the answer's own tokens, and what each level needs of those before."""

    places: Places
    number: Tensor  # of each place among all of the batch, int64 [places]
    features: Tensor  # [places, hidden]
    extra: tuple[tuple[Tensor, Tensor], ...]  # of each level after the first, key and value [places, …]
    chance: Tensor  # what the head gives the path so far, float32 [places]
    right: Tensor  # whether all guesses so far were the target's likeliest, bool [places]

    def part(self, kept: Tensor) -> Drafts:
        """Some of them, int64 [n], ascending."""
        extra = tuple((key[kept], value[kept]) for key, value in self.extra)
        return Drafts(
            places=self.places.part(kept),
            number=self.number[kept],
            features=self.features[kept],
            extra=extra,
            chance=self.chance[kept],
            right=self.right[kept],
        )


class EagleLoss(nn.Module):
    """Cross-entropy of `levels` guesses in a row against the target's laws, from every token of an answer.

    embedding: [vocab, hidden] and lm_head: [vocab, hidden] are the target's. Level 0 reads the target's
    features, each later one the head's own output and the answer's next token; it is learnt where the head
    gives those tokens a chance of `floor` or more. first: levels of epoch 0.
    """

    def __init__(
        self,
        head: EagleLayer,
        embedding: Tensor,
        lm_head: Tensor,
        levels: int,
        first: int = FIRST,
        *,
        floor: float = FLOOR,
    ) -> None:
        super().__init__()
        self.head, self.levels, self.first, self.floor = head, levels, first, floor
        self.embedding = embedding
        ids = head.target_ids.to(embedding.device)
        self.vocabulary = lm_head[ids]
        self.draft_ids = torch.full((len(embedding),), -1, device=ids.device)  # of the target's, -1 for none
        self.draft_ids[ids] = torch.arange(len(ids), device=ids.device)

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and of each level the share of places where the likeliest guess is the target's,
        given that those before were, float32 [levels].
        """
        places = Places.of(batch)
        with torch.no_grad():
            laws = torch.softmax(batch.logits(places.answer, places.row, self.vocabulary), -1)
            best = laws.argmax(-1)
        fused = self._fuse(batch)
        keys, values = self._context(batch, fused)
        loss, shares = laws.new_zeros(()), laws.new_zeros(self.levels if epoch else self.first)
        drafts = _begin(places, fused)
        for level in range(len(shares)):
            drafts = self._deeper(batch, drafts, level, keys, values)
            logs = torch.log_softmax(self.project(drafts.features).float(), -1)
            # The law after a place's token stands at its own row, and `level` rows further down.
            wanted = drafts.number + level
            loss = loss - DECAY**level * mean((laws[wanted] * logs).sum(-1))
            hit = (logs.argmax(-1) == best[wanted]) & drafts.right
            shares[level] = hit.sum() / drafts.right.sum().clamp(min=1)
            if level + 1 < len(shares):
                drafts = self._survivors(batch, replace(drafts, right=hit), level, logs.detach())
            if not len(drafts.number):
                break
        return loss, shares

    def project(self, features: Tensor) -> Tensor:
        """Return logits over the draft's vocabulary."""
        x = self.head.normed(features)
        weight = self.vocabulary if self.head.lm_head is None else self.head.lm_head.weight
        return nn.functional.linear(x, weight.to(x.dtype))

    def _fuse(self, batch: Batch) -> Tensor:
        """Return the features [answers, rows - 1, hidden] of all tokens but the last."""
        head = self.head
        width = len(head.config.hidden_layers) * head.config.hidden_size
        return head.fuse(batch.states[:, :-1, :width].to(head.fc.weight.dtype))

    def _deeper(self, batch: Batch, drafts: Drafts, level: int, keys: Tensor, values: Tensor) -> Drafts:
        """Run the head once more, on the answer's own token of each place."""
        head, places = self.head, drafts.places
        embeds = self.embedding[batch.ids[places.answer, places.row + level]]
        x, read = head.enter(embeds.to(drafts.features.dtype), drafts.features)
        query, key, value = head.qkv(read, head.cos_sin(places.row + level))
        extra = (*drafts.extra, (key, value)) if level else ()  # the first level's are the context's
        features = head.finish(x, attend(places, query, keys, values, extra))
        return replace(drafts, features=features, extra=extra)

    def _survivors(self, batch: Batch, drafts: Drafts, level: int, logs: Tensor) -> Drafts:
        """Return those that the next level learns from. logs: the head's law, [places, draft vocab]."""
        places = drafts.places
        ids = self.draft_ids[batch.ids[places.answer, places.row + level + 1]]
        chance = drafts.chance * logs.gather(1, ids.clamp(min=0)[:, None])[:, 0].exp()
        alive = (ids >= 0) & (chance >= self.floor) & (places.left > level)
        return replace(drafts, chance=chance).part(alive.nonzero().flatten())

    def _context(self, batch: Batch, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [answers, rows - 1, kv_heads, dim] of all that the target has read."""
        answers, rows, _ = fused.shape
        positions = torch.arange(1, rows + 1, device=fused.device).repeat(answers)
        embeds = self.embedding[batch.ids[:, 1 : rows + 1]].to(fused.dtype)
        _, read = self.head.enter(embeds.flatten(0, 1), fused.flatten(0, 1))
        _, key, value = self.head.qkv(read, self.head.cos_sin(positions))
        shape = (answers, rows, self.head.config.kv_heads, self.head.config.head_dim)
        return key.view(shape), value.view(shape)


def _begin(places: Places, fused: Tensor) -> Drafts:
    """Drafts before the first level. fused: [answers, rows - 1, hidden], the features of all that is read."""
    features = fused[places.answer, places.row - 1]
    number = torch.arange(len(features), device=features.device)
    chance = torch.ones(len(features), device=features.device)
    return Drafts(places, number, features, (), chance, chance.bool())


def attend(
    tree: Places, query: Tensor, keys: Tensor, values: Tensor, extra: Sequence[tuple[Tensor, Tensor]]
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
