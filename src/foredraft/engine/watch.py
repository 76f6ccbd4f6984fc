"""Times of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Watch:
    """Times work where it runs. A call to a GPU returns before its work is done, so there events are timed:
    nothing waits before the seconds are asked for.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock, self._start_s, self._stop_s = clock, 0.0, 0.0
        event: Any = torch.cuda.Event
        on_gpu = device.type == "cuda"
        self._events = [event(enable_timing=True) for _ in range(2)] if on_gpu else None

    def start(self) -> None:
        """Begin."""
        self._start_s = self._clock()
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """End."""
        self._stop_s = self._clock()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the time from start to stop."""
        if self._events is None:
            return self._stop_s - self._start_s
        start, stop = self._events
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3
