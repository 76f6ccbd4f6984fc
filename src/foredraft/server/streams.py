"""How an answer goes out: whole or as server-sent events, while the client stays and the deadline allows."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.errors import ApiError, bug

_log = logging.getLogger(__name__)

Emit = Callable[[dict[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed the connection."""


async def until(deadline: float, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what `work` returns; raises ApiError at the deadline (monotonic) or when the server ends."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise _ending(TimeoutError()) from None
    except asyncio.CancelledError as error:
        if "shutdown" in error.args:
            raise _ending(error) from None
        raise


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """Run `work` as long as the client stays; raises ClientGone when it leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; ends when they end, when the client leaves, or at the deadline."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=8)
        self._work: asyncio.Task[None]
        self._deadline = 0.0

    @classmethod
    async def begin(
        cls,
        write: Callable[[Emit], Coroutine[Any, Any, None]],
        ready: asyncio.Future[None],
        deadline: float,
        receive: Receive,
    ) -> EventStream:
        """Start the work; return once the engine has taken it, or raise what came before: ClientGone, too."""
        stream = cls()
        stream._deadline = deadline
        stream._work = asyncio.ensure_future(stream._produce(write, ready))
        try:
            await unless_gone(receive, ready)
        except BaseException:
            stream._work.cancel()
            raise
        return stream

    async def _produce(
        self, write: Callable[[Emit], Coroutine[Any, Any, None]], ready: asyncio.Future[None]
    ) -> None:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                await write(self._events.put)
        except (ApiError, TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and "shutdown" not in error.args:
                ready.cancel()
                raise
            told = error if isinstance(error, ApiError) else _ending(error)
            if not ready.done():
                ready.set_exception(told)
                return
            await self._events.put(told.body)
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                return
            _log.exception("a stream broke")
            await self._events.put(bug().body)
        await self._events.put(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while (event := await self._events.get()) is not None:
            line = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _ending(error: BaseException) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="deadline")
    return ApiError(503, "the server is shutting down", code="shutdown")
