"""Reading and writing draft heads: round trips bit by bit, layer numbering, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
from foredraft import zoo
from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import exported, is_head, read_head, target_facts, write_head
from foredraft.models.formats.files import TargetFacts
from foredraft.models.formats.speculators import to_speculators
from tiny_heads import CONFIG, DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, eagle_tensors, medusa_tensors, write

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some/model"}


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return write(tmp_path / "eagle", CONFIG, eagle_tensors())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    path = tmp_path_factory.mktemp("target")
    return target_facts(tiny_models.build("llama", path, num_hidden_layers=LAYERS, tie_word_embeddings=False))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def stored(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (file,) = path.glob("*.safetensors")
    return json.loads((path / "config.json").read_text()), load_file(file)


def test_a_head_is_readable_as_any_new_file_is(eagle: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_head(tmp_path / "b", read_head(eagle))
        write_head(tmp_path / "b", read_head(eagle))  # in its place
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "b").iterdir()} == {0o640}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_eagle3_to_speculators_and_back_changes_no_bit(
    dtype: torch.dtype, tmp_path: Path, target: TargetFacts
) -> None:
    first = write(tmp_path / "a", CONFIG, eagle_tensors(dtype=dtype))
    files, changes = exported(read_head(first), "speculators", target)
    assert [change.split()[0] for change in changes] == ["embed_tokens.weight"]
    write_head(tmp_path / "b", files, "speculators")
    config, tensors = stored(tmp_path / "b")
    assert config["speculators_model_type"] == "eagle3"
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert tensors["embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    back, _ = exported(read_head(tmp_path / "b"), "eagle3", None)
    write_head(tmp_path / "c", back, "eagle3")
    config, tensors = stored(tmp_path / "c")
    assert same(tensors, load_file(first / "model.safetensors"))
    assert {key: config[key] for key in CONFIG} == CONFIG


def test_speculators_to_eagle3_and_back_changes_no_bit(tmp_path: Path, target: TargetFacts) -> None:
    whole, _ = exported(read_head(write(tmp_path / "x", CONFIG, eagle_tensors())), "speculators", target)
    write_head(tmp_path / "a", whole, "speculators")
    config, tensors = stored(tmp_path / "a")
    config["transformer_layer_config"]["rope_theta"] = 5e5
    config["speculators_config"]["algorithm"] = "kept as it is"
    del config["foredraft"]  # as another program would have written it
    write(tmp_path / "a", config, tensors)
    write_head(tmp_path / "b", exported(read_head(tmp_path / "a"), "eagle3", None)[0], "eagle3")
    write_head(tmp_path / "c", exported(read_head(tmp_path / "b"), "speculators", None)[0], "speculators")
    again, back = stored(tmp_path / "c")
    assert same(back, tensors)
    assert {key: again[key] for key in config} == config


def test_hidden_layers_are_numbered_as_each_layout_does(tmp_path: Path, eagle: Path) -> None:
    files = read_head(eagle)
    assert files.hidden_layers == (2, 6, 9)
    write_head(tmp_path / "e", files)
    write_head(tmp_path / "s", files, "speculators")
    config, _ = stored(tmp_path / "e")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert stored(tmp_path / "s")[0]["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert read_head(tmp_path / "e").hidden_layers == read_head(tmp_path / "s").hidden_layers == (2, 6, 9)


def test_the_embedding_cannot_be_named_by_layer_outputs(tmp_path: Path) -> None:
    files = read_head(
        write(tmp_path / "a", CONFIG | {"foredraft": {"hidden_layers": [0, 6, 9]}}, eagle_tensors())
    )
    with pytest.raises(CheckpointError, match="cannot name"):
        write_head(tmp_path / "b", files)


def test_a_missing_lm_head_is_filled_from_the_target(tmp_path: Path, target: TargetFacts) -> None:
    tensors = eagle_tensors(dtype=torch.float32)
    del tensors["lm_head.weight"]
    path = write(tmp_path / "a", CONFIG, tensors)
    with pytest.raises(CheckpointError, match="--target"):
        exported(read_head(path), "eagle3", None)
    whole, _ = exported(read_head(path), "eagle3", target)
    ids = tensors["t2d"].nonzero().flatten()
    assert target.path is not None
    assert torch.equal(
        whole.tensors["lm_head.weight"], load_file(target.path / "model.safetensors")["lm_head.weight"][ids]
    )
    assert whole.own["target"]["hidden_size"] == HIDDEN
    assert same(exported(whole, "eagle3", target)[0].tensors, whole.tensors)


def test_target_ids_become_offsets_and_a_missing_mask_is_made(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    wanted = dict(tensors)
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    whole, changes = exported(read_head(write(tmp_path / "a", CONFIG, tensors)), "eagle3", None)
    assert same(whole.tensors, wanted)
    assert "offsets" in changes[0]
    del wanted["t2d"]
    whole, changes = exported(read_head(write(tmp_path / "b", CONFIG, wanted)), "eagle3", None)
    assert same(whole.tensors, eagle_tensors())
    assert changes == ["t2d is made from d2t"]


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_round_trip_changes_no_bit(prefix: str, tmp_path: Path) -> None:
    tensors = medusa_tensors()
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    first = write(tmp_path / "a", MEDUSA, named, "medusa_lm_head.safetensors")
    write_head(tmp_path / "b", read_head(first))
    config, back = stored(tmp_path / "b")
    assert same(back, tensors)
    assert {key: config[key] for key in MEDUSA} == MEDUSA
    assert (tmp_path / "b" / "medusa_lm_head.safetensors").exists()


def test_a_directory_is_replaced_whole_and_what_else_it_holds_stays(eagle: Path, tmp_path: Path) -> None:
    (eagle / "provenance.json").write_text("{}")
    (eagle / "left-over.safetensors").write_bytes((eagle / "model.safetensors").read_bytes())
    other = read_head(write(tmp_path / "other", CONFIG, eagle_tensors(seed=5)))
    write_head(eagle, other)
    assert sorted(file.name for file in eagle.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    assert same(read_head(eagle).tensors, other.tensors)
    assert {entry.name for entry in tmp_path.iterdir()} == {"eagle", "other"}


def test_a_failed_write_leaves_what_was_there(eagle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    before = stored(eagle)[1]

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_head(eagle, read_head(eagle))
    assert same(stored(eagle)[1], before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["eagle"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickles_are_refused_unopened(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=f"{name} is pickled"):
        read_head(tmp_path)


def test_damaged_and_unknown_heads_are_refused(eagle: Path, tmp_path: Path) -> None:
    whole = (eagle / "model.safetensors").read_bytes()
    (eagle / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_head(eagle)
    (eagle / "model.safetensors").write_bytes(whole)
    (eagle / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_head(eagle)
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        read_head(tmp_path)
    with pytest.raises(CheckpointError, match="no draft head"):
        read_head(write(tmp_path / "u", {}, {"wte.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="'dflash'"):
        read_head(write(tmp_path / "d", {"speculators_model_type": "dflash"}, {"fc.weight": torch.zeros(2)}))


def test_kinds_and_layouts_must_agree(eagle: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use eagle3 or speculators"):
        write_head(tmp_path / "b", read_head(eagle), "medusa")


def test_heads_are_told_from_models(eagle: Path, tmp_path: Path, target: TargetFacts) -> None:
    assert is_head(eagle)
    assert is_head(write(tmp_path / "m", MEDUSA, medusa_tensors()))
    assert target.path is not None
    assert not is_head(target.path)
    assert not is_head(tmp_path)


def test_a_model_without_sizes_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(CheckpointError, match="vocab_size"):
        target_facts(tmp_path)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected a whole number"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"eagle_config": [1]}, "expected an object"),
        ({"norm_before_residual": "false"}, "'false', expected true or false"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "x"]}},
            "expected a list of layer numbers",
        ),
        ({"foredraft": {"hidden_layers": 3}}, "hidden_layers is 3"),
        ({"head_dim": 8.0}, "head_dim is 8.0, expected a whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', expected a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, expected a number above 0"),
        ({"foredraft": {"tree": [[0], 1]}}, "tree is .*, expected lists of ranks"),
    ],
)
def test_config_entries_of_a_wrong_type_are_named(
    entry: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read_head(write(tmp_path, CONFIG | entry, eagle_tensors()))


def test_what_is_shipped_says_all_that_vllm_asks_of_a_layer() -> None:
    (path,) = zoo.shipped("eagle")
    written, _ = to_speculators(json.loads((path / "config.json").read_text()), {})
    asked = {"hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps", "rope_theta", "head_dim"}
    assert asked <= written["transformer_layer_config"].keys()
