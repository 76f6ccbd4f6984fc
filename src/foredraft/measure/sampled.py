"""Do sampled answers follow the target's law? Two tests that stop as soon as they know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from foredraft.measure.laws import LawTest, detectable, looks, spent, tree_test
from foredraft.measure.stated import Place, Stakes, place_of, stated_law
from foredraft.measure.subjects import Answered, Subject

_POWER = 0.9
_SHORT = 6  # tokens of a sampled answer
_BATCH = 256  # answers asked for at once
# Flat and short: guesses are about as often right as each of these tokens, and the law is all told.
_HOT = {"temperature": 8.0, "top_k": 19, "max_tokens": 16}
_PILOT = 4  # answers by which prompts are chosen
_SEEDS = 2**20  # of a stream, so that none meets another
_PILOT_STREAM = 2**10
_MOST = 50.0  # what one guess counts for then
_LIKELY = 3.0  # as many likely next tokens show most


@dataclass(frozen=True, slots=True)
class SampledFinding:
    """What the distribution tests saw. differs: at the stated error rate.

    pvalue: of two samples, as many `answers` of each prompt on both sides; detectable: the shift of one
    token's probability that this would have shown with the stated power. stated_pvalue: of `guesses` judged
    guesses and `tokens` tokens against the laws that the variant states itself (engines of this process);
    detectable_share: the share of wrongly accepted guesses that this would have shown.
    """

    differs: bool
    answers: int
    prompts: int
    looks: int
    statistic: float
    dof: int
    toward: float
    pvalue: float
    alpha: float
    power: float
    detectable: float
    tokens: int = 0
    guesses: int = 0
    stated_pvalue: float = 1.0
    detectable_share: float | None = None
    refused: str = ""

    def lines(self) -> list[str]:
        """Return it as text."""
        if self.refused:
            return [f"sampled: refused, {self.refused}"]
        shift = f"a shift of {self.detectable:.3f}" if self.detectable < 1 else "no shift"
        what = "the distributions DIFFER" if self.differs else "no difference"
        lines = [
            f"sampled: {what}; a false alarm of the two tests together has chance {self.alpha:g}",
            f"  two samples: p = {self.pvalue:.2g} after {self.answers} answers a side and prompt "
            f"({self.prompts} prompts, look {self.looks}); {shift} in one token's probability "
            f"would be found with chance {self.power:g}",
        ]
        if self.tokens:
            share = self.detectable_share
            found = f"a share of {share:.3f} of" if share is not None else "no share of"
            lines.append(
                f"  stated laws: p = {self.stated_pvalue:.2g} over {self.tokens} tokens, {self.guesses} of "
                f"them guessed at; {found} wrongly accepted guesses would be found with chance {self.power:g}"
            )
        return lines


def choose(
    baseline: Subject, variant: Subject, bodies: Sequence[Mapping[str, Any]], count: int
) -> list[Mapping[str, Any]]:
    """Return the prompts that show most: whose guesses are many and unlikely where that is known, else whose
    answers begin with a few likely tokens. Judged by a few answers that are not used again.
    """
    subject = variant if variant.states_laws else baseline
    worth = {place: _worth(subject, body) for place, body in enumerate(bodies)}
    best = sorted(worth, key=lambda place: -worth[place])[:count]
    return [bodies[place] for place in sorted(best)]


def _worth(subject: Subject, body: Mapping[str, Any]) -> float:
    said = {**_said(body), "logprobs": subject.tops}
    asked = [{**said, "seed": _PILOT_STREAM * _SEEDS + seed} for seed in range(_PILOT)]
    if subject.states_laws:
        hot = [one | _HOT for one in asked]
        places = [p for answer in subject.ask(hot, together=True) for p in _places(answer, hot[0])]
        chances = [max(place.guessed[1], 1 / _MOST) for place in places if place.guessed is not None]
        return sum(1 / chance - 1 for chance in chances)
    tops = [top for answer in subject.ask(asked[:1], together=True) for top in answer.tops]
    bits = [-log * math.exp(log) for top in tops for log in top.values()]
    return -abs(sum(bits) / len(tops) - math.log(_LIKELY)) if tops else 0.0


def check_sampled(
    baseline: Subject,
    variant: Subject,
    bodies: Sequence[Mapping[str, Any]],
    answers: int,
    alpha: float,
    on_part: Callable[[str], None],
) -> SampledFinding:
    """Draw short answers from both; compare their laws, and the variant's with what it states, each at half
    the error rate, at looks that stop as soon as something differs.

    Where laws are stated, half as many answers are compared, and in their place others are drawn hot.
    """
    asked = [{**_said(body), "logprobs": variant.tops if variant.states_laws else 0} for body in bodies]
    pairs: list[tuple[list[Any], list[Any]]] = [([], []) for _ in asked]
    hot: list[list[Any]] = [[] for _ in asked] if variant.states_laws else []
    sizes = looks(max(1, answers // 2) if hot else answers)
    stakes, found, refused, done, differs = Stakes(), LawTest(0.0, 0, 0.0, 1.0), "", 0, False
    for size, share in zip(sizes, spent(sizes, alpha / 2), strict=True):
        on_part(f"sampled answers, {size} of {sizes[-1]}")
        streams = count()  # of seeds: no two of all answers may share their noise
        for body, (mine, theirs) in zip(asked, pairs, strict=True):
            refused = refused or _draw(baseline, body, mine, size, next(streams), None)
            refused = refused or _draw(variant, body, theirs, size, next(streams), stakes if hot else None)
        for body, into in zip(asked, hot, strict=False):
            refused = refused or _draw(variant, body | _HOT, into, size, next(streams), stakes)
        found, done = tree_test(pairs), done + 1
        differs = found.pvalue < share or stakes.pvalue <= alpha / 2
        if refused or differs:
            break
    drawn = max(len(pairs[0][1]), 1)
    return SampledFinding(
        differs=differs,
        answers=drawn,
        prompts=len(bodies),
        looks=done,
        statistic=found.statistic,
        dof=found.dof,
        toward=found.toward,
        pvalue=found.pvalue,
        alpha=alpha,
        power=_POWER,
        detectable=detectable(drawn, alpha / 2, _POWER),
        tokens=stakes.tokens,
        guesses=stakes.guesses,
        stated_pvalue=stakes.pvalue,
        detectable_share=stakes.detectable(alpha / 2, _POWER),
        refused=refused,
    )


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a sampled answer is asked by: the words, a temperature, and nothing else of the request."""
    said = {name: body[name] for name in ("messages", "prompt") if name in body}
    temperature = float(body.get("temperature") or 0.0) or 1.0
    return {**said, "temperature": temperature, "max_tokens": _SHORT}


