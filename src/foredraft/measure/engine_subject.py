"""An engine of this process that is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.engine.drafter import Drafter
from foredraft.errors import ForedraftError
from foredraft.measure.stated import Guess
from foredraft.measure.subjects import Answered
from foredraft.tree import children
from foredraft.types import Draft, StepOutput


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
    tokens, below = draft.tokens.tolist(), children(draft.parents)
    found: list[Guess | None] = []
    for parent, _ in zip((-1, *output.path), output.token_ids, strict=False):
        kids = below[parent + 1]
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
