"""The demo: the same prompts decoded plainly and with a draft, timed and compared token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table

from foredraft.llm import LLM, stats_record
from foredraft.text import encode_chat
from foredraft.types import Completion, SamplingParams

Identity = Literal["yes", "tie", "NO"]
_TOP = 20  # tokens whose log-probabilities are asked for; the most that SamplingParams gives
_NOISE_TOP = 5  # the likeliest of them, between which the noise is measured
_NOISE_FLOOR = 1e-5  # nats: what float32 rounds of a log-probability itself, as in measure/greedy.py
_NOISE_AT = 8  # places of an answer where it is measured
_RESAMPLES = 10_000
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One built-in prompt."""

    category: str
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two answers agree; where they do not, the facts that decide.

    at: the first differing place in the answer, in tokens. gap: how much likelier the target finds the plain
    answer's token there than the drafted one's, in nats (None: that one is not among the likeliest). noise:
    how far such gaps move when the same text is read in one pass instead of token by token.
    """

    identical: Identity
    at: int | None = None
    gap: float | None = None
    noise: float | None = None

    @property
    def why(self) -> str:
        """One line on where and how far the answers differ."""
        if self.noise is None:
            return f"differs at token {self.at}, where plain decoding itself does not repeat or has ended"
        gap = (
            f"are {self.gap:.3g} nats apart"
            if self.gap is not None
            else f"are not among the likeliest {_TOP}"
        )
        return f"differs at token {self.at}: the two tokens {gap}, the numerical noise is {self.noise:.3g}"


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, decoded both ways."""

    prompt: DemoPrompt
    plain: Completion
    drafted: Completion
    comparison: Comparison

    @property
    def speedup(self) -> float:
        """Tokens per second, drafted over plain."""
        return self.drafted.stats.tokens_per_s / self.plain.stats.tokens_per_s


@dataclass(frozen=True, slots=True)
class MeanSpeedup:
    """Geometric mean of the prompts' speed-ups; low, high: its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float


def demo_prompts() -> list[DemoPrompt]:
    """Return the built-in prompts."""
    text = resources.files("foredraft").joinpath("demo_prompts.json").read_text(encoding="utf-8")
    return [DemoPrompt(**entry) for entry in json.loads(text)]


def run_demo(
    llm: LLM, prompts: Sequence[DemoPrompt], params: SamplingParams, on_pair: Callable[[Pair], None]
) -> list[Pair]:
    """Decode each prompt both ways, one request at a time, every other one drafted first."""
    ways = {"plain": replace(params, budget=0), "drafted": params}
    encoded = [encode_chat(llm.tokenizer, [{"role": "user", "content": p.text}]) for p in prompts]
    for way in ways.values():
        llm.generate(encoded[:1], replace(way, max_tokens=min(params.max_tokens, _WARM_UP_TOKENS)))
    pairs = []
    for place, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        order = list(ways) if place % 2 == 0 else list(reversed(ways))
        answers = {way: llm.generate([ids], ways[way])[0] for way in order}
        comparison = compare(llm, ids, answers["plain"].token_ids, answers["drafted"].token_ids)
        pairs.append(Pair(prompt, answers["plain"], answers["drafted"], comparison))
        on_pair(pairs[-1])
    return pairs


def compare(llm: LLM, prompt: list[int], plain: list[int], drafted: list[int]) -> Comparison:
    """Compare two greedy answers to a prompt, all as token ids.

    They may differ only by a tie: at the first differing place the two tokens must be no further apart than
    the numerical noise, measured on this very text.
    """
    if plain == drafted:
        return Comparison("yes")
    at = next((at for at, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if at is None:  # one goes on where the other has ended
        return Comparison("NO", min(len(plain), len(drafted)))
    params = SamplingParams(temperature=0, max_tokens=at + 1, budget=0, logprobs=_TOP)
    again = llm.generate([prompt], params)[0]
    if again.token_ids != plain[: at + 1]:
        return Comparison("NO", at)
    alone = [dict(entry.top) for entry in again.logprobs or ()]
    noise = _noise(llm, prompt, plain, alone)
    if drafted[at] not in alone[at]:
        return Comparison("NO", at, None, noise)
    gap = alone[at][plain[at]] - alone[at][drafted[at]]
    return Comparison("tie" if gap <= noise else "NO", at, gap, noise)


def _noise(llm: LLM, prompt: list[int], answer: list[int], alone: Sequence[dict[int, float]]) -> float:
    """Return by how much, at most, the gap between two of the likeliest tokens depends on the pass's shape.

    alone[place]: log-probabilities at a place of the answer, from passes over one token; here they are
    compared with those of one pass over all the text before the place.
    """
    places = range(len(alone) - 1, 0, -max(1, len(alone) // _NOISE_AT))
    params = SamplingParams(temperature=0, max_tokens=1, budget=0, logprobs=_TOP)
    together = llm.generate([prompt + answer[:place] for place in places], params)
    noise = _NOISE_FLOOR
    for place, completion in zip(places, together, strict=True):
        for entry in completion.logprobs or ():
            moved = [
                value - alone[place][token]
                for token, value in entry.top[:_NOISE_TOP]
                if token in alone[place]
            ]
            noise = max(noise, max(moved) - min(moved))
    return noise


def mean_speedup(pairs: Sequence[Pair]) -> MeanSpeedup:
    """Return the geometric mean of the speed-ups and its bootstrap interval, which repeats exactly."""
    logs = np.log([pair.speedup for pair in pairs])
    drawn = np.random.default_rng(0).choice(logs, size=(_RESAMPLES, len(logs)))
    low, high = np.quantile(drawn.mean(axis=1), [0.025, 0.975])
    return MeanSpeedup(*(math.exp(value) for value in (logs.mean(), low, high)))


def demo_table(pairs: Sequence[Pair]) -> Table:
    """Return the table that the demo prints."""
    table = Table("category", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in (
        "tokens",
        "tokens/s\nplain",
        "tokens/s\ndrafted",
        "speed-up",
        "accept_\nrate",
        "mean_\nemitted",
    ):
        table.add_column(column, justify="right")
    table.add_column("identical")
    for pair in pairs:
        stats = pair.drafted.stats
        table.add_row(
            pair.prompt.category,
            str(stats.emitted),
            f"{pair.plain.stats.tokens_per_s:.1f}",
            f"{stats.tokens_per_s:.1f}",
            f"{pair.speedup:.2f}",
            f"{stats.accept_rate:.2f}",
            f"{stats.mean_emitted:.2f}",
            pair.comparison.identical,
        )
    return table


def demo_record(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return all that was measured as plain JSON values."""
    return {
        "pairs": [
            {
                **asdict(pair.prompt),
                "plain": _answer_record(pair.plain),
                "drafted": _answer_record(pair.drafted),
                "speedup": pair.speedup,
                "comparison": asdict(pair.comparison),
            }
            for pair in pairs
        ],
        "mean_speedup": asdict(mean_speedup(pairs)),
    }


def _answer_record(completion: Completion) -> dict[str, Any]:
    return {**asdict(completion), "stats": stats_record(completion.stats)}
