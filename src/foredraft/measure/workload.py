"""What is asked, and how fast: requests from files or built in, and loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from foredraft.errors import ConfigError
from foredraft.rows import read_rows, request_bodies

# What is set by us, without effect, or about the request rather than of it.
_NOT_SENT = ("stream", "stream_options", "n", "user", "model", "metadata", "id", "category", "source", "text")

_MOST_ANSWERS = 64  # to one request
_BLOCK_ROUNDS = 4  # a block is so many times the concurrency, so that its ends weigh little
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: an OpenAI body with "messages" or "prompt", and where it stands, as file:line."""

    id: str
    category: str
    body: dict[str, Any]
    where: str

    @property
    def endpoint(self) -> str:
        """The route it goes to."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    @property
    def max_tokens(self) -> int:
        """The longest answer it takes."""
        return int(self.body["max_tokens"])


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, or so many arriving per second (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """As tables and records show it."""
        return str(self.concurrency) if self.concurrency is not None else f"{self.rate:g}/s"

    def arrivals(self, count: int, seed: int) -> Iterator[float]:
        """Yield the second at which each request arrives; all at 0 for a concurrency."""
        if self.rate is None:
            yield from [0.0] * count
            return
        gaps = np.random.default_rng(seed).exponential(1 / self.rate, size=count)
        yield from np.cumsum(gaps).tolist()


def parse_loads(text: str, rates: str = "") -> list[Load]:
    """Return the loads of "1,4,16" and rates of "0.5,2"; raises ConfigError."""
    loads = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not part.isdecimal() or not 1 <= int(part) <= 4096:
            raise ConfigError(f"--load {part!r} is no load: give requests at once, 1 to 4096, as 1,4,16")
        loads.append(Load(concurrency=int(part)))
    for part in filter(None, (part.strip() for part in rates.split(","))):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e5:
            raise ConfigError(f"--rate {part!r} is no rate: give requests per second, as 0.5,2")
        loads.append(Load(rate=rate))
    if not loads:
        raise ConfigError("there is no load: give --load 1,4,16 or --rate 0.5,2")
    return loads


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say gets: the longest answer, the temperature, and a seed each."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


def load_asks(files: Sequence[Path], defaults: Defaults, limit: int | None = None) -> list[Ask]:
    """Return the requests of JSONL files (the built-in ones without a file), of each file the first `limit`.

    A line is an OpenAI body, {"body": …} as a server captures it, or {"id", "category", "messages"}. One with
    several prompts, or that asks for n answers, is as many requests. Raises ConfigError naming the line.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    for path in files:
        found = list(read_rows(path))[:limit]
        if not found:
            raise ConfigError(f"{path} has no request: give JSONL with messages or prompt")
        rows += found
    if not files:
        text = resources.files("foredraft").joinpath("demo_prompts.json").read_text(encoding="utf-8")
        rows = [
            ("built-in", {**row, "messages": [{"role": "user", "content": row["text"]}]})
            for row in json.loads(text)
        ][:limit]
    asks: list[Ask] = []
    for where, row in rows:
        asks += _asks(row, where, len(asks), defaults)
    counts = {ask.id: 0 for ask in asks}
    for ask in asks:
        counts[ask.id] += 1
    return [
        Ask(f"{ask.id}#{place}", ask.category, ask.body, ask.where) if counts[ask.id] > 1 else ask
        for place, ask in enumerate(asks)
    ]


def _asks(row: dict[str, Any], where: str, place: int, defaults: Defaults) -> list[Ask]:
    asks: list[Ask] = []
    for body in request_bodies(row, where):
        _check_said(body, where)
        answers = body.get("n") or 1
        if not isinstance(answers, int) or not 1 <= answers <= _MOST_ANSWERS:
            raise ConfigError(
                f"{where} asks for n={answers!r} answers: use a whole number, 1 to {_MOST_ANSWERS}"
            )
        longest = body.pop("max_completion_tokens", None) or body.get("max_tokens") or defaults.max_tokens
        if not isinstance(longest, int) or longest < 1:
            raise ConfigError(f"{where} has max_tokens {longest!r}: use a whole number from 1")
        kept = {name: value for name, value in body.items() if name not in _NOT_SENT and value is not None}
        kept["max_tokens"] = min(longest, defaults.max_tokens)
        kept.setdefault("temperature", defaults.temperature)
        for turn in range(answers):
            own = {"seed": defaults.seed + place + len(asks)}
            if isinstance(kept.get("seed"), int):
                own["seed"] = kept["seed"] + turn  # as servers count the answers to one request
            name, category = row.get("id"), row.get("category")
            name = f"r{place + len(asks):03d}" if name is None else str(name)
            asks.append(Ask(name, "all" if category is None else str(category), kept | own, where))
    return asks


def _check_said(body: dict[str, Any], where: str) -> None:
    for index, message in enumerate(body.get("messages", ())):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'{where}: messages[{index}] is no {{"role": …, "content": …}}')
    if "messages" in body and not body["messages"]:
        raise ConfigError(f"{where} has no message but the assistant's own: give what the user says")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half a character, which is no text: {error}") from error


def in_blocks(items: Sequence[T], concurrency: int) -> list[list[T]]:
    """Cut what is to be answered into what one arm answers before it is another's turn."""
    size = 1 if concurrency == 1 else _BLOCK_ROUNDS * concurrency
    parts = [list(items[start : start + size]) for start in range(0, len(items), size)]
    if len(parts) > 1 and len(parts[-1]) < concurrency:
        parts[-2:] = [parts[-2] + parts[-1]]
    return parts


def how_many(count: int, concurrency: int) -> int:
    """Return how many requests are asked at a load, `count` of them different: enough to fill it twice."""
    return max(count, 2 * concurrency)


def repeated(asks: Sequence[Ask], count: int) -> list[Ask]:
    """Return so many of the requests, again from the start under new ids and seeds where they are fewer."""
    return [_again(asks[place % len(asks)], place // len(asks)) for place in range(count)]


def _again(ask: Ask, turn: int) -> Ask:
    if turn == 0:
        return ask
    seed = (int(ask.body["seed"]) + 7919 * turn) % 2**31
    return Ask(f"{ask.id}@{turn}", ask.category, {**ask.body, "seed": seed}, ask.where)
