"""The command line: what goes where, exit codes, one-line errors, and a chat that survives Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba import njit

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.cli import main, options
from foredraft.cli.chat import talk
from foredraft.cli.generate import _texts
from foredraft.cli.options import Loading, Sampling
from foredraft.cli.output import note, print_json
from foredraft.cli.remote import Remote, ServerError
from foredraft.errors import CapacityError, ConfigError
from foredraft.measure.client import Client
from tiny_tokenizers import build_chat_model

SHORT = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, draft="ngram")


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get a model that is already there."""
    monkeypatch.setattr(Loading, "load", lambda self: llm)
    return llm


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)


def asked(llm: LLM, text: str) -> Any:
    return llm.chat([{"role": "user", "content": text}], GREEDY)


def test_importing_the_package_or_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys, foredraft, foredraft.cli, foredraft.zoo; "
        "assert foredraft.ConfigError and foredraft.__version__; "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_all_public_names_are_there() -> None:
    assert [name for name in foredraft.__all__ if not hasattr(foredraft, name)] == []
    assert dir(foredraft) == sorted(foredraft.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        foredraft.nonsense  # noqa: B018


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "foredraft", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"foredraft {foredraft.__version__}\n"


def test_options_have_the_defaults_of_the_library() -> None:
    assert Sampling().params() == SamplingParams()
    names = {item.name for item in fields(Sampling)}
    assert names == {item.name for item in fields(SamplingParams)} - {"logprobs", "budget"}


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["pull"], ["demo"], ["convert"]])
def test_help_shows_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert f"foredraft {' '.join(command)}" in capsys.readouterr().out


def test_one_answer_streams_and_figures_go_to_stderr(loaded: LLM, capsys: Any) -> None:
    assert run("generate", "the cat", *SHORT) == 0
    shown = capsys.readouterr()
    assert shown.out == asked(loaded, "the cat").text + "\n"
    assert shown.err.startswith("6 tokens, ")
    assert "accept_rate" in shown.err
    assert "finish length" in shown.err


def test_raw_leaves_the_template_out(loaded: LLM, capsys: Any) -> None:
    assert run("generate", "the cat", "--raw", *SHORT) == 0
    assert capsys.readouterr().out == loaded.generate("the cat", GREEDY)[0].text + "\n"


