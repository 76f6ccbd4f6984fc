"""Capture: what is written, what is blotted out, what a crash costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.errors import ConfigError
from foredraft.measure.engine_arm import params_of
from foredraft.rows import read_rows, request_bodies
from foredraft.server.capture import REDACTED, Capture, open_capture
from foredraft.server.config import CaptureConfig
from foredraft.server.metrics import Metrics

CHILD = """
import sys
from pathlib import Path
from foredraft.server.capture import Capture
from foredraft.server.config import CaptureConfig
from foredraft.server.metrics import Metrics
capture = Capture(CaptureConfig(Path(sys.argv[1])), Metrics("m"))
print("on", flush=True)
while True:
    capture.record("r", "/v1/completions", {"prompt": "x" * 20000})
"""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path)]


def test_what_is_refused_is_not_captured(serve: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with serve(capture=CaptureConfig(path)) as server:
        for refused in (
            {"messages": [{"role": "nobody", "content": "x"}]},
            {"messages": [{"role": "user", "content": "cat " * 3000}]},
            {"logit_bias": {"9999": 1}},
            {"min_tokens": 13},
        ):
            for stream in (False, True):
                assert server.chat(**refused, stream=stream).status_code == 400
        assert server.chat(best_of=1, stream=True).status_code == 200
        assert server.chat(service_tier=None).status_code == 200
    rows = _lines(path)
    assert [row["body"].get("stream") for row in rows] == [True, None]
    assert [set(row["body"]) - {"stream"} for row in rows] == [{"messages", "temperature", "max_tokens"}] * 2


def test_requests_are_captured_as_they_were_sent(serve: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "requests.jsonl"
    with serve(capture=CaptureConfig(path, redact=("user", "messages.name", "messages.content"))) as server:
        assert server.chat(user="me", foredraft={"budget": 3}).status_code == 200
        assert server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 2}).status_code == 200
        assert server.post("/v1/completions", {"prompt": 3}).status_code == 400
    chat, text = _lines(path)
    assert chat["endpoint"] == "/v1/chat/completions"
    assert chat["body"]["user"] == REDACTED
    assert chat["body"]["messages"][0] == {"role": "user", "content": REDACTED}
    assert chat["body"]["foredraft"] == {"budget": 3}
    assert request_bodies(text, "line 2") == [{"prompt": "the cat", "max_tokens": 2}]
    assert set(text) == {"time", "request_id", "endpoint", "body"}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]},
            {"messages": [{"role": "user", "content": "ab"}]},
        ),
        ({"prompt": ["the cat"]}, {"prompt": "the cat"}),
        ({"prompt": [5, 6]}, {"prompt": [5, 6]}),
    ],
)
def test_what_the_server_took_is_replayed(body: Any, expected: Any) -> None:
    assert request_bodies({"body": body}, "line 2") == [expected]


@pytest.mark.parametrize("prompts", [["the", "cat"], [[5], [6]]])
def test_several_prompts_are_as_many_requests(prompts: list[Any]) -> None:
    found = request_bodies({"body": {"prompt": prompts, "max_tokens": 2}}, "line 2")
    assert found == [{"prompt": prompt, "max_tokens": 2} for prompt in prompts]


@pytest.mark.parametrize("prompt", [[], [[]], "", [""], 5, ["the", 5], [5, "the"]])
def test_what_is_no_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"line 2 has the prompt .*: give a text"):
        request_bodies({"body": {"prompt": prompt}}, "line 2")


def test_a_trace_is_no_matter_of_sampling() -> None:
    body = {"messages": [], "max_tokens": 3, "foredraft": {"trace": True, "budget": 2}}
    assert params_of(body, "line 2") == SamplingParams(max_tokens=3, budget=2)


def test_files_rotate(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    capture = Capture(CaptureConfig(path, max_bytes=1_000_000, keep=3), Metrics("m"))
    for number in range(60):
        capture.record(str(number), "/v1/completions", {"prompt": "x" * 90_000})
    capture.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert all(file.stat().st_size <= 1_000_000 for file in files)
    ids = [row["request_id"] for file in (files[2], files[1], files[0]) for row in _lines(file)]
    assert ids == [str(n) for n in range(60 - len(ids), 60)]


def test_a_torn_line_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 100_000)
    capture = Capture(CaptureConfig(path), Metrics("m"))
    capture.record("r", "/v1/completions", {"prompt": "y"})
    capture.close()
    assert [*_lines(path)[0]] == ["a"]
    assert len(_lines(path)) == 2


def test_a_kill_costs_at_most_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.4)
        os.kill(child.pid, signal.SIGKILL)
    os.close(open_capture(path))  # the next start
    assert len(_lines(path)) > 10


def test_a_full_disk_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("m")
    path = tmp_path / "r"
    capture = Capture(CaptureConfig(path), metrics)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:10]))
    capture.record("r", "/v1/completions", {"prompt": "y"})
    capture.close()
    assert metrics.uncaptured.labels("error")._value.get() == 1
    assert path.read_bytes() == b""


@pytest.mark.parametrize("keep", [1, 3])
def test_a_file_that_cannot_be_put_aside_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    metrics, path = Metrics("m"), tmp_path / "r"
    for number in range(keep):
        path.with_name(f"r.{number}").write_text(f'{{"n": {number}}}\n')
    path.write_text('{"n": "' + "x" * 999_990 + '"}\n')
    capture = Capture(CaptureConfig(path, max_bytes=1_000_000, keep=keep), metrics)
    number, open_file = capture._file, os.open
    monkeypatch.setattr("foredraft.server.capture._open", lambda path: open_file("/nowhere/at/all", 0))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            capture._write({"body": {}})
        assert os.fstat(capture._file).st_size > 999_990
    assert capture._file == number
    monkeypatch.undo()
    capture.record("r", "/v1/completions", {"prompt": "y"})
    capture.close()
    assert [row["body"] for row in _lines(path)] == [{"prompt": "y"}]
    if keep == 3:  # that it was tried thrice costs no file
        assert _lines(tmp_path / "r.2") == [{"n": 1}]


@pytest.mark.parametrize(
    "change", [{"share": 0.0}, {"share": 1.1}, {"max_bytes": 5}, {"keep": 0}, {"redact": ("",)}]
)
def test_options_are_checked(tmp_path: Path, change: Any) -> None:
    with pytest.raises(ConfigError, match="--capture"):
        CaptureConfig(tmp_path / "x", **change)


def test_a_share_is_sampled(tmp_path: Path) -> None:
    capture = Capture(CaptureConfig(tmp_path / "r", share=0.25), Metrics("m"))
    for _ in range(400):
        capture.record("r", "e", {})
    capture.close()
    assert 50 < len(_lines(tmp_path / "r")) < 150


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory: name a file"):
        CaptureConfig(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: "):
        Capture(CaptureConfig(tmp_path / "file" / "r"), Metrics("m"))
