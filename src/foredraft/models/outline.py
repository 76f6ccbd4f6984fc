"""What a Llama-like model is besides its weights. It is kept, as JSON, for models whose compiled twin was
found to agree with transformers' modules, so that these are neither imported nor run at the next start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.models import kernels
from foredraft.models.fused import Rotary, has_fixed_angles, is_gemma, norm
from foredraft.models.hf_causal import HFCausal
from foredraft.zoo import kept

_KEPT = "outlines"


@dataclass(frozen=True, slots=True)
class Angles:
    """Rotary embedding whose angles do not change as texts grow: radians a position of each pair, and what
    cosines and sines are multiplied by.
    """

    frequencies: tuple[float, ...]
    scaling: float

    def __call__(self, positions: Tensor) -> Rotary:
        """positions: int64 [rows]. Returns the angles in bfloat16."""
        turned = positions[:, None].float() * torch.tensor(self.frequencies)
        cos, sin = (part.mul(self.scaling).bfloat16().unsqueeze(1) for part in (turned.cos(), turned.sin()))
        return Rotary(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


@dataclass(frozen=True, slots=True)
class Outline:
    """model_type: as transformers names it. inner: of the feed-forward part; queries, keys: heads, of width
    dim; scale: of scores; tied: embedding and output layer are one matrix; windows: of each layer, 0 for
    none; turned_by: of each layer, which of `angles`.
    """

    model_type: str
    hidden: int
    inner: int
    queries: int
    keys: int
    dim: int
    vocab_size: int
    max_len: int
    eos_ids: tuple[int, ...]
    eps: float
    scale: float
    embed_scale: float
    tied: bool
    windows: tuple[int, ...]
    turned_by: tuple[int, ...]
    angles: tuple[Angles, ...]

    @property
    def is_gemma(self) -> bool:
        """See fused.is_gemma."""
        return is_gemma(self.model_type)

    @classmethod
    def of(cls, target: HFCausal) -> Outline | None:
        """Return the outline of a model on transformers' modules, None if kernels do not take it."""
        config, inner = target.model.config, target.model.model
        layer = inner.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        dim, scales = attention.head_dim, {head.scale for head in target.heads}
        kinds = list(getattr(config, "layer_types", None) or ()) if is_gemma(config.model_type) else []
        rotary = [(inner.rotary_emb, kind) for kind in dict.fromkeys(kinds)] or [(inner.rotary_emb, "")]
        inputs = (config.hidden_size, attention.o_proj.in_features, mlp.down_proj.in_features)
        even = all(width % 2 == 0 for width in inputs) and dim % kernels.LEAST == 0
        fixed = all(has_fixed_angles(*one) for one in rotary)
        if not (even and fixed and len(scales) == 1 and target.heads[0].softcap is None):
            return None
        names = [kind for _, kind in rotary]
        return cls(
            config.model_type,
            config.hidden_size,
            mlp.gate_proj.out_features,
            attention.q_proj.out_features // dim,
            attention.k_proj.out_features // dim,
            dim,
            target.vocab_size,
            target.max_len,
            tuple(sorted(target.eos_ids)),
            norm(inner.norm).eps,
            scales.pop() or dim**-0.5,
            float(getattr(inner.embed_tokens, "scalar_embed_scale", 1.0)),
            bool(config.tie_word_embeddings),
            tuple(head.window or 0 for head in target.heads),
            tuple(map(names.index, kinds)) or (0,) * len(target.heads),
            tuple(_angles(*one) for one in rotary),
        )

    def keep(self, path: Path, dtype: str) -> None:
        """Keep it for a model directory that was to run in a precision, named as by the user."""
        kept.keep(_KEPT, _key(path, dtype), asdict(self))


def known(path: Path, dtype: str) -> Outline | None:
    """Return the outline that was kept of a model directory, if it is as it was."""
    found = kept.recall(_KEPT, _key(path, dtype))
    try:
        return None if found is None else _from_json(found)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _key(path: Path, dtype: str) -> str | None:
    return kept.model_key(path, dtype, kernels.PROCESSOR, kernels.HAS_UNIT)


def _from_json(found: dict[str, Any]) -> Outline:
    angles = tuple(Angles(tuple(one["frequencies"]), one["scaling"]) for one in found.pop("angles"))
    plain: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return Outline(**plain, angles=angles)


def _angles(rotary: Any, kind: str) -> Angles:
    start = f"{kind}_" if kind else ""
    frequencies = getattr(rotary, f"{start}inv_freq")
    return Angles(tuple(frequencies.tolist()), float(getattr(rotary, f"{start}attention_scaling")))
