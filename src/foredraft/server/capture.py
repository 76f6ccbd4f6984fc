"""Requests written to a file of JSON lines, for `measure` to replay and `train` to learn from.

A thread of its own writes, a whole line a call, so a request is never delayed or failed, and a kill can cost
the last line at most. A line: {"time", "request_id", "endpoint", "body"}.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import queue
import random
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.server.config import CaptureConfig
from foredraft.server.metrics import Metrics

_log = logging.getLogger(__name__)
_BACKLOG = 1000  # requests that may wait to be written
REDACTED = "[redacted]"


class Capture:
    """Appends a share of the requests to a file, which is put aside when it is full."""

    def __init__(self, config: CaptureConfig, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_BACKLOG)
        self._file = open_capture(config.path)
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def record(self, request_id: str, endpoint: str, body: dict[str, Any]) -> None:
        """Have a request written, if it is one of the share; drops it if the disk is too slow."""
        if random.random() >= self._config.share:
            return
        entry = {
            "time": datetime.now(UTC).isoformat(),
            "request_id": request_id,
            "endpoint": endpoint,
            "body": body,
        }
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._metrics.uncaptured.labels("backlog").inc()

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                self._write(entry)
            except Exception as error:  # a full disk or a deep body: the request itself must not suffer
                self._metrics.uncaptured.labels("error").inc()
                _log.warning("a request was not captured: %s", error)
            else:
                self._metrics.captured.inc()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._config.redact:
            entry = copy.deepcopy(entry)
            for name in self._config.redact:
                redact(entry["body"], name.split("."))
        line = json.dumps(entry).encode() + b"\n"  # in ASCII: lone surrogates stay readable
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._config.max_bytes:
            self._rotate()
            size = 0
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, size)
            raise OSError("the disk is full")

    def _rotate(self) -> None:
        """FILE becomes FILE.1, that FILE.2, and so on; the oldest goes. On failure the old one stays open."""
        path, keep = self._config.path, self._config.keep
        names = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, keep))]
        if path.exists():  # else an earlier try got so far
            for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
                if newer.exists():
                    newer.replace(older)
            path.unlink(missing_ok=True)  # when only one file is kept
        old, self._file = self._file, _open(path)
        os.close(old)


def open_capture(path: Path) -> int:
    """Open a file to be appended to, whole to its last line; raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        return _open(path)
    except OSError as error:
        raise ConfigError(f"--capture {path} cannot be written: {error.strerror}") from error


def redact(value: Any, names: list[str]) -> None:
    """Blot out a field in place; lists on the way are entered."""
    if isinstance(value, list):
        for item in value:
            redact(item, names)
    elif isinstance(value, dict) and names[0] in value:
        if len(names) == 1:
            value[names[0]] = REDACTED
        else:
            redact(value[names[0]], names[1:])


def _open(path: Path) -> int:
    """Requests are private: only the owner may read them."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _drop_torn_line(path: Path) -> None:
    """Cut off the end of a file that a crash left in the middle of a line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