def test_json_is_one_object_a_line(loaded: LLM, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("naïve 日本語", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert run("generate", "the cat", "-", "--file", str(file), "--json", "--logprobs", "1", *SHORT) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["the cat", "from stdin", "naïve 日本語"]
    for record in records:
        answer = asked(loaded, record["prompt"])
        assert (record["text"], record["token_ids"]) == (answer.text, answer.token_ids)
        assert record["finish_reason"] == "length"
        assert record["stats"]["emitted"] == 6
        assert [entry["token"] for entry in record["logprobs"]] == answer.token_ids


def test_several_answers_keep_their_order(loaded: LLM, capsys: Any) -> None:
    assert run("generate", "the cat", "the mat", *SHORT) == 0
    expected = [f"[{n}] {asked(loaded, text).text}\n" for n, text in ((1, "the cat"), (2, "the mat"))]
    assert capsys.readouterr().out == "".join(expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "there is no prompt"),
        (["generate", ""], "prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is out of range: use 0"),
        (["generate", "x", "--temperature", "hot"], "'--temperature'"),
        (["generate", "x", "--nonsense"], "No such option: --nonsense"),
        (["generate", "x", "--file", "/nowhere/at/all"], "--file /nowhere/at/all cannot be read"),
        (["generate", "x", "--logit-bias", "7"], "use TOKEN=BIAS"),
        (["generate", "x", "--logit-bias", "7=900"], "logit_bias[7]=900"),
        (["generate", "x", "--logprobs", "2"], "add --json"),
        (["generate", "x" * 3000], "tokens"),
        (["generate", "x", "--stop", ""], "stop=''"),
        (["demo", "--draft", "none"], "--draft none leaves nothing to compare"),
        (["demo", "--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["pull"], "'NAME'"),
        (["pull", "no-such-model"], "no-such-model"),
        (["nonsense"], "No such command 'nonsense'"),
        (["mock-server", "--port", "99999"], "'--port'"),
        (["report", "/nowhere"], "/nowhere cannot be read"),
        (["advise", "--record", "/nowhere"], "/nowhere cannot be read"),
        (["generate", "a\udcff"], "no valid Unicode"),
        (["generate", "a\udcff", "--raw"], "no valid Unicode"),
        (
            ["chat", "--url", "http://127.0.0.1:1", "--draft", "none", "--tree", "4,2"],
            "--draft, --tree is for",
        ),
    ],
)
def test_user_errors_are_one_line(loaded: LLM, args: list[str], message: str, capsys: Any) -> None:
    assert run(*args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--budget", "many"], "--budget 'many' is no budget: use auto"),
        (["--dtype", "int3"], "int3"),
        (["--draft", "nosuch"], "draft='nosuch' is unknown: use auto, none, ngram"),
        (["--draft", "suffix+ngram"], "draft='suffix+ngram' is unknown"),
        (["--draft", "none", "--budget", "5"], "--draft none is none"),
    ],
)
def test_models_that_cannot_be_loaded_are_one_line(
    model: Path, args: list[str], message: str, capsys: Any
) -> None:
    assert run("generate", "x", "--model", str(model), *args) == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(("given", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_wait_awake_for_a_short_while(given: dict[str, str], spins: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.environ", dict(given))
    assert run("--version") == 0
    assert os.environ["GOMP_SPINCOUNT"] == spins


def test_ctrl_c_in_a_batch_exits_with_130(loaded: LLM, monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loaded.engine, "step", interrupt)
        assert run("generate", "x", "--json", *SHORT) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == "interrupted"
    assert loaded.generate("the", GREEDY)[0].finish_reason == "length"


def test_ctrl_c_in_a_stream_exits_with_130(loaded: LLM, monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loaded.engine, "step", interrupt)
        assert run("generate", "x", *SHORT) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def interrupt() -> Any:
    raise KeyboardInterrupt


def test_chat_without_a_terminal_is_one_question(loaded: LLM, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    assert run("chat", *SHORT) == 0
    assert capsys.readouterr().out == asked(loaded, "the cat").text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("  \n"))
    assert run("chat", *SHORT) == 2
    assert "stdin is empty" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_what_is_piped_in_must_be_text(
    loaded: LLM, command: list[str], errors: str, monkeypatch: Any, capsys: Any
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(*command, *SHORT) == 2
    assert "stdin is no UTF-8 text" in capsys.readouterr().err


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "foredraft", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_note_stays_one_line(capsys: Any) -> None:
    note("a word " * 40)
    assert capsys.readouterr().err.count("\n") == 1


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        Remote("http://[::1")


@contextmanager
def saying(models: dict[str, str], events: bytes = b"") -> Iterator[str]:
    """Serve a list of models with these headers, and one stream; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: bytes) -> None:
            self.send_response(302 if models else 200)
            for name, value in models.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(events)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_key_is_not_sent_on() -> None:
    moved = "http://127.0.0.1:1"
    with saying({"location": f"{moved}/v1/models"}) as url:
        with pytest.raises(ServerError, match=f"give --url {moved} if"):
            Remote(url, "secret")
        with pytest.raises(ConfigError, match=f"give {moved} in its place"), asyncio.Runner() as loop:
            loop.run(Client(url, api_key="secret").connect())


def test_a_stream_is_read_as_servers_write_it(capsys: Any) -> None:
    events = b"""event: message
: ping
data:{"choices": [{"delta": {"content": "a", "role": null}}], "error": null}

data: {"choices": [{"delta": null}]}

data: {"choices": [{"delta": {"content": [{"type": "text", "text": "b\\ud83d"}]}}], "usage": "none"}

data: {"choices": null, "usage": {"completion_tokens": 2}}

data: [DONE]
"""
    with saying({}, events) as url:
        assert Remote(url).show([], SamplingParams()) == ("ab?", True)
    assert "2 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"[1]", b'{"choices": [7]}', b'{"choices": ', b'{"error": "x"}'])
def test_what_is_no_answer_keeps_the_chat(data: bytes, capsys: Any) -> None:
    with saying({}, b"data: " + data + b"\n\n") as url:
        talk(Remote(url), SamplingParams(), Script("the cat", "/quit"))
    assert f"error: {url} broke off: " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["\u00e9", "a\nb"])
def test_a_key_that_no_header_carries_is_told_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="not plain ASCII") as error:
        Remote("http://127.0.0.1:1", key)
    assert key not in str(error.value)


def test_json_has_no_number_that_is_none(capsys: Any) -> None:
    print_json({"ttft_s": math.nan, "rates": (1.0, -math.inf), "text": "é"})
    assert capsys.readouterr().out == '{"ttft_s": null, "rates": [1.0, null], "text": "é"}\n'


def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the cat", encoding="utf-8-sig")
    assert _texts([], [file]) == ["the cat"]


def test_no_command_shows_help_and_no_error(capsys: Any) -> None:
    assert run() == 2
    shown = capsys.readouterr()
    assert "foredraft demo" in shown.out + shown.err
    assert "error:" not in shown.err


def test_check_names_the_packages_it_needs(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("foredraft.cli.options.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "foredraft.measure.check", None)
    assert run("check") == 2
    assert "pip install 'foredraft[measure]'" in capsys.readouterr().err


def test_check_tells_before_the_work_that_its_results_have_no_place(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "check.json")
    assert (
        run("check", "--baseline", "http://127.0.0.1:1", "--variant", "a=http://127.0.0.1:1", "--out", out)
        == 2
    )
    assert f"{out} cannot be written" in capsys.readouterr().err


def test_check_shows_its_results_wherever_they_cannot_be_written(monkeypatch: Any, capsys: Any) -> None:
    certificate = SimpleNamespace(passed=True, greedy=[], record=dict, lines=lambda: ["nothing differs"])
    monkeypatch.setattr("foredraft.measure.check.run_check", lambda *_: certificate)
    subjects = contextmanager(lambda *_: iter([[None, None]]))
    monkeypatch.setattr(sys.modules["foredraft.cli.check"], "_subjects", subjects)
    assert run("check", "--out", "/dev/full") == 2
    shown = capsys.readouterr()
    assert shown.out == "nothing differs\n"
    assert "/dev/full cannot be written" in shown.err


class Script:
    """What a user types, line by line; exceptions are keys."""

    def __init__(self, *lines: Any) -> None:
        self.lines = list(lines)

    def __call__(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return str(line)


def test_chat_remembers_and_resets(llm: LLM, capsys: Any) -> None:
    first = asked(llm, "the cat").text
    history = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "the mat"},
    ]
    second = llm.chat(history, GREEDY).text
    fresh = asked(llm, "the mat").text
    talk(llm, GREEDY, Script("the cat", "", "the mat", "/reset", "the mat", "/what", "/quit", "the end"))
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n{second}\n{fresh}\n"
    assert "/what is no command" in shown.err


def test_ctrl_c_cancels_the_answer_and_keeps_the_chat(llm: LLM, monkeypatch: Any, capsys: Any) -> None:
    step, steps = llm.engine.step, iter(range(3))

    def interrupted_once() -> Any:
        if next(steps, None) is None:
            monkeypatch.setattr(llm.engine, "step", step)
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_once)
    talk(llm, GREEDY, Script("the cat", "the mat", KeyboardInterrupt()))
    part, answer, _ = capsys.readouterr().out.split("\n")[:3]
    assert asked(llm, "the cat").text.startswith(part)
    assert part
    history = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": part},
        {"role": "user", "content": "the mat"},
    ]
    assert answer == llm.chat(history, GREEDY).text


def test_what_is_no_text_keeps_the_chat(llm: LLM, capsys: Any) -> None:
    undecoded = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    talk(llm, GREEDY, Script(undecoded, "a\udcff", "the cat"))
    shown = capsys.readouterr()
    assert shown.err.count("no UTF-8 text") == 2
    assert shown.out == asked(llm, "the cat").text + "\n\n"


def test_a_full_context_keeps_the_chat(llm: LLM, capsys: Any) -> None:
    talk(llm, GREEDY, Script("x" * 3000, "the cat"))
    shown = capsys.readouterr()
    assert "/reset starts anew" in shown.err
    assert shown.out == asked(llm, "the cat").text + "\n\n"
    with pytest.raises(CapacityError):
        asked(llm, "x" * 3000)


def test_what_a_turn_is_refused_keeps_the_chat(llm: LLM, monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.text.encode_chat", refuse)
        talk(llm, GREEDY, Script("the cat", "/quit"))
    assert "error: not this one" in capsys.readouterr().err


def refuse(*_: Any) -> Any:
    raise ConfigError("not this one")


def test_compiling_is_told() -> None:
    """Only while something is compiled: what is kept from before is loaded at once."""
    said: list[str] = []

    class Status:
        update = staticmethod(said.append)

    with options._told_of_compiling(Status()):  # type: ignore[arg-type]
        assert not said
        njit(lambda x: x + 1)(1)
    assert "compiling" in said[0]
