"""Which budgets give the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import inf

from foredraft.control.acceptance import Request
from foredraft.types import Source

Deepest = Mapping[Source, int]  # of each source that drafts, the most nodes of a sequence

_SURE = 0.75  # of what a sequence is expected to gain, against what it may lose
WORTHWHILE = 1.01  # of plain decoding: what a draft must promise


def best_budgets(
    gains: Seq[Seq[float]],
    sources: Seq[Source | None],
    draft_s: Callable[[Deepest], float],
    begin_s: Seq[float],
    pass_s: Callable[[int], float],
    *,
    rate: float | None = None,
    least: float = WORTHWHILE,
    slacks: Seq[float] | None = None,
) -> tuple[list[int], float]:
    """Return how many nodes each sequence drafts for the most expected tokens per second, and how many these
    are; with a `rate` of tokens per second, for the most tokens less what the step's time is worth at it.

    gains[seq][n]: what node n of a sequence adds to its tokens, never growing with n; without any node each
    sequence emits one. sources[seq]: what drafts them, None where nothing can. draft_s: seconds of drafts of
    at most deepest[source] nodes a sequence; begin_s[seq]: what a sequence's first node takes beside that.
    pass_s: of a step with so many nodes in all, without the draft. All budgets are 0 where the best promises
    less than `least` times plain decoding.

    slacks[seq]: plain steps that a sequence may lose in this one for the sake of others. Lost is what plain
    decoding would not do, drafts and rows of rejected nodes; the row of an accepted one would come later.
    """
    budgets = [0] * len(gains)
    if not gains:
        return budgets, 0.0
    order = sorted((-gain, node, seq) for seq, some in enumerate(gains) for node, gain in enumerate(some))
    emitted, drafting_s, begun_s = float(len(gains)), 0.0, 0.0
    deepest: dict[Source, int] = {}
    plain_s = pass_s(0)
    most, best = least * _worth(emitted, plain_s, plain_s, rate), 0
    left = -sum(loss for loss, _, _ in order)
    seconds = plain_s
    own = [inf] * len(gains) if slacks is None else list(slacks)  # what each may lose, and what it gains
    for taken, (loss, node, seq) in enumerate(order, start=1):
        if _worth(emitted + left, seconds, plain_s, rate) <= most:
            break  # even if all that is left took no time
        source = sources[seq]
        assert source is not None
        emitted, left = emitted - loss, left + loss
        if node >= deepest.get(source, 0):
            deepest[source] = node + 1
            drafting_s = draft_s(deepest)
        if node == 0:
            begun_s += begin_s[seq]
        seconds = pass_s(taken) + drafting_s + begun_s
        own[seq] -= _SURE * loss
        worth = _worth(emitted, seconds, plain_s, rate)
        if worth > most:
            rejected = 1 - (emitted - len(gains)) / taken
            made_s = drafting_s + begun_s
            lost = (made_s + rejected * (seconds - made_s - plain_s)) / plain_s
            if lost <= min(own):
                most, best = worth, taken
    for _, _, seq in order[:best]:
        budgets[seq] += 1
    return budgets, most


def _worth(emitted: float, seconds: float, plain_s: float, rate: float | None) -> float:
    return emitted / seconds if rate is None else emitted - rate * (seconds - plain_s)


def deepest_of(requests: Seq[Request], budgets: Seq[int]) -> dict[Source, int]:
    """Return the most nodes of a request, of each source that drafts."""
    found: dict[Source, int] = {}
    for request, budget in zip(requests, budgets, strict=True):
        if budget and request.source is not None:
            found[request.source] = max(budget, found.get(request.source, 0))
    return found
