"""A tiny random Llama as a GGUF file, wheels that carry it, and a cache and an index for the test alone."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.zoo import api
from foredraft.zoo.entries import Entry, Wheel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "Ġ t"]


def tokens() -> list[str]:
    """3 special tokens, the 256 bytes in GPT-2's spelling, 3 merges."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    spelled = [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(hidden))]
    return [*SPECIAL, *spelled, *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers of 32, in float32; heads of 8 share two key heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


@dataclass
class Recipe:
    """What a test changes about the file."""

    arch: str = "llama"
    quant: GGMLQuantizationType | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    drop: str = ""
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0


def write_gguf(path: Path, recipe: Recipe | None = None) -> Path:
    """Write the tiny model as llama.cpp would: its names, its order of the rotary halves."""
    recipe = recipe or Recipe()
    model = tiny_llama(recipe.seed)
    writer = GGUFWriter(path, recipe.arch)
    _write_head(writer, model.config)
    for key, value in recipe.meta.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = values.shape[0] // 8
            values = values.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(values.shape)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if name != recipe.drop:
            _write_tensor(writer, name, values, recipe.quant)
    for name, values in recipe.extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_head(writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    control = [TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(control + [TokenType.NORMAL] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def _write_tensor(
    writer: GGUFWriter, name: str, values: np.ndarray, quant: GGMLQuantizationType | None
) -> None:
    if quant is None or values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quants.quantize(values, quant), raw_dtype=quant)


def write_wheel(folder: Path, project: str, member: str, content: bytes) -> Wheel:
    """Write a wheel that holds one file and say what it is."""
    package = project.replace("-", "_")
    file, info = f"{package}-1.0-py3-none-any.whl", f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = (folder / file).read_bytes()
    return Wheel(project, "1.0", file, len(data), hashlib.sha256(data).hexdigest(), member)


def make_entry(folder: Path, gguf: Path, parts: int = 1) -> Entry:
    """Cut the GGUF file into wheels in `folder`."""
    data = gguf.read_bytes()
    cuts = [len(data) * part // parts for part in range(parts + 1)]
    wheels = [
        write_wheel(folder, f"tiny-part{part}", f"tiny/part{part}.gguf", data[cuts[part] : cuts[part + 1]])
        for part in range(parts)
    ]
    sha256 = hashlib.sha256(data).hexdigest()
    return Entry("tiny", "a test", "CC0", tuple(wheels), "tiny.gguf", len(data), sha256, 1_000_000)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unchanged tiny model, float32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FOREDRAFT_CACHE", str(folder))
    return folder


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks: a local directory, whatever the machine's own settings say."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def add_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Entry], None]:
    """Make an entry known to the zoo for one test."""

    def add(entry: Entry) -> None:
        known = MappingProxyType({**api.MODELS, entry.name: entry})
        monkeypatch.setattr(api, "MODELS", known)

    return add


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process started from here on is an error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
