"""On a GPU a pass is timed by events, which nothing waits for until the seconds are asked."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from foredraft.engine.watch import Watch


def test_on_a_cpu_the_clock_counts() -> None:
    watch = Watch(torch.device("cpu"), clock=iter([3.0, 7.5]).__next__)
    watch.start()
    watch.stop()
    assert watch.seconds() == 4.5


def test_on_a_gpu_events_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order = count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.recorded = self.waited = -1

        def record(self) -> None:
            self.recorded = next(order)

        def synchronize(self) -> None:
            self.waited = next(order)

        def elapsed_time(self, end: Event) -> float:
            assert self.recorded < end.recorded < end.waited  # milliseconds, of what is done
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Watch(torch.device("cuda"), clock=lambda: 1.0)
    watch.start()
    watch.stop()
    assert watch.seconds() == 0.25
