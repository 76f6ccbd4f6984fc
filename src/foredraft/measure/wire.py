"""What OpenAI-compatible servers say, read as it is meant: replies, their events, and a key sent to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ConfigError, ForedraftError

_BODY_SHOWN = 200  # characters of a server's complaint
_LOWEST = -9999.0  # what servers write, or null, for -inf, which JSON has not


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
    chunks: int = 0
    first_text: str = ""
    first_known: int | None = None  # tokens in the first chunk, where the server tells
    sent_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Add a response, or a chunk of one; raises RequestFailed for one that is none of OpenAI's."""
        with _read(chunk):
            self._take_stats(chunk)
            self.usage = completion_tokens(chunk, self.usage)
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, now)

    def _take_stats(self, said: Mapping[str, Any]) -> None:
        """Keep what a chunk or a choice says of the draft."""
        for key in ("metrics", "timings", "meta_info"):
            if said.get(key) is not None:
                self.last[key] = said[key]
        if said.get("speculative_decoding_stats") is not None:  # so vLLM's first version of its metrics
            self.last["metrics"] = {"speculative_decoding": said["speculative_decoding_stats"]}

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        self._take_stats(choice)
        said = choice.get("delta") or choice.get("message") or {}
        piece = said.get("reasoning_content") or said.get("reasoning") or ""
        piece += _answer(choice)
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


@contextmanager
def _read(chunk: Mapping[str, Any]) -> Iterator[None]:
    """Tell of what is no reply as such, whatever it is that does not fit."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise RequestFailed(f"no OpenAI reply ({error}): {complaint(json.dumps(chunk))}") from error


def answer_of(chunk: Mapping[str, Any]) -> str:
    """Return what a chunk adds to the answer, without reasoning; raises RequestFailed if it is none."""
    with _read(chunk):
        return "".join(_answer(choice) for choice in chunk.get("choices") or ())


def _answer(choice: Mapping[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or {}
    content = said.get("content")
    if isinstance(content, list):  # some give it in parts
        return "".join(part.get("text") or "" for part in content)
    return "" + (content or choice.get("text") or "")


def completion_tokens(chunk: Mapping[str, Any], known: int | None) -> int | None:
    """Return the tokens of the answer by a chunk's usage, what is known already where it says nothing."""
    usage = chunk.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else known


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
    return _LOWEST if value is None else max(_LOWEST, float(value))  # NaN is the lowest too


def _name(entry: Mapping[str, Any]) -> str:
    """A token's text; its bytes where the text alone does not tell it from others (half characters)."""
    token = str(entry["token"])
    if "\ufffd" in token and entry.get("bytes"):
        return "bytes:" + ",".join(map(str, entry["bytes"]))
    return token


def event_data(line: bytes) -> str:
    """Return the data of a line of server-sent events; "" of a comment, another field or an empty line.

    An answer or error that is not streamed, on one line, is data too.
    """
    text = line.decode(errors="replace").strip()
    name, _, data = text.partition(":")
    return data.strip() if name == "data" else text if text.startswith("{") else ""


def parsed(data: str | bytes) -> dict[str, Any]:
    """Return a reply's JSON; raises RequestFailed if it is none, or an error."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"no JSON but {complaint(str(data))}") from error
    if not isinstance(value, dict):
        raise RequestFailed(f"no JSON object but {complaint(str(data))}")
    if value.get("error"):
        raise RequestFailed(complaint(json.dumps(value["error"])))
    return value


def complaint(text: str) -> str:
    """Return what a server says as one line that is not too long."""
    line = " ".join(text.split())
    return line[:_BODY_SHOWN] + ("…" if len(line) > _BODY_SHOWN else "")


def authorization(key: str | None) -> dict[str, str]:
    """Return the header that carries a key; raises ConfigError if none can."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key is not plain ASCII on one line: give it as the server knows it")
    return {"Authorization": f"Bearer {key}"} if key else {}
