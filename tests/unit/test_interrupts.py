"""An interrupt waits for the step that runs."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from fakes import ContextTarget
from foredraft.engine import Engine
from foredraft.engine.interrupts import held
from foredraft.types import SamplingParams


def test_an_interrupt_is_raised_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ContextTarget(7)
    engine, forward = Engine(target), target.forward

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return forward(*args)

    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), "one")
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.stats.emitted == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [len(output.token_ids) for output in engine.step()] == [1]


def test_other_threads_leave_signals_alone() -> None:
    done: list[bool] = []

    def work() -> None:
        with held():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
