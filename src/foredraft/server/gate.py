"""What every HTTP request passes: its id, the API key, the size of its body, and the log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.config import ServeConfig
from foredraft.server.errors import ApiError
from foredraft.server.metrics import Metrics

_log = logging.getLogger("foredraft.server")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN = ("/", "/health", "/openapi.json", "/favicon.ico")
_COUNTED = ("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")
_BODY_S = 30.0  # a body must have arrived by then
_PAGE = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"


class Gate:
    """ASGI around the whole application."""

    def __init__(self, app: ASGIApp, config: ServeConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "log": {}}
        started, status = time.perf_counter(), 499  # the client left before it was answered

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                answer["x-content-type-options"] = "nosniff"
                answer["content-security-policy"] = _PAGE
            await send(message)

        try:
            await self._serve(scope, headers, receive, reply)
        finally:
            path = scope["path"]
            counted = path if path in _COUNTED else "other"
            self._metrics.http.labels(counted, str(status)).inc()
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": path,
                "status": status,
                "seconds": round(time.perf_counter() - started, 4),
                **state["log"],
            }
            level = logging.DEBUG if path in ("/health", "/metrics") else logging.INFO
            _log.log(level, "request", extra={"fields": fields})

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return left.pop() if left else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path, method = scope["path"], scope["method"]
        if not self._config.api_keys or path in _OPEN or path.startswith("/page/") or method == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self._config.knows(key.strip().encode("latin-1", "replace")):
            hint = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=hint)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Read the body; None if the client left meanwhile. Raises ApiError when it is too large or slow."""
        most = self._config.max_body
        too_large = ApiError(413, f"the body has more than {most} bytes", headers={"connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            slow = f"the body did not arrive within {_BODY_S:g} seconds"
            raise ApiError(408, slow, headers={"connection": "close"}) from None
