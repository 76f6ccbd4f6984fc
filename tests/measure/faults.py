"""A test build of the engine: right, or with one planted fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from fakes import ContextTarget, RandomProposer
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig, decide, engine
from foredraft.measure.engine_arm import params_of
from foredraft.measure.engine_subject import EngineSubject
from foredraft.sampling import draw
from foredraft.types import NO_DRAFT, SamplingParams, Verdict, chain

VOCAB = 20
BODIES = [{"prompt": text, "max_tokens": 24, "temperature": 0} for text in ("abc", "dada", "gfe")]


class Likeliest(RandomProposer):
    """Guesses the likeliest tokens, as many as it may."""

    def _integer(self, high: int) -> int:
        return high - 1


class Letters:
    """A token is a letter; a types.TextSink."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.text, self.shown, self.stopped = stop, "", 0, False

    def push(self, token_ids: Sequence[int]) -> int | None:
        for token in token_ids:
            self.text += chr(97 + token)
            ends = [stop for stop in self.stop if self.text.endswith(stop)]
            if ends:
                count = len(self.text)
                self.text, self.stopped = self.text[: -len(ends[0])], True
                return count
        return None

    def take(self, *, final: bool) -> str:
        held = 0 if final or not self.stop else max(map(len, self.stop)) - 1
        shown, self.shown = self.shown, max(self.shown, len(self.text) - held)
        return self.text[shown : self.shown]


class Faulty:
    """An engine whose steps run with something replaced."""

    def __init__(self, right: Engine, patches: Sequence[tuple[Any, str, Any]]) -> None:
        self.right, self.patches = right, patches

    def add(self, prompt: Any, params: Any) -> str:
        return self.right.add(prompt, params)

    @property
    def drafter(self) -> Any:
        return self.right.drafter

    @drafter.setter
    def drafter(self, drafter: Any) -> None:
        self.right.drafter = drafter

    def step(self) -> Any:
        with mock.patch.multiple(self.patches[0][0], **{name: new for _, name, new in self.patches}):
            return self.right.step()


class Flat(Likeliest):
    """Guesses drawn from one flat law."""

    def _one(self, seq: Any, budget: int) -> Any:
        count = max(0, min(budget, seq.levels_left))
        law = torch.full((VOCAB,), 1 / VOCAB)
        noise = seq.noise.fork("draft")
        tokens = [draw(law, noise, len(seq.tokens) + depth) for depth in range(count)]
        return chain(tokens, law.expand(count + 1, VOCAB), "iid") if count else NO_DRAFT


def subject(
    name: str, *, drafts: bool, fault: str | None = None, seed: int = 0, drawn: bool = False
) -> EngineSubject:
    """An engine over a fake target that depends on its last two tokens."""
    target = ContextTarget(VOCAB, seed=seed, order=2, sharpness=1.5)
    right = Engine(
        target,
        (Flat(target, draw="iid") if drawn else Likeliest(target, chain=True)) if drafts else None,
        config=EngineConfig(max_seqs=64, max_len=64, max_batch_tokens=256, kv_tokens=64 * 96),
        controller=FixedBudget(3) if drafts else None,
        make_sink=lambda params: Letters(params.stop),
    )
    built: Any = right if fault is None else Faulty(right, FAULTS[fault])
    return EngineSubject(name, built, _encode)


def _encode(body: Any) -> tuple[list[int], SamplingParams]:
    return [ord(letter) - 97 for letter in body["prompt"]], params_of(body, "test")


def biased(share: float) -> Callable[..., Verdict]:
    """What is rejected is accepted all the same, in a share of the cases."""

    def verify(draft: Any, laws: Any, noise: Any, pos: int) -> Verdict:
        verdict = decide_matched(draft, laws, noise, pos)
        end = len(verdict.path)
        if end < len(draft) and noise.uniform(pos, sibling=99) < share:
            path = (*verdict.path, end)
            return Verdict(path, draw(laws[end + 1], noise, pos + end + 1), recovered=False)
        return verdict

    return verify


def _wrong_bonus(draft: Any, logits: Any) -> Verdict:
    """The bonus is read from the row before its own."""
    verdict = decide_greedy(draft, logits)
    if len(draft) and len(verdict.path) == len(draft):
        return Verdict(verdict.path, int(logits[verdict.path[-1]].argmax()), recovered=False)
    return verdict


def _overrun(*args: Any) -> Any:
    """An answer that a stop string ended has a token more."""
    emission = right_cut(*args)
    if emission.finish_reason != "stop":
        return emission
    ids = emission.token_ids
    return decide.Emission([*ids, ids[-1]], emission.origins + "b", "stop")


def _zeros(*args: Any) -> Any:
    """Accepted tokens have log-probability 0."""
    entries = right_logprobs(*args)
    path = len(args[1].path)
    if entries is None:
        return None
    return [type(e)(e.token, 0.0 if i < path else e.logprob, e.top) for i, e in enumerate(entries)]


decide_matched, decide_greedy = decide.verify_matched, decide.verify_greedy
right_cut, right_logprobs = engine.cut, engine.emitted_logprobs
_NO_HISTORY: Callable[[Any, int], bool] = lambda params, emitted: False  # noqa: E731
FAULTS: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "three in a hundred": [(decide, "verify_matched", biased(0.03))],
    "half": [(decide, "verify_matched", biased(0.5))],
    "ignored penalty": [(decide.sampling, "needs_history", _NO_HISTORY)],
    "wrong bonus row": [(decide, "verify_greedy", _wrong_bonus)],
    "stop overrun": [(engine, "cut", _overrun)],
    "zero logprobs": [(engine, "emitted_logprobs", _zeros)],
}
