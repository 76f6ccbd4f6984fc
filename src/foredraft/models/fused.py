"""Llama, its kin and Gemma 3 in torch, the same numbers as transformers' modules with fewer steps: in float32
on a CPU, and on a GPU.

Queries, keys and values are one linear layer, gate and up another; rotary angles are computed once a pass.
Which architectures: those in `KINDS`, if a trial run agrees with transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.engine.batch import Batch
from foredraft.engine.protocols import ForwardOut
from foredraft.models.attention import Head
from foredraft.models.hf_causal import HFCausal
from foredraft.models.packed import LEAST_ROWS, PackedLinear, PlainLinear, can_pack, pack, pack_together
from foredraft.models.trial import agree, trial

_FIRST_POSITIONS = 2048  # whose angles are made at first

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
class GemmaNorm(Norm):
    """The same, with a weight that is kept, and multiplied, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., width]. Returns the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


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


class KnownAngles:
    """Angles that are made once for every position, by `make`, and then looked up: on a CPU a tenth of the
    time.
    """

    def __init__(self, make: Callable[[Tensor], Rotary]) -> None:
        self._make, self._known = make, make(torch.arange(_FIRST_POSITIONS))

    def __call__(self, positions: Tensor) -> Rotary:
        """positions: int64 [rows]."""
        known = self.until(int(positions.max()))
        return Rotary(known.cos[positions], known.sin[positions])

    def until(self, last: int) -> Rotary:
        """Return the angles of positions 0 … last, and more."""
        if last >= len(self._known.cos):
            self._known = self._make(torch.arange(1 << last.bit_length()))
        return self._known


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

    def run(
        self, x: Tensor, normed: Tensor, rows: int, index: int, rotary: Any, attend: Any, after: Norm
    ) -> tuple[Tensor, Tensor]:
        """x: [at least rows, width]; what is beyond `rows` is padding. normed: what queries, keys and values
        are made of, [as x, their own width]. Returns the next layer's x, and that under the norm `after`.
        """
        x, inner = added(x, self.attended(normed, rows, index, rotary, attend), self.before_mlp)
        return added(x, self.down(swiglu(self.gate_up(inner))), after)

    def attended(self, normed: Tensor, rows: int, index: int, rotary: Rotary, attend: Any) -> Tensor:
        """Return what attention adds to x: [as normed, width]."""
        qkv, turned = self.qkv(normed).view(len(normed), -1, self.dim), self.queries + self.keys
        if self.query_norm is not None and self.key_norm is not None:
            qkv[:, : self.queries] = self.query_norm(qkv[:, : self.queries])
            qkv[:, self.queries : turned] = self.key_norm(qkv[:, self.queries : turned])
        both, value = rotary(qkv[:rows, :turned]), qkv[:rows, turned:].transpose(0, 1)
        query, key = both[:, : self.queries].transpose(0, 1), both[:, self.queries :].transpose(0, 1)
        found = _padded(attend(index, query, key, value, self.head).flatten(1), len(normed))
        out: Tensor = self.out(found)
        return out


class GemmaLayer(DecoderLayer):
    """One layer of Gemma 3: what attention and MLP add is normed too, and each kind of attention has its own
    angles.
    """

    def __init__(self, layer: Any, head: Head) -> None:
        super().__init__(layer, head)
        attention = layer.self_attn
        self.kind: str = attention.config.layer_types[attention.layer_idx]
        self.after_attention = norm(layer.post_attention_layernorm)
        self.before_mlp = norm(layer.pre_feedforward_layernorm)
        self.after_mlp = norm(layer.post_feedforward_layernorm)

    def run(
        self, x: Tensor, normed: Tensor, rows: int, index: int, rotary: Any, attend: Any, after: Norm
    ) -> tuple[Tensor, Tensor]:
        """As any layer; rotary: the angles by kind of attention."""
        x = self.after_attention(self.attended(normed, rows, index, rotary[self.kind], attend)).add_(x)
        x = self.after_mlp(self.down(geglu(self.gate_up(self.before_mlp(x))))).add_(x)
        return x, after(x)


