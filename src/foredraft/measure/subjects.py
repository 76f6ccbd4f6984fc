"""Who is checked: engines or servers that answer single requests with everything they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foredraft.engine.drafter import Drafter
from foredraft.errors import ForedraftError
from foredraft.measure.client import Client, RequestFailed
from foredraft.measure.stated import Guess
from foredraft.types import Draft, StepOutput


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


class _Watching(Drafter):
    """A drafter that keeps the drafts of the last step."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.proposer, drafter.controller)
        self.made: dict[str, Draft] = {}

    def propose(self, seqs: Any, pool: Any, batch_tokens: int) -> list[Draft]:
        """Return one draft a sequence."""
        drafts = super().propose(seqs, pool, batch_tokens)
        self.made = {seq.request_id: draft for seq, draft in zip(seqs, drafts, strict=True)}
        return drafts


class EngineSubject:
    """An engine with its tokenizer: `encode` turns a body into prompt ids and SamplingParams."""

    tops, states_laws = 20, True

    def __init__(self, name: str, engine: Any, encode: Any) -> None:
        self.name, self.engine, self._encode = name, engine, encode
        self._drafts = engine.drafter = _Watching(engine.drafter)

    def ask(self, bodies: Sequence[Mapping[str, Any]], *, together: bool) -> list[Answered]:
        """Answer the bodies one by one, or as many at once as the engine takes."""
        if not together:
            return [self._run([body])[0] for body in bodies]
        return self._run(bodies)

    def _run(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answered]:
        outputs: dict[str, list[StepOutput]] = {}
        guesses: dict[str, list[Guess | None]] = {}
        answers: list[Answered | str] = []
        for body in bodies:
            try:
                prompt, params = self._encode(body)
                request = self.engine.add(prompt, params)
            except ForedraftError as error:
                answers.append(Answered(refused=str(error)))
                continue
            outputs[request], guesses[request] = [], []
            answers.append(request)
        left = len(outputs)
        while left:
            for output in self.engine.step():
                outputs[output.request_id].append(output)
                guesses[output.request_id] += _guesses(self._drafts.made[output.request_id], output)
                left -= output.finish_reason is not None
        return [_engine_answer(outputs[a], guesses[a]) if isinstance(a, str) else a for a in answers]

    def token_id(self, token: Any) -> int | None:
        """Tokens are ids here."""
        return int(token)


def _guesses(draft: Draft, output: StepOutput) -> list[Guess | None]:
    """Return what was guessed at the place of each token of a step, from the root along the accepted path."""
    tokens = draft.tokens.tolist()
    found: list[Guess | None] = []
    for parent, _ in zip((-1, *output.path), output.token_ids, strict=False):
        kids = [node for node, above in enumerate(draft.parents) if above == parent]
        guess = Guess(tuple(tokens[node] for node in kids)) if kids else None
        if guess is not None and draft.draw != "fixed" and draft.laws is not None:
            drawn = float(draft.laws[parent + 1, tokens[kids[0]]])
            guess = Guess(guess.tokens, drawn) if len(kids) == 1 else None
        found.append(guess)
    return found + [None] * (len(output.token_ids) - len(found))


def _engine_answer(outputs: Sequence[StepOutput], guesses: Sequence[Guess | None]) -> Answered:
    ids = tuple(token for output in outputs for token in output.token_ids)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return Answered(
        text="".join(output.text for output in outputs),
        tokens=ids,
        logprobs=tuple(entry.logprob for entry in entries) if entries else None,
        tops=tuple(dict(entry.top) for entry in entries),
        finish=outputs[-1].finish_reason,
        usage=len(ids),
        guesses=tuple(guesses),
    )


class ServerSubject:
    """A server by URL. It may have processors of its own, so its log-probabilities are not taken as laws."""

    tops, states_laws = 5, False

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
