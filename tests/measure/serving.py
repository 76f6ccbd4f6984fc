"""Mock servers in threads of this process, or in a time of their own that is counted and not waited for."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
import uvicorn

from foredraft.cli import main
from foredraft.measure import client, mock_server, run, server_arm
from foredraft.measure.mock_server import MockTruth, mock_app
from foredraft.measure.server_arm import ServerArm


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


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Where nothing is on its way, the time that would be waited for has passed."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0 if timeout else timeout)
        if not found and timeout:
            self.clock.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(_Selector(clock))
        self.time = clock  # type: ignore[method-assign]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def counted() -> Iterator[None]:
    """Let servers of serving_arm and those who measure them share a clock that skips what is waited for, so
    that no machine is too busy for exact figures, and no test waits.
    """
    clock = _Clock()
    fake = SimpleNamespace(perf_counter=clock, strftime=time.strftime)
    runner = partial(asyncio.Runner, loop_factory=lambda: _Loop(clock))
    with ExitStack() as stack:
        for module in (client, mock_server, run, server_arm):
            stack.enter_context(patch.object(module, "time", fake))
        stack.enter_context(patch.object(asyncio, "Runner", runner))
        yield


@contextmanager
def serving_arm(name: str, truth: MockTruth) -> Iterator[ServerArm]:
    """An arm over a mock server that runs in the arm's own loop, whenever the arm waits. They talk through a
    socket of the file system, where what is sent is there at once.
    """
    with TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        transport = httpx2.AsyncHTTPTransport(uds=path)
        with patch.object(httpx2, "AsyncClient", partial(httpx2.AsyncClient, transport=transport)):
            arm = ServerArm(name, client.Client("http://mock"))
        server = _Server(
            uvicorn.Config(mock_app(truth), uds=path, log_level="error", lifespan="off", ws="none")
        )

        async def start() -> asyncio.Task[None]:
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            return task

        async def stop() -> None:
            server.should_exit = True
            await task

        task = arm.wait(start())
        try:
            yield arm
        finally:
            arm.wait(arm.client.close())
            arm.wait(stop())
            arm.close()


def command(*args: str) -> int:
    """Run the command line; return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)