class FusedCausal(HFCausal):
    """A Llama-like model behind the Target protocol. Takes the weights out of `slow`, which then is of no
    use.
    """

    layer: type[DecoderLayer] = DecoderLayer

    def __init__(self, slow: HFCausal) -> None:
        vars(self).update(vars(slow))
        inner = self.model.model
        self.embedding: nn.Embedding = inner.embed_tokens
        self.rotary = inner.rotary_emb
        self.last_norm = norm(inner.norm)
        self.decoder = []
        for layer, head in zip(inner.layers, slow.heads, strict=True):
            self.decoder.append(self.layer(layer, head))
            layer.to("meta")  # its weights are freed before the next layer's are packed
        head = self.model.lm_head
        self.to_logits: Linear = pack(head.weight, head.bias)
        self.packed = can_pack(self.dtype, self.device)
        self.model = None
        self._known_angles: KnownAngles | None = None
        if self.device.type == "cpu" and has_fixed_angles(self.rotary):
            like = self.embedding.weight[:1]
            self._known_angles = KnownAngles(lambda positions: Rotary.of(self.rotary, like, positions))

    def _run(self, batch: Batch, attend: Any, hidden_layers: tuple[int, ...]) -> ForwardOut:
        rows = len(batch.token_ids)
        x = self.embedding(batch.token_ids)
        rotary = self._angles(x, batch.positions)
        if self.packed and rows < LEAST_ROWS:
            x = _padded(x, LEAST_ROWS)
        states, normed = [x], self.decoder[0].before_attention(x)
        after = [*(layer.before_attention for layer in self.decoder[1:]), self.last_norm]
        for index, (layer, following) in enumerate(zip(self.decoder, after, strict=True)):
            x, normed = layer.run(x, normed, rows, index, rotary, attend, following)
            if hidden_layers:
                states.append(x)
        states[-1] = normed
        logits = self.to_logits(normed[batch.logit_rows])
        return ForwardOut(logits, tuple(states[layer][:rows] for layer in hidden_layers))

    def _angles(self, like: Tensor, positions: Tensor) -> Any:
        if self._known_angles is not None:
            return self._known_angles(positions)
        return Rotary.of(self.rotary, like, positions)


class FusedGemma(FusedCausal):
    """A Gemma 3 text model. Its embedding module scales."""

    layer = GemmaLayer

    def _angles(self, like: Tensor, positions: Tensor) -> Mapping[str, Rotary]:
        kinds = set(self.rotary.config.layer_types)
        return {kind: Rotary.of(partial(self.rotary, layer_type=kind), like, positions) for kind in kinds}


KINDS = {
    "llama": FusedCausal,
    "mistral": FusedCausal,
    "qwen2": FusedCausal,
    "qwen3": FusedCausal,
    "gemma3_text": FusedGemma,
}


def has_fixed_angles(rotary: Any, kind: str = "") -> bool:
    """True for a transformers rotary module whose angles, those of one kind of attention if it has several,
    do not change as texts grow.
    """
    made = rotary.rope_type[kind] if kind else rotary.rope_type
    return isinstance(made, str) and "dynamic" not in made and made != "longrope"


def is_gemma(model_type: str) -> bool:
    """True where norms lie around each half of a layer, and hold what they are above 1."""
    return KINDS[model_type] is FusedGemma


def can_fuse(target: HFCausal) -> bool:
    """True if the model's architecture is known here."""
    config = target.model.config
    if target.device.type != "cpu" or config.model_type not in KINDS:
        return False
    if is_gemma(config.model_type):
        return config.hidden_activation == "gelu_pytorch_tanh" and config.final_logit_softcapping is None
    return bool(config.hidden_act == "silu")


def fuse(slow: HFCausal) -> FusedCausal | None:
    """Return the fused twin of a target, or None where the two disagree. Either way `slow` is used up."""
    wanted = trial(slow)
    fused = KINDS[slow.model.config.model_type](slow)
    return fused if agree(trial(fused), wanted, slow.dtype) else None


def norm(module: Any) -> Norm:
    """The norm of a transformers RMSNorm module; Gemma's hold what their weights are above 1."""
    if "Gemma" in type(module).__name__:
        return GemmaNorm(1.0 + module.weight.detach().float(), module.eps)
    return Norm(module.weight.detach(), module.variance_epsilon)


def added(x: Tensor, more: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return x + more, in the place of `more`, and that under a norm, [rows, width] each."""
    more.add_(x)
    return more, norm(more)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [rows, 2 * width], the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, likewise, with the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Fill up rows with zeros."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)))
