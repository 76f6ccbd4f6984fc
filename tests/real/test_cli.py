"""The command line as a user meets it: in a terminal, with the default model, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from foredraft import zoo

pytestmark = pytest.mark.real
COMMAND = [sys.executable, "-m", "foredraft"]
PATIENCE_S = 120


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    """Time limits below are for running, not for fetching."""
    zoo.pull("smollm2-135m")


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, *args: str) -> None:
        ours, theirs = pty.openpty()
        self.end = ours
        self.shown = b""  # and not asked for yet
        self.process = subprocess.Popen(
            [*COMMAND, *args], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def until(self, text: str) -> str:
        """Return what is shown next, up to and with `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} never came: {self.shown!r}"
            if select.select([self.end], [], [], left)[0]:
                self.shown += os.read(self.end, 4096)
        before, _, self.shown = self.shown.partition(text.encode())
        return before.decode(errors="replace") + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """What a test's parameter says, greedy and long."""
    started = Terminal(*request.param, "--temperature", "0", "--max-tokens", "2000", "--ignore-eos")
    yield started
    started.close()


in_chat = pytest.mark.parametrize("terminal", [["chat"]], indirect=True)
in_generate = pytest.mark.parametrize(
    "terminal", [["generate", "Tell me a long story about a lighthouse.", "--draft", "none"]], indirect=True
)


@in_chat
def test_ctrl_c_ends_the_answer_and_not_the_chat(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("Tell me a long story about a lighthouse.\n")
    terminal.until("lighthouse.")
    terminal.until(" the ")  # it is answering
    terminal.interrupt()
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("a new conversation")
    terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(PATIENCE_S) == 0


@in_chat
def test_ctrl_d_leaves_the_chat(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


@in_generate
def test_ctrl_c_in_generate_exits_with_130_and_prints_no_traceback(terminal: Terminal) -> None:
    terminal.until(" the ")
    terminal.interrupt()
    shown = terminal.until("interrupted")
    assert terminal.process.wait(PATIENCE_S) == 130
    assert "Traceback" not in shown


def test_a_question_from_a_pipe_is_answered_in_json() -> None:
    args = ["generate", "-", "--json", "--dtype", "float32", "--temperature", "0", "--max-tokens", "24"]
    question = "What is the capital of France?"
    done = subprocess.run(
        [*COMMAND, *args], input=question, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    record = json.loads(done.stdout)
    assert "Paris" in record["text"]
    assert record["stats"]["emitted"] == len(record["token_ids"])