def _draw(
    subject: Subject, body: Mapping[str, Any], into: list[Any], size: int, stream: int, stakes: Stakes | None
) -> str:
    """Add answers up to `size`, with seeds of a stream, and their tokens to the stakes; return why not, if
    they are refused.
    """
    while len(into) < size:
        seeds = range(len(into), min(size, len(into) + _BATCH))
        found = subject.ask([{**body, "seed": stream * _SEEDS + seed} for seed in seeds], together=True)
        refused = next((answer.refused for answer in found if answer.refused), "")
        if refused:
            return refused
        into += map(_units, found)
        if stakes is not None:
            stakes.add(place for answer in found for place in _places(answer, body))
    return ""


def _places(answer: Answered, body: Mapping[str, Any]) -> Iterator[Place]:
    """Return what can be staked on the tokens of an answer."""
    for top, token, guess in zip(answer.tops, answer.tokens or (), answer.guesses, strict=False):
        law = stated_law(top, float(body["temperature"]), int(body.get("top_k", 0)))
        if law is not None:
            yield place_of(law, token, guess)


def _units(answer: Answered) -> tuple[Any, ...]:
    """An answer as tokens, or words where they are not told; its end counts as one."""
    units = answer.tokens if answer.tokens is not None else tuple(answer.text.split(" "))
    return (*units, None) if answer.finish == "stop" else tuple(units)
