"""Who is checked: engines or servers that answer single requests with everything they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foredraft.errors import ForedraftError
from foredraft.measure.client import Client, RequestFailed


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. tokens: ids or texts of the tokens; logprobs and tops (the likeliest tokens' ) beside them,
    None where they are not told. usage: as claimed. refused: why there is no answer; broke: that it was not
    said honestly, but by a fault (HTTP 5xx, a lost connection).
    """

    text: str = ""
    tokens: tuple[Any, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    tops: tuple[Mapping[Any, float], ...] = ()
    finish: str | None = None
    usage: int | None = None
    refused: str | None = None
    broke: bool = False


class Subject(Protocol):
    """Answers OpenAI bodies."""

    name: str

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Answer the bodies one by one, or all together."""

    def token_id(self, token: Any) -> int | None:
        """Return the id of a token as it stands in answers, for logit_bias; None if it is unknown."""


class EngineSubject:
    """An engine with its tokenizer: `encode` turns a body into prompt ids and SamplingParams."""

    def __init__(self, name: str, engine: Any, encode: Any) -> None:
        self.name, self.engine, self._encode = name, engine, encode

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Answer the bodies one by one, or as many at once as the engine takes."""
        if not together:
            return [self._run([body])[0] for body in bodies]
        return self._run(bodies)

    def _run(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answered]:
        outputs: dict[str, list[Any]] = {}
        answers: list[Answered | str] = []
        for body in bodies:
            try:
                prompt, params = self._encode(body)
                request = self.engine.add(prompt, params)
            except ForedraftError as error:
                answers.append(Answered(refused=str(error)))
                continue
            outputs[request] = []
            answers.append(request)
        left = len(outputs)
        while left:
            for output in self.engine.step():
                outputs[output.request_id].append(output)
                left -= output.finish_reason is not None
        return [_engine_answer(outputs[a]) if isinstance(a, str) else a for a in answers]

    def token_id(self, token: Any) -> int | None:
        """Tokens are ids here."""
        return int(token)


def _engine_answer(outputs: Sequence[Any]) -> Answered:
    ids = tuple(token for output in outputs for token in output.token_ids)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return Answered(
        text="".join(output.text for output in outputs),
        tokens=ids,
        logprobs=tuple(entry.logprob for entry in entries) if entries else None,
        tops=tuple(dict(entry.top) for entry in entries),
        finish=outputs[-1].finish_reason,
        usage=len(ids),
    )


class ServerSubject:
    """A server by URL. token_ids: from a token's text to its id, where the tokenizer is known."""

    def __init__(self, name: str, client: Client, runner: asyncio.Runner) -> None:
        self.name, self.client, self._runner = name, client, runner

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Send the bodies one by one, or all at once."""

        async def all_of() -> list[Answered]:
            if together:
                return list(await asyncio.gather(*map(self._one, bodies)))
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
