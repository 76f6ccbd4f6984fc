"""What speaks for and against drafting: every reason with its numbers and one thing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LOW, GOOD = 0.4, 0.7  # accept rates below and above which a draft is bad and good
WORTH = 1.03  # a gain below this is not worth switching anything on
_SHORT = 24  # tokens: answers in which there is little to gain
_HOT = 1.2
_UNSURE = -1.5  # nats: mean log-probability of answers that nothing predicts


@dataclass(frozen=True, slots=True)
class AtLoad:
    """A draft at a load, requests at once or "0.5/s": the highest accept rate, the speed-up, and the best
    budget, 0 if none pays, None if the best is not known. deepest: no larger budget was tried.
    """

    load: str
    accept_rate: float
    speedup: float
    budget: int | None
    deepest: bool = False


def of_draft(name: str, found: Sequence[AtLoad]) -> list[str]:
    """Return what a draft's acceptance and the load say of it."""
    reasons = []
    rate = max(one.accept_rate for one in found)
    if rate < LOW:
        reasons.append(
            f"{name}: at most {rate:.0%} accepted, under {LOW:.0%}, a bad draft for this: take another, or "
            "train one on such requests"
        )
    elif rate > GOOD:
        reasons.append(
            f"{name}: up to {rate:.0%} accepted, over {GOOD:.0%}, a good draft for this: {_use(found[0])}"
        )
    points = sorted((int(one.load), one.speedup) for one in found if one.load.isdecimal())
    even = break_even(points)
    if even is not None and even == points[0][0]:
        reasons.append(f"{name}: does not pay at load {even:.0f} ({points[0][1]:.2f}x): leave it off")
    elif even is not None:
        reasons.append(f"{name}: pays below about {even:.0f} requests at once: leave it off above")
    return reasons


def _use(one: AtLoad) -> str:
    """Return what to do with a good draft."""
    if one.budget is None:
        return "try larger budgets while few requests run"
    if one.budget == 0:
        return f"but no budget pays at load {one.load}, leave it off there"
    return f"draft {one.budget} a step at load {one.load}" + (", and try more" if one.deepest else "")


def of_memory(name: str, weights: int, kv_bytes: int, longest: int, loads: Sequence[int]) -> str:
    """Return what a draft takes in memory. kv_bytes: for each token of a request, of which none has more than
    `longest`.
    """
    cache = "no KV cache"
    if kv_bytes:
        at = " and ".join(f"{_mb(kv_bytes * longest * load)} at load {load}" for load in loads)
        cache = f"{kv_bytes:,} bytes of KV cache a token, with {longest} tokens a request up to {at}"
    return f"{name}: takes {_mb(weights)} for weights and {cache}: keep that free, or use ngram, with neither"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def of_requests(lengths: Sequence[int], temperature: float, logprob: float | None = None) -> list[str]:
    """Return what requests say against drafting. lengths: tokens of each answer; temperature: the highest;
    logprob: mean of the answers' tokens, in nats, if known.
    """
    reasons = []
    middle = median(lengths)
    if middle < _SHORT:
        reasons.append(
            f"half of the answers have less than {_SHORT} tokens (median {middle:g}), and drafting speeds up "
            "no prompts: begin with these (prefix cache)"
        )
    if temperature > _HOT:
        reasons.append(
            f"temperature {temperature:g}, over {_HOT:g}, is hot, and more guesses are rejected than "
            "greedily: lower it, or measure small budgets at it"
        )
    if logprob is not None and logprob < _UNSURE:
        reasons.append(
            f"the text is hard to predict, its tokens have a mean log-probability of {logprob:.2f}, under "
            f"{_UNSURE:g}: keep budgets small"
        )
    return reasons


def break_even(points: Sequence[tuple[float, float]]) -> float | None:
    """Return where speed-ups by load fall to 1, in a line between loads; None if they do not."""
    last: tuple[float, float] | None = None
    for load, speedup in sorted(points):
        if speedup <= 1:
            if last is None:
                return load
            return last[0] + (load - last[0]) * (last[1] - 1) / (last[1] - speedup)
        last = (load, speedup)
    return None
