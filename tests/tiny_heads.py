"""Small random draft heads on disk, laid out as other programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 32, 97, 40, 12
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
}


def eagle_tensors(
    *, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Tensor]:
    """Tensors of a SpecForge head of random weights."""
    torch.manual_seed(seed)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    shapes = {
        "fc": (hidden, 3 * hidden),
        "norm": (hidden,),
        "lm_head": (DRAFT_VOCAB, hidden),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (32, 2 * hidden),
        "midlayer.self_attn.k_proj": (16, 2 * hidden),
        "midlayer.self_attn.v_proj": (16, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, 32),
        "midlayer.mlp.gate_proj": (48, hidden),
        "midlayer.mlp.up_proj": (48, hidden),
        "midlayer.mlp.down_proj": (hidden, 48),
    }
    tensors = {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return tensors | {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def medusa_tensors(
    heads: int = 3, layers: int = 2, *, width: int = HIDDEN, own: bool = True
) -> dict[str, Tensor]:
    """Tensors of random Medusa heads, with vocabulary projections of their own or without."""
    torch.manual_seed(1)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(width, width)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(width)
        if own:
            tensors[f"{head}.{layers}.weight"] = torch.randn(VOCAB, width)
    return tensors


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors"
) -> Path:
    """Write a directory as another program would."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / name)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
