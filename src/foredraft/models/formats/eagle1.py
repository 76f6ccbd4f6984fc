"""EAGLE-1 heads as the EAGLE project writes them: `fc` over embedding and feature side by side, one Llama
layer without a norm before attention, and neither a norm nor a vocabulary matrix behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.models.formats.eagle3 import LAYER, renamed
from foredraft.models.formats.files import has_tensor

_THEIRS = "layers.0."
REQUIRED = (
    "fc.weight",
    LAYER + "post_attention_layernorm.weight",
    *(LAYER + f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)


def may_be_eagle1(config: dict[str, Any], path: Path) -> bool:
    """True if a directory holds what EAGLE calls a LlamaForCausalLM: one layer and `fc`."""
    return config.get("num_hidden_layers") == 1 and has_tensor(path, "fc.weight", "model.fc.weight")


def looks_like_eagle1(tensors: dict[str, Tensor]) -> bool:
    """True for the tensors of such a head: an EAGLE-3 layer has a norm of its features."""
    names = {name.removeprefix("model.") for name in tensors}
    layer = f"{_THEIRS}self_attn.q_proj.weight"
    return {"fc.weight", layer} <= names and f"{_THEIRS}hidden_norm.weight" not in names


def from_eagle1(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take a directory's config and tensors to the names used here."""
    own = {"kind": "eagle1"} | (config.get("foredraft") or {})
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return config | {"foredraft": own}, renamed(bare, _THEIRS, LAYER)


def to_eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what goes into the files."""
    return config, renamed(tensors, LAYER, _THEIRS)
