"""Who is checked: engines or servers that answer single requests with everything they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foredraft.measure.client import Client
from foredraft.measure.stated import Guess
from foredraft.measure.wire import RequestFailed

_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. tokens: ids or texts of the tokens; logprobs and tops (the likeliest tokens' ) beside them,
    None where they are not told. usage: as claimed. refused: why there is no answer; broke: that it was not
    said honestly, but by a fault (HTTP 5xx, a lost connection). guesses: what was guessed at each token's
    place (None: nothing), where that is known.
    """

    text: str = ""
    tokens: tuple[Any, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    tops: tuple[Mapping[Any, float], ...] = ()
    finish: str | None = None
    usage: int | None = None
    refused: str | None = None
    broke: bool = False
    guesses: tuple[Guess | None, ...] = ()


class Subject(Protocol):
    """Answers OpenAI bodies. tops: how many likeliest tokens it is asked for. states_laws: whether their
    log-probabilities are known to be those before any processor, and guesses are told.
    """

    name: str
    tops: int
    states_laws: bool

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Answer the bodies one by one, or all together."""

    def token_id(self, token: Any) -> int | None:
        """Return the id of a token as it stands in answers, for logit_bias; None if it is unknown."""


class ServerSubject:
    """A server by URL. It may have processors of its own, so its log-probabilities are not taken as laws."""

    tops, states_laws = 5, False

    def __init__(self, name: str, client: Client, runner: asyncio.Runner) -> None:
        self.name, self.client, self._runner = name, client, runner

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Send the bodies one by one, or all together, no more at once than servers take by default."""

        places = asyncio.Semaphore(_TOGETHER)

        async def placed(body: Mapping[str, Any]) -> Answered:
            async with places:
                return await self._one(body)

        async def all_of() -> list[Answered]:
            if together:
                return list(await asyncio.gather(*map(placed, bodies)))
            return [await self._one(body) for body in bodies]

        return self._runner.run(all_of())

    async def _one(self, body: Mapping[str, Any]) -> Answered:
        chat = "messages" in body
        sent = dict(body)
        tops = sent.pop("logprobs", None)
        if tops is not None:
            sent |= {"logprobs": True, "top_logprobs": tops} if chat else {"logprobs": tops}
        try:
            reply = await self.client.ask("/v1/chat/completions" if chat else "/v1/completions", sent)
        except RequestFailed as error:
            honest = error.status is not None and 400 <= error.status < 500
            return Answered(refused=str(error), broke=not honest)
        told = reply.tokens
        return Answered(
            text=reply.text,
            tokens=tuple(entry.token for entry in told) if told else None,
            logprobs=tuple(entry.logprob for entry in told) if told else None,
            tops=tuple(entry.top for entry in told or ()),
            finish=reply.finish,
            usage=reply.usage,
        )

    def token_id(self, token: Any) -> int | None:
        """Servers give texts, whose ids are not known."""
        return None
