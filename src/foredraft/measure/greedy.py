"""Greedy answers token by token: equal, a tie, a difference, or no answer at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.measure.subjects import Answered, Subject

Judged = Literal["same", "tie", "difference", "failed"]
_TOP = 5
NOISE_FLOOR = 1e-5  # nats: float32 rounding of a log-probability itself


@dataclass(frozen=True, slots=True)
class GreedyFinding:
    """One request. at: the first differing token (None: none). gap: how much likelier the baseline finds its
    own token there, in nats; noise: how far such gaps move when the baseline itself repeats or is batched.
    """

    where: str
    judged: Judged
    at: int | None = None
    gap: float | None = None
    noise: float | None = None
    baseline: str = ""
    variant: str = ""


def with_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body as asked for a greedy comparison."""
    return {**body, "temperature": 0, "logprobs": _TOP}


def first_difference(a: Answered, b: Answered) -> int | None:
    """Return the first token (or character, where tokens are not told) at which two answers differ."""
    mine, theirs = (a.tokens, b.tokens) if a.tokens and b.tokens else (tuple(a.text), tuple(b.text))
    for place, (x, y) in enumerate(zip(mine, theirs, strict=False)):
        if x != y:
            return place
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def gap_noise(runs: Sequence[Sequence[Answered]]) -> float:
    """Return the largest move of a top-2 gap between runs of the same requests, up to where they part."""
    noise = NOISE_FLOOR
    for answers in zip(*runs, strict=True):
        first = answers[0]
        for other in answers[1:]:
            end = first_difference(first, other)
            alike = None if end is None else end + 1
            for mine, theirs in zip(first.tops[:alike], other.tops[:alike], strict=False):
                noise = max(noise, _moved(mine, theirs))
    return noise


def _moved(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    shared = sorted(set(a) & set(b), key=lambda token: -a[token])[:2]
    moves = [a[token] - b[token] for token in shared]
    return max(moves) - min(moves) if len(moves) == 2 else 0.0


def compare(where: str, base: Answered, other: Answered, noise: float) -> GreedyFinding:
    """Judge one request by the baseline's own log-probabilities."""
    at = first_difference(base, other)
    if at is None:
        return GreedyFinding(where, "same", noise=noise)
    gap: float | None = None
    if base.tokens and other.tokens and at < min(len(base.tokens), len(other.tokens), len(base.tops)):
        top = base.tops[at]
        mine, theirs = top.get(base.tokens[at]), top.get(other.tokens[at])
        gap = None if mine is None or theirs is None else mine - theirs
    judged: Judged = "tie" if gap is not None and abs(gap) <= noise else "difference"
    return GreedyFinding(where, judged, at, gap, noise, base.text[:200], other.text[:200])


def check_greedy(
    baseline: Subject, variant: Subject, bodies: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[GreedyFinding]:
    """Compare both on every request, variant alone and together, after measuring the baseline's noise."""
    asked = [with_logprobs(body) for _, body in bodies]
    alone = baseline.ask(asked, together=False)
    noise = gap_noise([alone, baseline.ask(asked, together=False), baseline.ask(asked, together=True)])
    findings = []
    for how, together in (("", False), (" (batched)", True)):
        for (where, _), base, other in zip(bodies, alone, variant.ask(asked, together=together), strict=True):
            if base.refused or other.refused:
                findings.append(
                    GreedyFinding(where + how, "failed", variant=other.refused or base.refused or "")
                )
                continue
            findings.append(compare(where + how, base, other, noise))
    return findings
