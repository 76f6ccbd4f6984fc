"""EAGLE-3 heads as SpecForge writes and SGLang reads them: the layout that foredraft works in.

Two numberings of layers are about. Hidden state h, as transformers counts (0 is the embedding), is the output
of layer h - 1 and the input of layer h. This layout's eagle_config counts outputs, as SpecForge and SGLang
do, so it says h - 1. vLLM takes the same numbers for inputs, unless the config has them outside eagle_config
too: there we say h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError

LAYER = "midlayer."
REQUIRED = (
    "fc.weight",
    "norm.weight",
    *(LAYER + f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(LAYER + f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
IDS = "eagle_aux_hidden_state_layer_ids"


def from_eagle3(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take a directory's config and tensors to the names used here."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if LAYER + "self_attn.q_proj.weight" not in tensors:
        tensors = renamed(tensors, "layers.0.", LAYER)
    ids = (config.get("eagle_config") or {}).get(IDS)
    own = {"kind": "eagle"} | (config.get("foredraft") or {})
    named = [i + 1 for i in ids] if ids else config.get(IDS)
    if named and "hidden_layers" not in own:
        own["hidden_layers"] = list(named)
    return config | {"foredraft": own}, tensors


def to_eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what goes into the files. Raises CheckpointError if the layout cannot say which layers."""
    layers = config.get("foredraft", {}).get("hidden_layers")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | config
    if layers is not None:
        if min(layers) < 1:
            raise CheckpointError(
                f"hidden_layers={layers} fuse the embedding (0), which this layout cannot name: it counts "
                "outputs of layers. Write --to speculators"
            )
        said = {IDS: [h - 1 for h in layers], "use_aux_hidden_state": True}
        config["eagle_config"] = (config.get("eagle_config") or {}) | said
        config[IDS] = list(layers)
    return config, tensors


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Replace a prefix of names."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


def d2t_kind(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> str:
    """Return what a draft-to-target map holds: "offset" (target id = draft id + d2t), "absolute" (target id =
    d2t), or "neither".
    """
    ids = d2t.long()
    moved = ids + torch.arange(len(ids))
    if t2d is not None:
        known = t2d.bool().nonzero().flatten()
        fits = {"offset": moved, "absolute": ids}
        found = [kind for kind, held in fits.items() if torch.equal(held.sort().values, known)]
        return found[0] if found else "neither"
    for kind, held in (("offset", moved), ("absolute", ids)):
        if len(held) == len(set(held.tolist())) and int(held.min()) >= 0 and int(held.max()) < vocab_size:
            return kind
    return "neither"
