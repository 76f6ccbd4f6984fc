"""What is kept of a compiled model starts it again without transformers' modules, while its files stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tiny_models
import tiny_tokenizers
from foredraft.errors import ModelError
from foredraft.models import HFCausal, load_target, load_tokenizer, outline
from foredraft.models.compiled import CompiledCausal
from foredraft.models.fused import Rotary
from foredraft.models.hf_causal import HFCausal as Slow
from foredraft.models.outline import Outline
from foredraft.models.trial import trial
from foredraft.zoo import kept
from tiny_models import VARIANTS, fill_vectors

KINDS = sorted(VARIANTS.keys() - {"dynamic angles"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which small models too leave something."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "LEAST_BYTES", 0)
    return tmp_path / "cache"


def built(variant: str, path: Path) -> Path:
    kind, changes = VARIANTS[variant]
    tiny_models.build(kind, path, **changes)
    fill_vectors(path)
    return path


def load(path: Path) -> HFCausal:
    return load_target(path, dtype="bfloat16", device="cpu")


def refuse(*_: object) -> None:
    raise AssertionError("transformers' modules were run again")


@pytest.mark.parametrize("variant", KINDS)
def test_the_second_start_is_the_first(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, eos and sizes, and no module of transformers."""
    path = built(variant, tmp_path / "model")
    first = load(path)
    monkeypatch.setattr(Slow, "_run", refuse)
    second = load(path)
    assert isinstance(second, CompiledCausal)
    assert torch.equal(trial(second), trial(first))
    facts = ("vocab_size", "max_len", "eos_ids", "layers", "dtype", "device", "kv_bytes_per_token")
    assert all(getattr(first, fact) == getattr(second, fact) for fact in facts)


def test_another_file_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was touched, and another precision, are tried anew."""
    path = built("plain", tmp_path / "model")
    load(path)
    assert outline.known(path, "bfloat16") is not None
    assert outline.known(path, "auto") is None
    os.utime(path / "config.json", ns=(1, 1))
    assert outline.known(path, "bfloat16") is None
    monkeypatch.setattr(Slow, "_run", refuse)
    with pytest.raises(ModelError, match="run again"):
        load(path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"angles": 3}', '{"angles": [{}]}', "null", '"x"'])
def test_what_is_damaged_is_found_out_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    """Whatever lies in the cache, the model loads."""
    path = built("plain", tmp_path / "model")
    first = load(path)
    (file,) = (cache / "outlines").iterdir()
    file.write_text(damage)
    assert torch.equal(trial(load(path)), trial(first))
    assert outline.known(path, "bfloat16") is not None


def test_small_models_leave_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit nothing is written."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 1 << 24)
    load(built("plain", tmp_path / "model"))
    assert not (cache / "outlines").exists()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    """A file where the directory should be."""
    cache.write_text("")
    assert isinstance(load(built("plain", tmp_path / "model")), CompiledCausal)


@pytest.mark.parametrize("variant", KINDS)
def test_angles_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """Bit by bit, near and far."""
    target = load_target(built(variant, tmp_path / "model"), dtype="bfloat16", device="cpu", fused=False)
    found, rotary = Outline.of(target), target.model.model.rotary_emb
    assert found is not None
    positions = torch.tensor([0, 1, 2, 77, 255, 8191, 131071])
    like = torch.zeros(1, dtype=torch.bfloat16)
    kinds = list(dict.fromkeys(getattr(target.model.config, "layer_types", None) or [])) or [""]
    for angles, kind in zip(found.angles, kinds, strict=found.is_gemma):
        module = (lambda *args, kind=kind: rotary(*args, layer_type=kind)) if found.is_gemma else rotary
        wanted, own = Rotary.of(module, like, positions), angles(positions)
        assert torch.equal(own.cos, wanted.cos)
        assert torch.equal(own.sin, wanted.sin)


@pytest.mark.parametrize(
    "damage", ["", "[1]", '"auto"', '"os:system"', '"transformers.gone:X"', '"transformers:X"']
)
def test_whatever_is_kept_a_tokenizer_loads(damage: str, tmp_path: Path, cache: Path) -> None:
    """Nothing but a tokenizer of transformers is taken from the cache."""
    tiny_tokenizers.byte_level().save_pretrained(tmp_path / "model")
    wanted = load_tokenizer(tmp_path / "model").encode("a b c a")
    (file,) = (cache / "tokenizers").iterdir()
    whole = file.read_text()
    file.write_text(damage)
    assert load_tokenizer(tmp_path / "model").encode("a b c a") == wanted
    assert file.read_text() == (damage if damage == '"auto"' else whole)


def test_a_directory_with_a_dead_link_has_no_key(tmp_path: Path) -> None:
    """As an interrupted download may leave it."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert kept.model_key(tmp_path) is None


def test_the_kept_tokenizer_is_the_same(tmp_path: Path) -> None:
    """AutoTokenizer chooses once; then its class loads by itself."""
    from transformers import AutoTokenizer

    tiny_tokenizers.byte_level().save_pretrained(tmp_path / "model")
    first, second = load_tokenizer(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    auto = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(first) is type(second) is type(auto)
    assert first.encode("a b c a") == second.encode("a b c a") == auto.encode("a b c a")
    assert first.eos_token_id == second.eos_token_id
