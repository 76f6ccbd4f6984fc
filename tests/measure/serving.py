"""Mock servers in threads of this process, and patience with a busy machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import pytest
import uvicorn

from foredraft.cli import main
from foredraft.measure.mock_server import MockTruth, mock_app


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application; yields its URL."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        (listening,) = server.servers
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def mock(**truth: Any) -> Iterator[str]:
    """Serve a mock server."""
    with serving(mock_app(MockTruth(**truth))) as url:
        yield url


def patient(test: Callable[[], None]) -> Callable[[], None]:
    """Try up to three times: that a busy machine stalls is no fault of the figures."""

    @wraps(test)
    def run_again() -> None:
        for _ in range(2):
            with suppress(AssertionError):
                return test()
        return test()

    return run_again


def command(*args: str) -> int:
    """Run the command line; return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)
