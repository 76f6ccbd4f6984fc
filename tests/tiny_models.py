"""Small random transformers models of many architectures, for equality tests, and what is fed to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.models import HFCausal
from foredraft.types import NO_DRAFT, Draft, chain

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
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
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


TREE = Draft(tokens=torch.tensor([5, 6, 7, 8, 9, 10, 11]), parents=(-1, -1, 0, 0, 1, 2, 5))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
GEMMA = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "query_pre_attn_scalar": 5,
    "attention_bias": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "no shared keys": ("llama", {"num_key_value_heads": 4}),
    "wide heads": ("llama", {"head_dim": 16}),
    "scaled angles": ("llama", {"rope_parameters": LLAMA3}),
    "dynamic angles": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3, full attention in turn": ("gemma3_text", GEMMA),
}


def text_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def fill_vectors(path: Path) -> None:
    """Norms begin as ones and biases as zeros, which would hide their loss."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    for weight in weights.values():
        if weight.dim() == 1:
            weight += torch.arange(len(weight)) % 5 * 0.1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def caches(targets: list[HFCausal], length: int) -> list[tuple[KVCache, BlockTable]]:
    """One empty cache a target, with room for a text."""
    made = [(target.make_kv(length), BlockTable()) for target in targets]
    for kv, table in made:
        assert kv.pool.grow(table, length)
    return made


def ragged(targets: list[HFCausal], longest: int) -> tuple[list[KVCache], list[Batch], list[Batch]]:
    """One cache a target, what fills it, and a batch of a prompt, a decoding row, a chain and a tree."""
    texts = [text_of(length, length) for length in (longest, 1, 20, 33)]
    cached, drafts = [0, 0, 19, 32], [NO_DRAFT, TREE, NO_DRAFT, chain([4, 3, 4])]
    kvs, first, second = [], [], []
    for target in targets:
        kv = target.make_kv(512)
        tables = [BlockTable() for _ in texts]
        for table, text in zip(tables, texts, strict=True):
            assert kv.pool.grow(table, len(text) + BLOCK)
        rows = list(zip(texts, cached, tables, drafts, strict=True))
        kvs.append(kv)
        first.append(make_batch([Feed(text[:n], 0, table, None) for text, n, table, _ in rows if n]))
        second.append(make_batch([Feed(text[n:], n, table, draft) for text, n, table, draft in rows]))
    return kvs, first, second
