"""An OpenAI-compatible server as `foredraft chat` talks to it; needs nothing beyond the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from foredraft.cli.output import note
from foredraft.errors import ConfigError, ForedraftError
from foredraft.measure.wire import (
    RequestFailed,
    answer_of,
    authorization,
    completion_tokens,
    event_data,
    parsed,
)

if TYPE_CHECKING:
    from foredraft.types import SamplingParams

_TIMEOUT_S = 600.0
# Fields that not every server knows are sent only where they say something.
_COMMON = ("temperature", "top_p", "max_tokens")
_OTHER = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key on to wherever it leads."""

    def redirect_request(self, *_args: Any) -> None:
        """Have it told as the answer that it is."""


class ServerError(ForedraftError):
    """A server cannot be reached, or refuses."""


class Remote:
    """A server's first model. Raises ConfigError for a bad URL and ServerError if nothing answers."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} is no address: give one like http://127.0.0.1:8000")
        self.base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **authorization(api_key)}
        self._opener = urllib.request.build_opener(_Stays)
        with closing(self._open("/v1/models")) as response:
            try:
                self.model = str(json.load(response)["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
                raise ServerError(f"{self.base} is no OpenAI-compatible server: it names no model") from error
        note(f"talking to {self.model} at {self.base}")

    def show(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> tuple[str, bool]:
        """Print an answer as it comes, then its figures; return its text, and whether it is whole."""
        text, tokens, start = "", None, time.monotonic()
        try:
            for piece, counted in self._pieces(self._body(messages, params)):
                text, tokens = text + piece, counted
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            return text, False
        print()
        if tokens is not None:
            note(f"{tokens} tokens, {tokens / (time.monotonic() - start):.1f} tokens/s")
        return text, True

    def _body(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> dict[str, Any]:
        from foredraft.types import SamplingParams

        plain = SamplingParams()
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        body |= {name: getattr(params, name) for name in _COMMON}
        body |= {
            name: getattr(params, name) for name in _OTHER if getattr(params, name) != getattr(plain, name)
        }
        if params.stop:
            body["stop"] = list(params.stop)
        if params.stop_token_ids:
            body["stop_token_ids"] = list(params.stop_token_ids)
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.reproducible:
            body["foredraft"] = {"reproducible": True}
        return body

    def _pieces(self, body: dict[str, Any]) -> Iterator[tuple[str, int | None]]:
        """Yield the text of a streamed answer, and how many tokens its usage says so far."""
        tokens = None
        with closing(self._open("/v1/chat/completions", body)) as response:
            try:
                for line in response:
                    data = event_data(line)
                    if data == "[DONE]":
                        return
                    if data:
                        chunk = parsed(data)
                        tokens = completion_tokens(chunk, tokens)
                        # half a character, which some send, is nothing that a terminal could show
                        yield answer_of(chunk).encode(errors="replace").decode(), tokens
            except (OSError, RequestFailed, http.client.HTTPException) as error:
                raise ServerError(f"{self.base} broke off: {error}") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base + path, data, self._headers)
            return self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if moved := error.headers.get("location"):
                where = moved.removesuffix(path)
                raise ServerError(
                    f"{self.base} sends elsewhere: give --url {where} if you trust it"
                ) from error
            with error:
                said = error.read(10_000).decode("utf-8", "replace")
            try:
                said = _message(json.loads(said))
            except ValueError:
                said = error.reason
            raise ServerError(f"{self.base} answers {error.code}: {said}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.base} cannot be reached: {reason}") from error


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
