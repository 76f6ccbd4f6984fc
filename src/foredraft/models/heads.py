"""Draft heads: Medusa (Cai et al., arXiv 2401.10774) and EAGLE (Li et al., arXiv 2401.15077 and 2503.01840).

The modules serve training and drafting; their parameters are named as the public checkpoints name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.engine.batch import Batch
from foredraft.models.attention import Attend, Head


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of an EAGLE head. hidden_layers: the target's hidden states that it reads, numbered as
    transformers numbers hidden_states (0 is the embedding, i the output of layer i - 1).

    norm_before_residual: an EAGLE-3 layer adds to its features as they are after its norm. eagle1: the layer
    has no norms before attention and none behind it; fc_bias belongs to that kind only.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    eagle1: bool = False
    fc_bias: bool = False

    @property
    def plain(self) -> bool:
        """True for the layer that the fast paths know: EAGLE-3's, adding to its features as they are."""
        return not (self.norm_before_residual or self.eagle1)

    @classmethod
    def like(cls, target_config: Any, hidden_layers: tuple[int, ...], draft_vocab_size: int) -> EagleConfig:
        """Return the shape of one decoder layer of a target, given its transformers config."""
        config = target_config.get_text_config()
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            draft_vocab_size=min(draft_vocab_size, config.vocab_size),
            hidden_layers=hidden_layers,
            norm_eps=getattr(config, "rms_norm_eps", 1e-5),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
        )


class RMSNorm(nn.RMSNorm):
    """torch's norm with its weight taken to the precision of the input, as autocast leaves it to us."""

    @property
    def variance_epsilon(self) -> float | None:
        """Its eps, as transformers' norms call it."""
        return self.eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]. Returns the same shape."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size * (1 if config.eagle1 else 2), config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        if not config.eagle1:
            self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
            self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _Mlp(config)


class EagleLayer(nn.Module):
    """One decoder layer that reads a token's embedding beside the features of the position before it.

    Features are the target's hidden states where the target has been, some of them fused (EAGLE-3, section
    3.1) or the last one as it is (EAGLE-1), and this layer's own output below that. The vocabulary it drafts
    from is the part of the target's that `d2t` names: target id = draft id + d2t[draft id]. Without weights
    of its own the projection to it takes these rows of the target's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig, *, own_lm_head: bool = False) -> None:
        super().__init__()
        self.config = config
        read = 2 if config.eagle1 else len(config.hidden_layers)
        self.fc = nn.Linear(read * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.midlayer = _Layer(config)
        if not config.eagle1:
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_lm_head else None
        )
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(config.draft_vocab_size))

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Draft from these tokens of the target, int64 [draft vocab]."""
        ids = target_ids.sort().values
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each draft id, int64 [draft vocab]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: Tensor) -> Tensor:
        """states: the target's hidden states side by side, [rows, layers * hidden]. Returns features [rows,
        hidden].
        """
        fused: Tensor = states if self.config.eagle1 else self.fc(states)
        return fused

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """embeds, features: [rows, hidden]. Returns what the layer adds to, [rows, hidden], and what its
        attention reads, [rows, width].
        """
        if self.config.eagle1:
            x = self.fc(torch.cat([embeds, features], dim=-1))
            return x, x
        normed = self.midlayer.hidden_norm(features)
        read = torch.cat([self.midlayer.input_layernorm(embeds), normed], dim=-1)
        return (normed if self.config.norm_before_residual else features), read

    def qkv(self, read: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """read: [rows, width]. Returns query [rows, heads, dim], key and value [rows, kv_heads, dim],
        turned.
        """
        attention, dim = self.midlayer.self_attn, self.config.head_dim
        query, key, value = (
            project(read).unflatten(-1, (-1, dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return turn(query, cos_sin), turn(key, cos_sin), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: what the layer adds to, [rows, hidden]; attended: [rows, heads * dim]. Returns its output, the
        features of the next position.
        """
        x = x + self.midlayer.self_attn.o_proj(attended)
        out: Tensor = x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))
        return out

    def normed(self, features: Tensor) -> Tensor:
        """Return what is projected to the vocabulary, [rows, hidden]: EAGLE-1's features are guesses at what
        the target has after its last norm already.
        """
        return features if self.config.eagle1 else self.norm(features)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [rows]. Returns the cosines and sines of rotary embedding, float32 [rows, dim /
        2].
        """
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * self.config.rope_theta ** -(half / self.config.head_dim)
        return angles.cos(), angles.sin()


def turn(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding (Su et al., arXiv 2104.09864) to x [rows, heads, dim], halves paired."""
    cos, sin = (part.unsqueeze(1).to(x.dtype) for part in cos_sin)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PlainEagle:
    """Drafting passes of any EAGLE head by its own modules: the slow twin of FastEagle and CompiledEagle, and
    what runs the heads that these do not know. embedding: [vocab, hidden]; projection: [draft vocab, hidden].
    """

    def __init__(self, head: EagleLayer, embedding: Tensor, projection: Tensor) -> None:
        self._head, self._embedding, self._projection = head, embedding, projection
        self.fuse = head.fuse

    def run(self, batch: Batch, features: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run over a batch; features: [rows, hidden]. Returns, of its logit rows, the features of the next
        positions [outputs, hidden] and the logits after them, float32 [outputs, draft vocab].
        """
        head, device = self._head, features.device
        x, read = head.enter(self._embedding[batch.token_ids.to(device)], features)
        turned = head.qkv(read, head.cos_sin(batch.positions.to(device)))
        query, key, value = (part.transpose(0, 1) for part in turned)
        found = head.finish(x, attend(0, query, key, value, Head()).flatten(1))[batch.logit_rows.to(device)]
        return found, F.linear(head.normed(found), self._projection).float()


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Head i guesses token i + 2 after a position from its last hidden state (arXiv 2401.10774, section 2.1).

    own_vocab: rows of a projection to the vocabulary that each head has of its own; without one all project
    with the target's.
    """

    def __init__(self, width: int, heads: int, layers: int = 1, *, own_vocab: int | None = None) -> None:
        super().__init__()
        self.layers, self.own = layers, own_vocab is not None
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(width) for _ in range(layers))) for _ in range(heads)
        )
        if own_vocab is not None:
            for head in self.heads:
                cast(nn.Sequential, head).append(nn.Linear(width, own_vocab, bias=False))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, width]. Returns what to project, [rows, heads, width]."""
        return torch.stack([cast(Any, head)[: self.layers](hidden) for head in self.heads], dim=1)

    def project(self, x: Tensor, head: int, shared: Tensor | None) -> Tensor:
        """x: [rows, width], what one head made; shared: [vocab, width], the target's projection, for heads
        that have none. Returns logits [rows, vocab].
        """
        weight = cast(Any, self.heads[head])[self.layers].weight if self.own else shared
        assert weight is not None
        return F.linear(x, weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, width]. Returns those of heads with projections, float32 [rows, heads, vocab]."""
        made = self(hidden)
        found = [self.project(made[:, head], head, None) for head in range(len(self.heads))]
        return torch.stack(found, dim=1).float()
