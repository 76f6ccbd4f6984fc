"""An OpenAI-compatible server as a client sees it: who it is, one request, its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

from foredraft.errors import ConfigError
from foredraft.measure.acceptance import Counters, parse_metrics
from foredraft.measure.wire import Reply, RequestFailed, authorization, complaint, event_data, parsed

_QUICK_S = 10.0  # for a connection, and for a page of counters
_KEY = "give --api-key, or set OPENAI_API_KEY"


class Client:
    """Asks one server. `model` is the name it is asked for; connect() finds it if it is None. No request
    takes longer than timeout_s seconds, from sending to its end.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.timeout_s = model, timeout_s
        try:
            parts = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            parts = httpx2.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"{url!r} is no URL of a server: give one like http://localhost:8000")
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=authorization(api_key),
            timeout=httpx2.Timeout(None, connect=_QUICK_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def connect(self) -> str:
        """Return the name of the model that is served; raises ConfigError if there is no such server or
        model.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.get("/v1/models")
        except TimeoutError as error:
            raise ConfigError(self._late("/v1/models")) from error
        except httpx2.HTTPError as error:
            raise ConfigError(
                f"no server answers at {self.url}: {str(error) or type(error).__name__}"
            ) from error
        if moved := response.headers.get("location"):  # which is not followed, or the key would go there
            where = moved.removesuffix("/v1/models")
            raise ConfigError(f"{self.url} sends elsewhere: give {where} in its place if you trust it")
        if response.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses this key (HTTP {response.status_code}): {_KEY}")
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.url}/v1/models gives no list of models (HTTP {response.status_code}): is it an "
                "OpenAI-compatible server?"
            ) from error
        if self.model is None:
            if not names:
                raise ConfigError(f"{self.url} serves no model: give --model-name")
            self.model = names[0]
        if names and self.model not in names:
            raise ConfigError(
                f"{self.url} serves no {self.model!r} but {', '.join(names)}: give --model-name"
            )
        return self.model

    async def ask(self, endpoint: str, body: Mapping[str, Any], *, stream: bool = False) -> Reply:
        """Send one request and return its answer; raises RequestFailed."""
        sent = {"model": self.model, **body}
        if stream:
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with asyncio.timeout(self.timeout_s):
                try:
                    return await self._ask_once(endpoint, sent, stream)
                except httpx2.RemoteProtocolError:  # an idle connection closed just as it was used again
                    return await self._ask_once(endpoint, sent, stream)
        except TimeoutError as error:
            raise RequestFailed(self._late(endpoint)) from error
        except httpx2.HTTPError as error:
            raise RequestFailed(f"the connection broke: {str(error) or type(error).__name__}") from error

    def _late(self, endpoint: str) -> str:
        return (
            f"{self.url}{endpoint} gave no whole answer within {self.timeout_s:g} s: raise --timeout, or see "
            "what holds the server up"
        )

    async def _ask_once(self, endpoint: str, sent: Mapping[str, Any], stream: bool) -> Reply:
        reply = Reply(sent_s=time.perf_counter())
        async with self._http.stream("POST", endpoint, json=sent) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                said = f"HTTP {response.status_code}: {complaint(text)}"
                said += f"; {_KEY}" if response.status_code in (401, 403) else ""
                raise RequestFailed(said, response.status_code)
            try:
                if stream:
                    await self._read_events(response, reply)
                else:
                    self._read_whole(await response.aread(), reply)
            except httpx2.RemoteProtocolError as error:  # in the middle of an answer: not to be asked again
                raise RequestFailed(f"the connection broke: {error}") from error
        return reply

    async def _read_events(self, response: httpx2.Response, reply: Reply) -> None:
        done = False
        async for line in _lines(response):
            data = event_data(line)
            if data == "[DONE]":
                done = True
            elif data:
                reply.take(parsed(data), time.perf_counter() - reply.sent_s)
        if reply.finish is None and not (done and reply.chunks):
            raise RequestFailed("the stream ended without a finish_reason")

    def _read_whole(self, data: bytes, reply: Reply) -> None:
        reply.take(parsed(data), time.perf_counter() - reply.sent_s)
        if reply.finish is None:
            raise RequestFailed("the answer has no choices with a finish_reason: no OpenAI reply")

    async def counters(self) -> Counters:
        """Return what the server counts of speculation; empty if it does not tell."""
        for route in ("/metrics", "/prometheus/metrics"):
            try:
                async with asyncio.timeout(min(self.timeout_s, _QUICK_S)):
                    response = await self._http.get(route)
            except (TimeoutError, httpx2.HTTPError):
                return {}
            found = parse_metrics(response.text) if response.status_code == 200 else {}
            if found:
                return found
        return {}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield lines, which line feeds end: aiter_lines also cuts at U+2028 and others, which JSON may hold."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest
