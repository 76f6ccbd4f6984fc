"""What a user may call a model, and what is said when it is none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

from foredraft import zoo
from foredraft.errors import CheckpointError, DownloadError, ModelError


def write_model(folder: Path, *, tokenizer: bool = True) -> Path:
    """A directory with the files that are looked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4, 4), "b": torch.zeros(3)}, folder / "model.safetensors")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def test_directory_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_model(tmp_path / "model")
    assert zoo.resolve(home) == home
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.resolve("~/model") == home


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "neither config.json nor"),
        (["config.json"], r"a config.json but no \*.safetensors"),
        (["config.json", "pytorch_model.bin"], r"pickled weights only \(pytorch_model.bin\)"),
        (["config.json", "medusa_lm_head.pt"], r"pickled weights only \(medusa_lm_head.pt\)"),
        (["README.md", "a.Q4_0.gguf"], "name one of them, such as .*a.Q4_0.gguf"),
    ],
)
def test_directory_that_is_no_model(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=message):
        zoo.resolve(tmp_path)


def test_weights_without_config(tmp_path: Path) -> None:
    (write_model(tmp_path) / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config.json"):
        zoo.resolve(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks 1 of the files .* first model-2.safetensors"):
        zoo.resolve(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        zoo.resolve(tmp_path)


def test_truncated_weights_name_both_sizes(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(data) - 1} bytes, its header says {len(data)}"):
        zoo.resolve(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}x"]
)
def test_weights_that_are_none(tmp_path: Path, content: bytes) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        zoo.resolve(tmp_path)


def test_large_file_pointer_is_recognised(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid"
    )
    with pytest.raises(CheckpointError, match="git lfs pull"):
        zoo.resolve(tmp_path)


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "~/absent", "a/b/c", "absent.gguf", "x/absent.gguf"]
)
def test_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        zoo.resolve(name)
    with pytest.raises(ModelError, match="does not exist"):
        zoo.resolve(Path("some/where"))


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        zoo.resolve(tmp_path / "weights.bin")


@pytest.mark.parametrize("name", ["smollm", "", "what is this?"])
def test_unknown_name_says_what_would_do(name: str) -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m, gemma3-270m\), a Hugging Face id"):
        zoo.resolve(name)


class Hub:
    """Stands in for the hub's client. `cached` and `online`: the snapshot directory, or what is raised."""

    def __init__(self, cached: Path | Exception, online: Path | Exception) -> None:
        self.answers = {True: cached, False: online}
        self.asked: list[bool] = []

    def __call__(self, repo_id: str, *, local_files_only: bool, **patterns: list[str]) -> str:
        self.asked.append(local_files_only)
        answer = self.answers[local_files_only]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


ABSENT = LocalEntryNotFoundError("not in the cache")
RESPONSE = SimpleNamespace(headers={}, request=None, status_code=401)


def use(monkeypatch: pytest.MonkeyPatch, cached: Path | Exception, online: Path | Exception) -> Hub:
    hub = Hub(cached, online)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    return hub


def test_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use(monkeypatch, write_model(tmp_path), AssertionError())
    assert zoo.resolve("org/name") == tmp_path
    assert hub.asked == [True]


def test_hub_model_is_fetched_when_parts_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_text("{}")
    whole = write_model(tmp_path / "whole")
    assert use(monkeypatch, part, whole).asked == []
    assert zoo.resolve("org/name") == whole


def test_cached_weights_without_tokenizer_do_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft heads have no tokenizer; for a model whose tokenizer was never fetched the hub is asked first."""
    head = write_model(tmp_path, tokenizer=False)
    hub = use(monkeypatch, head, ABSENT)
    assert zoo.resolve("org/name") == head
    assert hub.asked == [True, False]


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (GatedRepoError("401", response=RESPONSE), ModelError, "accept its terms"),
        (RepositoryNotFoundError("404", response=RESPONSE), ModelError, "no directory 'org/name'"),
        (ABSENT, DownloadError, "cannot fetch org/name"),
        (RuntimeError("no route"), DownloadError, r"\(no route\): check the network"),
    ],
)
def test_hub_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, error: type[Exception], message: str
) -> None:
    use(monkeypatch, ABSENT, raised)
    with pytest.raises(error, match=message) as caught:
        zoo.resolve("org/name")
    assert "\n" not in str(caught.value)


def test_id_the_hub_cannot_have() -> None:
    with pytest.raises(ModelError, match=r"no directory 'org/na\.\.me'"):
        zoo.resolve("org/na..me")


def test_hub_model_with_pickles_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    use(monkeypatch, ABSENT, tmp_path)
    with pytest.raises(ModelError):
        zoo.resolve("org/name")


def test_hub_cache_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot laid out as huggingface_hub lays it out is found by the real client."""
    repo = tmp_path / "models--org--name"
    home = write_model(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert zoo.resolve("org/name") == home
