"""What the linter says of heads with one thing wrong, and the command line around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import check_fits, lint, read_head
from foredraft.models.formats.files import TargetFacts
from foredraft.propose.heads import load_eagle
from tiny_heads import CONFIG, DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, eagle_tensors, medusa_tensors, write

TARGET = TargetFacts(HIDDEN, VOCAB, LAYERS, "tiny")
IDS = "eagle_aux_hidden_state_layer_ids"
Config, Tensors = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Tensors], None]


def said(path: Path, change: Change, target: TargetFacts | None = TARGET) -> list[str]:
    config, tensors = json.loads(json.dumps(CONFIG)), eagle_tensors()
    change(config, tensors)
    return [f"{f.severity}: {f.text}" for f in lint(read_head(write(path, config, tensors)), target)]


def test_a_sound_head_has_no_errors(tmp_path: Path) -> None:
    notes = said(tmp_path, lambda config, tensors: None)
    assert [note.split(":")[0] for note in notes] == ["note"]
    assert "embed_tokens.weight" in notes[0]


def test_angles_are_found_where_transformers_writes_them(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    files = read_head(write(tmp_path, config, eagle_tensors()))
    assert load_eagle(files, TARGET, torch.float32).config.rope_theta == 5e5


def drop(name: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        del tensors[name]

    return change


def put(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def shape(name: str, *sizes: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(sizes, dtype=torch.bfloat16)})


def ids(*layers: int) -> Change:
    return put(eagle_config={IDS: list(layers)})


WRONG: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (
        drop("midlayer.mlp.up_proj.weight"),
        "error: 1 tensors are missing, first midlayer.mlp.up",
    ),
    "config of another head": (put(hidden_size=64), "error: config says hidden_size 64"),
    "layer of EAGLE-1's width": (
        shape("midlayer.self_attn.q_proj.weight", 32, HIDDEN),
        "error: midlayer.self_attn.q_proj.weight is [32, 32], expected [any, 64]",
    ),
    "wrong number of layers": (ids(1, 5), "error: fc.weight is [32, 96], expected [32, 64] (2 hidden states"),
    "target too shallow": (ids(1, 5, 20), "error: hidden state 21 does not exist: tiny has 12 layers"),
    "inputs for outputs": (ids(2, 6, 9), "lower each by one"),
    "outputs twice": (ids(0, 4, 7), "raise each by one"),
    "no layer ids": (put(eagle_config={}), "warning: no eagle_aux_hidden_state_layer_ids"),
    "two minds": (
        put(foredraft={"hidden_layers": [1, 5, 8]}),
        "error: eagle_config names layer outputs [1, 5, 8]",
    ),
    "residual after norm": (put(norm_before_residual=True), "note: norm_before_residual is true"),
    "a norm we lack": (put(norm_output=True), "error: norm_output is true"),
    "an unasked norm": (
        shape("input_norm.weight", 96),
        "error: input_norm.weight is there, which is not known",
    ),
    "a bias": (shape("midlayer.mlp.up_proj.bias", 48), "error: midlayer.mlp.up_proj.bias is there, which"),
    "no heads": (put(num_attention_heads=None), "error: config.json lacks num_attention_heads"),
    "heads that do not divide": (put(num_key_value_heads=3), "error: 4 heads, 3 key heads, head_dim 8:"),
    "odd angles": (put(head_dim=7), "error: 4 heads, 2 key heads, head_dim 7:"),
    "other heads": (
        put(head_dim=16),
        "error: midlayer.self_attn.q_proj.weight is [32, 64], expected [64, 64]",
    ),
    "another width inside": (put(intermediate_size=50), "error: midlayer.mlp.gate_proj.weight is [48, 32]"),
    "quantised": (
        lambda config, tensors: tensors.update({"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}),
        "error: norm.weight is torch.int8",
    ),
    "another embedding": (
        shape("embed_tokens.weight", VOCAB, 16),
        "error: embed_tokens.weight is [97, 16], expected [97, 32]",
    ),
    "another activation": (put(hidden_act="gelu"), "warning: its activation is 'gelu'"),
    "target ids in d2t": (
        lambda config, tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(DRAFT_VOCAB)),
        "error: d2t holds target ids",
    ),
    "another head's d2t": (
        lambda config, tensors: tensors.update(d2t=tensors["d2t"].flip(0)),
        "error: d2t fits t2d and the vocabulary neither",
    ),
    "rounded d2t": (
        lambda config, tensors: tensors.update(d2t=tensors["d2t"].bfloat16()),
        "error: d2t is torch.bfloat16",
    ),
    "no shape of a matrix": (shape("fc.weight", 96), "error: fc.weight is [96], which is no shape"),
    "empty d2t": (lambda config, tensors: tensors.update(d2t=torch.zeros(0).long()), "error: d2t is [0]"),
    "no d2t": (drop("d2t"), "error: d2t is missing: 40 draft ids"),
    "no t2d": (drop("t2d"), "note: t2d is missing"),
    "other rows": (
        shape("lm_head.weight", 41, HIDDEN),
        "error: lm_head.weight is [41, 32], expected [40, any]",
    ),
    "another vocabulary": (put(vocab_size=98), "error: config says vocab_size 98, tiny has 97"),
    "scaled angles": (
        put(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "warning: its rotary angles are of type 'llama3'",
    ),
    "no lm_head": (drop("lm_head.weight"), "note: lm_head.weight is not there"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    change, expected = WRONG[name]
    texts = said(tmp_path, change)
    assert any(expected in text for text in texts)
    if any(text.startswith("error") for text in texts):
        return
    load_eagle(read_head(tmp_path), TARGET, torch.float32)  # what has no error can be loaded


def test_offsets_are_told_from_ids_without_the_mask(tmp_path: Path) -> None:
    def absolute(config: Config, tensors: Tensors) -> None:
        del tensors["t2d"]
        tensors["d2t"] = torch.arange(VOCAB - DRAFT_VOCAB, VOCAB)

    assert any("d2t holds target ids" in text for text in said(tmp_path, absolute))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            replace(TARGET, hidden_size=48),
            r"fc.weight is \[32, 96\], expected \[32, 144\].*another hidden size",
        ),
        (replace(TARGET, vocab_size=100), "config says vocab_size 97, tiny has 100"),
        (replace(TARGET, num_layers=6), "hidden state 9 does not exist: tiny has 6 layers"),
    ],
)
def test_another_target_is_refused(target: TargetFacts, expected: str, tmp_path: Path) -> None:
    files = read_head(write(tmp_path, CONFIG, eagle_tensors()))
    check_fits(files, TARGET)
    with pytest.raises(CheckpointError, match=expected):
        check_fits(files, target)


def test_speculators_must_say_where_the_norm_is(tmp_path: Path) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle_tensors().items()}
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": {"hidden_size": HIDDEN, "vocab_size": VOCAB},
        IDS: [1, 5, 8],
    }
    texts = [finding.text for finding in lint(read_head(write(tmp_path, config, tensors)), TARGET)]
    assert any("norm_before_residual is not in config.json" in text for text in texts)
    assert any("raise each by one" in text for text in texts)


def medusa(path: Path, tensors: Tensors, **config: Any) -> list[str]:
    files = read_head(write(path, {"medusa_num_heads": 3, "medusa_num_layers": 2} | config, tensors))
    return [f"{f.severity}: {f.text}" for f in lint(files, TARGET)]


def test_medusa_heads_are_checked(tmp_path: Path) -> None:
    assert medusa(tmp_path, medusa_tensors()) == []
    assert "target's lm_head is used" in medusa(tmp_path, medusa_tensors(own=False))[0]
    assert (
        "config says 5 heads of 2 blocks, the tensors make 3 of 2"
        in medusa(tmp_path, medusa_tensors(), medusa_num_heads=5)[0]
    )
    assert (
        "error: 0.0.linear.weight is [16, 16], expected [32, 32]"
        in medusa(tmp_path, medusa_tensors(width=16))[0]
    )
    cut = medusa_tensors()
    del cut["1.0.linear.bias"]
    assert "error: 1.0.linear.bias is missing" in medusa(tmp_path, cut)[0]
    some = medusa_tensors()
    del some["2.2.weight"]
    assert "error: 2.2.weight is missing" in medusa(tmp_path, some)[0]
    shared = medusa_tensors()
    shared["0.1.linear.weight"] = shared["0.0.linear.weight"].clone()
    assert "warning: all 2 blocks of head 0 are the same" in medusa(tmp_path, shared)[0]
    wide = medusa_tensors() | {"0.2.weight": torch.zeros(VOCAB + 1, HIDDEN)}
    assert "error: 0.2.weight is [98, 32], expected [97, 32]" in medusa(tmp_path, wide)[0]
    twice = {"token_map": torch.zeros(VOCAB, dtype=torch.int64)}
    assert "token_map must hold different tokens" in medusa(tmp_path, medusa_tensors() | twice)[0]
    more = {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    assert "lm_head.weight is there, which is not known" in medusa(tmp_path, medusa_tensors() | more)[0]
    assert "expected [9, 32]" in medusa(tmp_path, medusa_tensors() | {"token_map": torch.arange(9)})[0]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return write(tmp_path / "eagle", CONFIG, eagle_tensors())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def test_convert_writes_and_names_the_directory(
    eagle: Path, model: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run("convert", str(eagle), str(out), "--to", "speculators", "--target", str(model)) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n"
    assert "embed_tokens.weight [97, 32] is taken from" in shown.err
    assert read_head(out).layout == "speculators"
    assert run("convert", str(out), str(tmp_path / "back"), "--to", "eagle3", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["written_as"], record["hidden_layers"]) == (
        "speculators",
        "eagle3",
        [2, 6, 9],
    )


def test_lint_exits_by_what_it_found(eagle: Path, model: Path, capsys: Any) -> None:
    assert run("convert", "--lint", str(eagle), "--target", str(model)) == 0
    assert "embed_tokens.weight is not there" in capsys.readouterr().out
    write(eagle, CONFIG | {"norm_output": True}, eagle_tensors())
    assert run("convert", "--lint", str(eagle), "--json") == 1
    (finding, _) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["severity"] == "error"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "--lint and no DST"),
        (["out"], "--to '' is no layout: use medusa, eagle3, speculators"),
        (["out", "--to", "onnx"], "--to 'onnx' is no layout"),
        (["out", "--to", "medusa"], "is of kind eagle"),
        (["out", "--lint"], "--lint and no DST"),
        (["eagle", "--to", "eagle3"], "eagle exists"),
    ],
)
def test_wrong_calls_are_one_line(
    args: list[str], expected: str, eagle: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(eagle.parent)
    assert run("convert", "eagle", *args) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_head_that_is_not_there_is_one_line(capsys: Any) -> None:
    assert run("convert", "--lint", "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
