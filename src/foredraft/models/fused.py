"""The fast path on CPU for Llama and its kin: the same numbers as transformers' modules, with fewer steps.

Queries, keys and values are one linear layer, gate and up another; rotary angles are computed once a pass.
Which architectures: those in `KINDS`, if a trial run agrees with transformers' own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import BlockTable
from foredraft.engine.protocols import ForwardOut
from foredraft.models.attention import Attend, Head
from foredraft.models.hf_causal import HFCausal
from foredraft.models.packed import LEAST_ROWS, PackedLinear, PlainLinear, can_pack, pack, pack_together
from foredraft.types import Draft

KINDS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative, of logits in the trial run
_TRIAL = 12  # tokens of the trial's text

Linear = PackedLinear | PlainLinear


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., width]. Returns the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Turns queries and keys by the angles of their positions. cos, sin: [rows, 1, dim]; the first half of
    sin is negated.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, module: Any, like: Tensor, positions: Tensor) -> Rotary:
        """The angles that a transformers rotary module gives positions, int64 [rows], in the dtype of
        `like`.
        """
        cos, sin = (part[0].unsqueeze(1) for part in module(like, positions.unsqueeze(0)))
        half = cos.shape[-1] // 2
        return cls(cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, heads, dim]. Returns the same shape."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class DecoderLayer:
    """One layer of a Llama-like decoder."""

    def __init__(self, layer: Any, head: Head) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.dim: int = attention.head_dim
        self.keys: int = attention.k_proj.out_features // self.dim
        self.queries: int = attention.q_proj.out_features // self.dim
        self.head = head
        self.qkv = pack_together([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = pack(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = pack_together([mlp.gate_proj, mlp.up_proj])
        self.down = pack(mlp.down_proj.weight, mlp.down_proj.bias)
        self.before_attention = norm(layer.input_layernorm)
        self.before_mlp = norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (
            norm(getattr(attention, name)) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )

    def __call__(self, x: Tensor, rows: int, index: int, rotary: Rotary, attend: Attend) -> Tensor:
        """x: [at least rows, width]; what is beyond `rows` is padding. Returns the next layer's x."""
        return self.run(x, self.before_attention(x), rows, index, rotary, attend)

    def run(self, x: Tensor, normed: Tensor, rows: int, index: int, rotary: Rotary, attend: Attend) -> Tensor:
        """The same, with what queries, keys and values are made of given: [as x, their own width]."""
        qkv = self.qkv(normed).view(len(x), -1, self.dim)[:rows]
        turned = self.queries + self.keys
        if self.query_norm is not None and self.key_norm is not None:
            query = rotary(self.query_norm(qkv[:, : self.queries]))
            key = rotary(self.key_norm(qkv[:, self.queries : turned]))
        else:
            both = rotary(qkv[:, :turned])
            query, key = both[:, : self.queries], both[:, self.queries :]
        value = qkv[:, turned:].transpose(0, 1)
        found = attend(index, query.transpose(0, 1), key.transpose(0, 1), value, self.head).flatten(1)
        x = self.out(found if rows == len(x) else _padded(found, len(x))).add_(x)
        made: Tensor = self.down(swiglu(self.gate_up(self.before_mlp(x))))
        return made.add_(x)


class FusedCausal(HFCausal):
    """A Llama-like model behind the Target protocol. Takes the weights out of `slow`, which then is of no
    use.
    """

    def __init__(self, slow: HFCausal) -> None:
        vars(self).update(vars(slow))
        inner = self.model.model
        self.embedding: nn.Embedding = inner.embed_tokens
        self.rotary = inner.rotary_emb
        self.last_norm = norm(inner.norm)
        self.decoder = []
        for layer, head in zip(inner.layers, slow.heads, strict=True):
            self.decoder.append(DecoderLayer(layer, head))
            layer.to("meta")  # its weights are freed before the next layer's are packed
        head = self.model.lm_head
        self.to_logits: Linear = pack(head.weight, head.bias)
        self.packed = can_pack(self.dtype, self.device)
        self.model = None

    def _run(self, batch: Batch, attend: Any, hidden_layers: tuple[int, ...]) -> ForwardOut:
        rows = len(batch.token_ids)
        x = self.embedding(batch.token_ids)
        rotary = Rotary.of(self.rotary, x, batch.positions)
        if self.packed and rows < LEAST_ROWS:
            x = _padded(x, LEAST_ROWS)
        states = [x]
        for index, layer in enumerate(self.decoder):
            x = layer(x, rows, index, rotary, attend)
            if hidden_layers:
                states.append(x)
        if hidden_layers:
            x = states[-1] = self.last_norm(x)
            wanted = x[batch.logit_rows]
        else:
            wanted = self.last_norm(x[batch.logit_rows])
        return ForwardOut(self.to_logits(wanted), tuple(states[layer][:rows] for layer in hidden_layers))


def can_fuse(target: HFCausal) -> bool:
    """True if the model's architecture is known here."""
    config = target.model.config
    return target.device.type == "cpu" and config.model_type in KINDS and config.hidden_act == "silu"


def fuse(slow: HFCausal) -> FusedCausal | None:
    """Return the fused twin of a target, or None where the two disagree. Either way `slow` is used up."""
    wanted = _trial(slow)
    fused = FusedCausal(slow)
    error = (_trial(fused) - wanted).norm() / wanted.norm()
    return fused if error < _NOISE.get(slow.dtype, 0.05) else None


def norm(module: Any) -> Norm:
    """The norm of a transformers RMSNorm module."""
    return Norm(module.weight.detach(), module.variance_epsilon)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [rows, 2 * width], the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _trial(target: HFCausal) -> Tensor:
    """Logits of a short text and a small tree behind it, float32."""
    kv, table = target.make_kv(_TRIAL + 8), BlockTable()
    kv.pool.grow(table, _TRIAL + 8)
    tokens = (torch.arange(_TRIAL + 4) * 7919 % target.vocab_size).tolist()
    tree = Draft(tokens=torch.tensor(tokens[_TRIAL:]), parents=(-1, -1, 0, 1))
    half = _TRIAL // 2
    target.forward(make_batch([Feed(tokens[:half], 0, table, None)]), kv)
    logits = target.forward(make_batch([Feed(tokens[half:_TRIAL], half, table, tree)]), kv).logits.float()
    return logits if target.token_ids is None else logits[:, target.token_ids]


def _padded(x: Tensor, rows: int) -> Tensor:
    """Fill up rows with zeros."""
    return F.pad(x, (0, 0, 0, rows - len(x)))
