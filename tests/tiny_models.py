"""Small random transformers models of many architectures, for equality tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 9, "head_dim": 8},
    "gemma2": {"sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": None},
    "granite": {},
}
GPT2_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def build(name: str, path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of the architecture to `path` as float32 safetensors."""
    sizes = {key: value for key, value in SIZES.items() if name != "gpt2" or key not in GPT2_NAMES}
    config = transformers.AutoConfig.for_model(name, **{**sizes, **ARCHITECTURES[name], **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for (
        parameter
    ) in model.parameters():  # default initialisation is so flat that most mistakes would not show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path
