"""EAGLE-1 heads on disk: told from models and EAGLE-3, written back bit by bit, refused if they misfit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import exported, is_head, lint, read_head, write_head
from foredraft.models.formats.files import TargetFacts
from foredraft.propose.heads import load_eagle
from tiny_heads import CONFIG, HIDDEN, VOCAB, write

TARGET = TargetFacts(HIDDEN, VOCAB, 4, "tiny")
ONE = {  # no word of EAGLE, as the EAGLE project writes it
    **{key: value for key, value in CONFIG.items() if key not in ("eagle_config", "draft_vocab_size")},
    "architectures": ["LlamaForCausalLM"],
}
SHAPES = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.q_proj.weight": (32, HIDDEN),
    "layers.0.self_attn.k_proj.weight": (16, HIDDEN),
    "layers.0.self_attn.v_proj.weight": (16, HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "layers.0.mlp.gate_proj.weight": (48, HIDDEN),
    "layers.0.mlp.up_proj.weight": (48, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, 48),
}


def made(**more: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).bfloat16() for name, shape in (SHAPES | more).items()}


@pytest.mark.parametrize("more", [{}, {"fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_round_trip_changes_no_bit(prefix: str, more: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    tensors = made(**more)
    first = write(tmp_path / "a", ONE, {prefix + name: value for name, value in tensors.items()})
    files, changes = exported(read_head(first), "eagle1", TARGET)
    assert not changes
    write_head(tmp_path / "b", files)
    back = load_file(tmp_path / "b" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    again = read_head(tmp_path / "b")
    assert (again.kind, again.layout) == ("eagle1", "eagle1")
    assert {key: again.config[key] for key in ONE} == ONE
    head = load_eagle(again, TARGET, torch.bfloat16)
    assert torch.equal(head.fc.weight, tensors["fc.weight"])
    assert (head.fc.bias is not None) == bool(more)
    assert head.config.hidden_layers == (4,)
    for layout in ("eagle3", "speculators", "medusa"):
        with pytest.raises(CheckpointError, match=r"of kind eagle1.*use eagle1"):
            write_head(tmp_path / "c", again, layout)  # type: ignore[arg-type]


def test_it_is_told_from_a_model_of_one_layer(tmp_path: Path) -> None:
    head = write(tmp_path / "head", ONE, made())
    assert is_head(head)
    assert not is_head(tiny_models.build("llama", tmp_path / "small", num_hidden_layers=1))
    (head / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="damaged"):
        is_head(head)


WRONG: list[tuple[str, tuple[int, ...] | None, str]] = [
    ("layers.0.mlp.up_proj.weight", None, "1 tensors are missing, first midlayer.mlp.up_proj"),
    ("fc.weight", (64,), r"fc.weight is \[64\], which is no shape of an EAGLE-1"),
    ("fc.weight", (32, 96), r"fc.weight is \[32, 96\], expected \[32, 64\]: the head is for another"),
    ("layers.0.self_attn.q_proj.weight", (32, 64), r"q_proj.weight is \[32, 64\], expected \[any, 32\]"),
    ("lm_head.weight", (96, 32), r"lm_head.weight is \[96, 32\], expected \[97, 32\]"),
    ("layers.0.mlp.up_proj.weight", (49, 32), r"up_proj.weight is \[49, 32\], expected \[48, 32\]"),
    ("d2t", (97,), "d2t is there, which is not known"),
]


@pytest.mark.parametrize(("name", "shape", "expected"), WRONG)
def test_what_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...] | None, expected: str, tmp_path: Path
) -> None:
    tensors = made()
    assert [f.severity for f in lint(read_head(write(tmp_path, ONE, tensors)), TARGET)] == ["note", "note"]
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=expected):
        load_eagle(read_head(write(tmp_path, ONE, tensors)), TARGET, torch.float32)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    files = read_head(write(tmp_path, ONE | {"vocab_size": 98}, made()))
    with pytest.raises(CheckpointError, match="config says vocab_size 98, tiny has 97"):
        load_eagle(files, TARGET, torch.float32)


def test_the_command_writes_it_in_its_own_layout_only(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "a", ONE, made())
    for layout, code in (("eagle3", 2), ("eagle1", 0)):
        with pytest.raises(SystemExit) as done:
            main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", layout, "--json"])
        assert int(done.value.code or 0) == code
    assert "is of kind eagle1, which --to eagle3 cannot hold" in (shown := capsys.readouterr()).err
    assert json.loads(shown.out)["written_as"] == "eagle1"
