"""A GGUF file becomes the same model, or is refused with the reason."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from foredraft import zoo
from foredraft.errors import CheckpointError, ForedraftError, ModelError
from foredraft.zoo.gguf_file import read_gguf
from unit.zoo.conftest import Recipe, tiny_llama, tokens, write_gguf

FUZZ = settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)


def refused(path: Path, recipe: Recipe, cache: Path) -> str:
    """Convert the file that the recipe gives; return the message, having checked nothing was left."""
    with pytest.raises(ModelError) as caught:
        zoo.resolve(write_gguf(path / "odd.gguf", recipe))
    assert list((cache / "models").glob("*")) == []
    return str(caught.value)


def test_float32_file_keeps_every_value(tiny_gguf: Path) -> None:
    home = zoo.resolve(tiny_gguf)
    model = AutoModelForCausalLM.from_pretrained(home, dtype="auto").eval()
    expected = tiny_llama().state_dict()
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dict.fromkeys(
        expected, torch.float32
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)


def test_tokenizer_comes_along(tiny_gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(str(tiny_gguf)))
    assert len(tokenizer) == len(tokens())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    for text in ("the  h\u00e9n\n", "<|im_start|>he<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_cut_off_first(tiny_gguf: Path) -> None:
    """Two blanks before a digit are one token, as SmolLM's merges were learned."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(tiny_gguf))
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
        (GGMLQuantizationType.Q8_0, torch.bfloat16),
    ],
)
def test_type_of_the_weights(tmp_path: Path, quant: GGMLQuantizationType, dtype: torch.dtype) -> None:
    home = zoo.resolve(write_gguf(tmp_path / "a.gguf", Recipe(quant=quant)))
    found = AutoModelForCausalLM.from_pretrained(home, dtype="auto").state_dict()
    expected = tiny_llama().state_dict()
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.float(), expected[name], rtol=0.02, atol=0.002)


def test_both_ends_of_a_turn_are_kept(tmp_path: Path) -> None:
    """A chat model may end a turn with one token and a text with another: both stop generation."""
    path = write_gguf(tmp_path / "a.gguf", Recipe(meta={"tokenizer.ggml.eot_token_id": 0}))
    assert GenerationConfig.from_pretrained(zoo.resolve(path)).eos_token_id == [2, 0]


def test_same_bytes_are_converted_once(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = zoo.resolve(tiny_gguf)
    monkeypatch.setattr("foredraft.zoo.convert.convert", None)
    assert zoo.resolve(tiny_gguf) == home
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    assert zoo.resolve(copy) == home


def test_other_bytes_are_another_model(tmp_path: Path, tiny_gguf: Path) -> None:
    other = write_gguf(tmp_path / "tiny.gguf", Recipe(seed=1))
    assert zoo.resolve(other) != zoo.resolve(tiny_gguf)


def test_unknown_architecture_is_refused(tmp_path: Path, cache: Path) -> None:
    message = refused(tmp_path, Recipe(arch="clip"), cache)
    assert "'clip'" in message
    assert "\n" not in message


def test_scaled_positions_are_refused(tmp_path: Path, cache: Path) -> None:
    assert "rotary" in refused(tmp_path, Recipe(meta={"llama.rope.scaling.type": "yarn"}), cache)


def test_tensor_that_would_be_dropped_is_refused(tmp_path: Path, cache: Path) -> None:
    """Llama 3 keeps its scaled rotary frequencies in a tensor that transformers ignores."""
    extra = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    assert "values, the model made from it" in refused(tmp_path, Recipe(extra=extra), cache)


def test_missing_tensor_is_refused(tmp_path: Path, cache: Path) -> None:
    assert "1 weights missing" in refused(tmp_path, Recipe(drop="blk.1.ffn_up.weight"), cache)


def test_part_of_a_split_file_is_refused(tmp_path: Path, cache: Path) -> None:
    assert "--merge" in refused(tmp_path, Recipe(meta={"split.count": 3}), cache)


def test_no_gguf_at_all(tmp_path: Path, cache: Path) -> None:
    for content in (b"", b"GGU", b"PK\x03\x04 not this"):
        path = tmp_path / "a.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no GGUF file"):
            zoo.resolve(path)
    assert not cache.exists()


def test_old_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    with pytest.raises(ModelError, match="version 1"):
        read_gguf(path)


def test_truncation_names_the_sizes(tmp_path: Path, tiny_gguf: Path, cache: Path) -> None:
    path = tmp_path / "a.gguf"
    data = tiny_gguf.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=f"{len(data) - 100:,} bytes of"):
        zoo.resolve(path)
    assert not cache.exists()


@FUZZ
@given(cut=st.floats(0, 0.999))
def test_any_truncation_is_a_clear_error(tmp_path: Path, tiny_gguf: Path, cut: float) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(data[: int(cut * (len(data) - 32))])
    with pytest.raises(CheckpointError):
        read_gguf(path)


@FUZZ
@given(place=st.integers(0, 9000), value=st.integers(0, 255))
def test_damaged_head_never_crashes(tmp_path: Path, tiny_gguf: Path, place: int, value: int) -> None:
    """A changed byte may go unseen, or be one of our errors; never another exception."""
    data = bytearray(tiny_gguf.read_bytes())
    data[place] = value
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with suppress(ForedraftError):
        read_gguf(path)
