"""`foredraft serve` at its start and end, and `foredraft chat --url`."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foredraft import SamplingParams
from foredraft.cli import main
from foredraft.cli.chat import talk
from foredraft.cli.remote import Remote, ServerError


def _fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *args])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_errors_at_the_start_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} cannot be listened on" in _fails(["--port", port], capsys)
    assert "cannot be read" in _fails(["--api-key-file", str(tmp_path / "none")], capsys)
    assert "--capture-share 2.0" in _fails(["--capture", "x", "--capture-share", "2"], capsys)
    for size in ("inf", "nan"):
        assert f"--capture-max-mb {size}" in _fails(["--capture", "x", "--capture-max-mb", size], capsys)
        assert f"--kv-gb {size}" in _fails(["--kv-gb", size], capsys)
    assert "--max-body-mb inf" in _fails(["--max-body-mb", "inf"], capsys)
    for alone in (["--capture-share", "0.5"], ["--capture-redact", "user"], ["--capture-keep", "2"]):
        assert f"{alone[0]} needs --capture" in _fails(alone, capsys)
    with pytest.MonkeyPatch.context() as patch:  # a secret that is missing opens no server
        patch.setenv("FOREDRAFT_API_KEY", "")
        assert "FOREDRAFT_API_KEY is set and holds no key" in _fails([], capsys)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r"):  # told before the model is looked for
        assert f"--capture {path}" in _fails(
            ["--port", "0", "--model", "no/such", "--capture", str(path)], capsys
        )
    assert "--log-level 'loud'" in _fails(["--log-level", "loud"], capsys)
    assert "no-such-model" in _fails(["--port", "0", "--model", str(tmp_path / "no-such-model")], capsys)


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foredraft.cli.options.find_spec", lambda name: None)
    assert "pip install 'foredraft[serve]'" in _fails([], capsys)


def test_importing_foredraft_loads_no_server() -> None:
    code = (
        "import sys, foredraft, foredraft.cli; sys.exit('fastapi' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_served_model_ends_with_sigterm(model: Path, tmp_path: Path) -> None:
    capture, log = tmp_path / "requests.jsonl", tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "foredraft",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--name",
        "m",
    ]
    command += [
        "--capture",
        str(capture),
        "--kv-gb",
        "0.02",
        "--api-key",
        "very-secret",
        "--dtype",
        "float32",
        "--max-batch-tokens",
        "2",
        "--max-seqs",
        "2",
    ]
    with log.open("w") as err, subprocess.Popen(command, stderr=err) as child:
        try:
            url = _address(child, log)
            headers = {"authorization": "Bearer very-secret"}
            body = {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
            answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.json()["usage"]["completion_tokens"] == 4
        finally:
            child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    said = log.read_text()
    assert "very-secret" not in said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    [request] = [line for line in lines if line["message"] == "request"]
    assert request["status"] == 200
    assert request["completion_tokens"] == 4
    assert request["request_id"] == answer.headers["x-request-id"]
    assert json.loads(capture.read_text())["request_id"] == request["request_id"]


def _address(child: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(2400):
        assert child.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found and "startup complete" in log.read_text():
            return found[0]
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
    raise AssertionError(log.read_text())


def test_chat_with_a_server(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = iter(["the cat", "/reset", "x" * 9000, "the mat", "/quit"])
    params = SamplingParams(temperature=0, max_tokens=12, stop=("never",), top_k=50)
    talk(Remote(server.url), params, lambda: next(script))
    said = capsys.readouterr()
    answer = server.chat(messages=[{"role": "user", "content": "the mat"}]).json()
    assert answer["choices"][0]["message"]["content"] in said.out
    assert "talking to tiny" in said.err
    assert "the prompt has" in " ".join(said.err.split())
    assert "tokens/s" in said.err


def test_chat_through_the_command_line(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    with pytest.raises(SystemExit) as exit_:
        main(["chat", "--url", f"{server.url}/v1", "--max-tokens", "4", "--temperature", "0"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip()


def test_what_is_no_server(server: Any) -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        Remote("http://127.0.0.1:1")
    with pytest.raises(ServerError, match="answers 404"):
        Remote(f"{server.url}/elsewhere")
