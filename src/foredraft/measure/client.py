"""An OpenAI-compatible server as a client sees it: who it is, one request, its counters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from foredraft.errors import ConfigError, ForedraftError
from foredraft.measure.acceptance import Counters, parse_metrics

_QUICK_S = 10.0  # for a connection, and for a page of counters
_BODY_SHOWN = 200  # characters of a server's complaint
_LOWEST = -9999.0  # what servers write, or null, for -inf, which JSON has not
_KEY = "give --api-key, or set OPENAI_API_KEY"


class RequestFailed(ForedraftError):
    """A server refused or broke off a request. status: the HTTP status, None if there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One answered token as the server writes it, its log-probability, and those of the likeliest tokens."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(slots=True)
class Reply:
    """One answer. Times in seconds since the request was sent; usage as the server claims it. `tokens` and
    `ids` are None where the server does not give them. `last` is the response, or what its chunks said
    beside the text.
    """

    text: str = ""
    tokens: list[TokenInfo] | None = None
    ids: list[int] | None = None
    finish: str | None = None
    usage: int | None = None
    prompt_tokens: int | None = None
    chunks: int = 0
    first_text: str = ""
    first_known: int | None = None  # tokens in the first chunk, where the server tells
    sent_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Add a response, or a chunk of one; raises RequestFailed for one that is none of OpenAI's."""
        try:
            self._take(chunk, now)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestFailed(f"no OpenAI reply ({error}): {_complaint(json.dumps(chunk))}") from error

    def _take(self, chunk: Mapping[str, Any], now: float) -> None:
        for key in ("metrics", "timings", "meta_info"):
            if chunk.get(key) is not None:
                self.last[key] = chunk[key]
        usage = chunk.get("usage")
        if isinstance(usage, Mapping):
            self.usage, self.prompt_tokens = (
                _count(usage, "completion_tokens"),
                _count(usage, "prompt_tokens"),
            )
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, now)

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        said = choice.get("delta") or choice.get("message") or {}
        piece = said.get("reasoning_content") or said.get("reasoning") or ""
        piece += _text(said.get("content")) or choice.get("text") or ""
        tokens = _tokens(choice.get("logprobs"))
        ids = choice.get("token_ids")
        known = len(ids) if ids else len(tokens) if tokens else None
        if choice.get("finish_reason"):
            self.finish = choice["finish_reason"]
        if piece or known:
            self.chunks += 1
            if self.ttft_s is None:
                self.ttft_s, self.first_text, self.first_known = now, piece, known
            self.text += piece
        if tokens:
            self.tokens = (self.tokens or []) + tokens
        if ids:
            self.ids = (self.ids or []) + list(ids)
        self.total_s = now


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    """Return a count of tokens, None where what stands there is none."""
    count = usage.get(name)
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _text(content: Any) -> str:
    """Return the text of a message, which some give in parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _tokens(logprobs: Any) -> list[TokenInfo]:
    """Read log-probabilities as chat completions (content) or completions (tokens) give them."""
    if not isinstance(logprobs, Mapping):
        return []
    if logprobs.get("content"):
        return [
            TokenInfo(
                _name(entry),
                _logprob(entry["logprob"]),
                {_name(top): _logprob(top["logprob"]) for top in entry.get("top_logprobs") or ()},
            )
            for entry in logprobs["content"]
        ]
    if not logprobs.get("tokens"):
        return []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    values = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=False)
    return [
        TokenInfo(str(token), _logprob(value), {name: _logprob(of) for name, of in (top or {}).items()})
        for token, value, top in values
    ]


def _logprob(value: Any) -> float:
    return _LOWEST if value is None else float(value)


def _name(entry: Mapping[str, Any]) -> str:
    """A token's text; its bytes where the text alone does not tell it from others (half characters)."""
    token = str(entry["token"])
    if "\ufffd" in token and entry.get("bytes"):
        return "bytes:" + ",".join(map(str, entry["bytes"]))
    return token


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
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of a server: give one like http://localhost:8000")
        self.model, self.timeout_s = model, timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(None, connect=_QUICK_S)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits)

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
                said = f"HTTP {response.status_code}: {_complaint(text)}"
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
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                done = True
            elif data:
                reply.take(_parsed(data), time.perf_counter() - reply.sent_s)
        if not done and reply.finish is None:
            raise RequestFailed("the stream ended without a finish_reason")

    def _read_whole(self, data: bytes, reply: Reply) -> None:
        reply.take(_parsed(data), time.perf_counter() - reply.sent_s)
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


def _parsed(data: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"no JSON but {_complaint(str(data))}") from error
    if not isinstance(value, dict):
        raise RequestFailed(f"no JSON object but {_complaint(str(data))}")
    if value.get("error"):
        raise RequestFailed(_complaint(json.dumps(value["error"])))
    return value


def _complaint(text: str) -> str:
    line = " ".join(text.split())
    return line[:_BODY_SHOWN] + ("…" if len(line) > _BODY_SHOWN else "")
