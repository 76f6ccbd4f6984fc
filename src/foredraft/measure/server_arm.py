"""A server as an arm of a measurement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from foredraft.errors import ConfigError
from foredraft.measure.acceptance import from_counters, from_response
from foredraft.measure.client import Client
from foredraft.measure.records import Acceptance, ArmInfo, Result, without_user
from foredraft.measure.wire import Reply, RequestFailed
from foredraft.measure.workload import Ask, Load

_PROBE_TOKENS = 24
_PROBE = "Say it again: one two three four, one two three four, one two three four."
_T = TypeVar("_T")


class ServerArm:
    """Sends requests to a server at a load, and counts tokens by its usage, or by its log-probabilities if
    the usage is found wrong.
    """

    def __init__(self, name: str, client: Client) -> None:
        self.name, self.client = name, client
        self.counter = "usage"
        self.notes: list[str] = []
        self._loop = asyncio.Runner()
        self._before: dict[str, float] = {}

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something on this arm's connections."""
        return self._loop.run(work)

    def connect(self, endpoint: str) -> None:
        """Find the model and what tokens can be counted by; raises ConfigError. endpoint: a route to try."""
        self.wait(self.client.connect())
        self.wait(self._choose_counter(endpoint))

    async def _choose_counter(self, endpoint: str) -> None:
        """Compare the usage of one answer with its log-probabilities and with max_tokens."""
        chat = endpoint.startswith("/v1/chat")
        asked = {"messages": [{"role": "user", "content": _PROBE}]} if chat else {"prompt": _PROBE}
        body = {**asked, "temperature": 0, "max_tokens": _PROBE_TOKENS}
        try:
            plain = await self.client.ask(endpoint, body, stream=True)
        except RequestFailed as error:
            raise ConfigError(f"{self.client.url} does not answer a plain request: {error}") from error
        try:
            told = await self.client.ask(endpoint, {**body, "logprobs": True if chat else 1}, stream=True)
            counted = len(told.tokens) if told.tokens else None
        except RequestFailed:
            counted = None
        wrong = usage_fault(plain, _PROBE_TOKENS)
        if wrong is None and plain.finish == "length" and plain.usage != _PROBE_TOKENS:
            wrong = f"usage says {plain.usage} tokens of an answer cut at {_PROBE_TOKENS}"
        if wrong is None and counted is not None and plain.usage is not None:
            ends = 1 if plain.finish == "stop" else 0  # some leave the token that ended the text out
            if told.usage is not None and not counted <= told.usage <= counted + ends:
                wrong = f"usage says {told.usage} tokens, its log-probabilities count {counted}"
        if wrong is None:
            return
        if counted is None:
            raise ConfigError(
                f"tokens of {self.client.url} cannot be counted: {wrong}, and it gives no log-probabilities"
            )
        self.counter = "logprobs"
        self.notes.append(f"usage is not to be trusted: {wrong}; tokens are counted by log-probabilities")

    @property
    def info(self) -> ArmInfo:
        """How the header names it."""
        where, model = without_user(self.client.url), str(self.client.model)
        return ArmInfo(self.name, "server", model, "as served", where, self.counter, tuple(self.notes))

    def warm_up(self, asks: Sequence[Ask], enough: Callable[[float], bool]) -> None:
        """Send requests one by one until `enough`, told each one's seconds per token, is satisfied."""
        for ask in asks:
            results: list[Result] = []
            self.run([ask], Load(concurrency=1), 0, 0.0, results.append)
            done = results[0]
            if done.error is None and enough(done.total_s / max(done.emitted, 1)):
                return

    def begin(self) -> None:
        """Read the counters before a block."""
        self._before = self.wait(self.client.counters())

    def end(self, results: Sequence[Result]) -> Acceptance | None:
        """Return what the counters grew by."""
        after = self.wait(self.client.counters())
        whole = all(r.error is None for r in results)  # what a failed answer emitted is in the counters too
        return from_counters(self._before, after, sum(r.emitted for r in results) if whole else None)

    def run(
        self, asks: Sequence[Ask], load: Load, block: int, origin: float, keep: Callable[[Result], None]
    ) -> None:
        """Answer the requests at a load, handing over each result as it comes."""
        self.wait(self._run(asks, load, block, origin, keep))

    async def _run(
        self, asks: Sequence[Ask], load: Load, block: int, origin: float, keep: Callable[[Result], None]
    ) -> None:
        places = asyncio.Semaphore(load.concurrency or len(asks))
        begun = time.perf_counter()

        async def one(ask: Ask, arrival: float) -> None:
            await asyncio.sleep(max(0.0, begun + arrival - time.perf_counter()))
            async with places:
                keep(await self._one(ask, load, block, origin))

        async with asyncio.TaskGroup() as group:
            for ask, arrival in zip(asks, load.arrivals(len(asks), block), strict=True):
                group.create_task(one(ask, arrival))

    async def _one(self, ask: Ask, load: Load, block: int, origin: float) -> Result:
        body = dict(ask.body)
        if self.counter == "logprobs":
            body["logprobs"] = True if "messages" in body else 1
        start = time.perf_counter()
        common: dict[str, Any] = {
            "id": ask.id,
            "category": ask.category,
            "arm": self.name,
            "load": load.label,
        }
        common |= {"block": block, "start_s": start - origin}
        try:
            reply = await self.client.ask(ask.endpoint, body, stream=True)
        except RequestFailed as error:
            return Result(**common, total_s=time.perf_counter() - start, error=str(error))
        emitted = len(reply.tokens or ()) if self.counter == "logprobs" else reply.usage
        fault = None
        if self.counter == "usage":
            fault = usage_fault(reply, ask.max_tokens)
        if not emitted:
            fault = fault or "an empty answer"
        return Result(
            **common,
            total_s=reply.total_s,
            ttft_s=reply.ttft_s,
            emitted=emitted or 0,
            first_tokens=first_tokens(reply, emitted or 0),
            chunks=reply.chunks,
            reported=reply.usage,
            finish=reply.finish,
            error=fault,
            text=reply.text,
            ids=tuple(reply.ids) if reply.ids else None,
            acceptance=from_response(reply.last, emitted or 0),
        )

    def close(self) -> None:
        """Close the connections."""
        self.wait(self.client.close())
        self._loop.close()


def first_tokens(reply: Reply, emitted: int) -> float:
    """Return how many tokens came with the first chunk: as told, else by its share of the text."""
    if reply.first_known is not None:
        return reply.first_known
    if not reply.text:
        return min(1.0, emitted)
    return max(1.0, emitted * len(reply.first_text) / len(reply.text))


def usage_fault(reply: Reply, max_tokens: int) -> str | None:
    """Return what contradicts the usage that a streamed answer claims, or None."""
    usage = reply.usage
    if usage is None:
        return "the server gives no usage (stream_options include_usage)"
    if usage > max_tokens:
        return f"usage says {usage} tokens where at most {max_tokens} were asked for"
    if reply.chunks > usage + 1:
        return f"usage says {usage} tokens, but text came in {reply.chunks} chunks"
    return None
