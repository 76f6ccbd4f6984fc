"""Do two samples of answers follow one law? A chi-square over the tree of continuations, in looks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from scipy import stats

Answer = Sequence[Hashable]  # tokens
_LEAST = 8.0  # expected count of a cell; rarer continuations are pooled


@dataclass(frozen=True, slots=True)
class LawTest:
    """A two-sample test. pvalue: of both parts together; `toward`: the signed z of the second part, how much
    more often the second sample says the likeliest token.
    """

    statistic: float
    dof: int
    toward: float
    pvalue: float


def tree_test(pairs: Sequence[tuple[Sequence[Answer], Sequence[Answer]]]) -> LawTest:
    """Compare two samples of answers, given for each prompt.

    Given what was said so far, the next tokens of both samples are draws from one law if the engines agree,
    so every common beginning gives a table, sample by next token, that is independent of the others. Two
    statistics add up over them: the chi-square of each table, which sees any difference, and the surplus of
    the table's likeliest token (Cochran-Mantel-Haenszel), which sees the small and steady pull toward what
    drafts guess. The p-value is twice the smaller one's.
    """
    statistic, dof, surplus, variance = 0.0, 0, 0.0, 0.0
    for mine, theirs in pairs:
        for counts in _beginnings(mine, theirs):
            more, spread = _surplus(counts)
            surplus, variance = surplus + more, variance + spread
            table = _pooled(counts)
            statistic += _chi_square(table)
            dof += len(table[0]) - 1
    toward = surplus / math.sqrt(variance) if variance else 0.0
    any_p = float(stats.chi2.sf(statistic, dof)) if dof else 1.0
    toward_p = 2 * float(stats.norm.sf(abs(toward)))
    return LawTest(statistic, dof, toward, min(1.0, 2 * min(any_p, toward_p)))


_Counts = tuple[Counter[Hashable], Counter[Hashable]]


def _beginnings(mine: Sequence[Answer], theirs: Sequence[Answer]) -> Iterable[_Counts]:
    """Return what each sample said next after every beginning that both share."""
    nodes: dict[tuple[Hashable, ...], _Counts] = defaultdict(lambda: (Counter(), Counter()))
    for side, answers in enumerate((mine, theirs)):
        for answer in answers:
            for place, token in enumerate(answer):
                nodes[tuple(answer[:place])][side][token] += 1
    return [counts for counts in nodes.values() if all(counts)]


def _surplus(counts: _Counts) -> tuple[float, float]:
    """Return how many more likeliest tokens the second sample has than expected, and the variance."""
    sides = [sum(side.values()) for side in counts]
    total = sum(sides)
    both = counts[0] + counts[1]
    best = max(both, key=lambda token: (both[token], repr(token)))  # of equals no sample's own comes first
    hits = both[best]
    share = sides[1] / total
    return counts[1][best] - hits * share, share * (1 - share) * hits * (total - hits) / max(total - 1, 1)


def _pooled(counts: _Counts) -> tuple[list[int], list[int]]:
    """Return a table whose expected counts are large enough for a chi-square: rare tokens are one column."""
    sides = [sum(side.values()) for side in counts]
    share = min(sides) / sum(sides)
    both = counts[0] + counts[1]
    common = [token for token, seen in both.items() if share * seen >= _LEAST]
    rows = [[side[token] for token in common] for side in counts]
    rest = [total - sum(row) for total, row in zip(sides, rows, strict=True)]
    if share * sum(rest) >= _LEAST:
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    return (rows[0], rows[1]) if rows[0] else ([1], [1])


def _chi_square(table: tuple[list[int], list[int]]) -> float:
    total = sum(map(sum, table))
    found = 0.0
    for column in zip(*table, strict=True):
        for seen, row in zip(column, table, strict=True):
            expected = sum(row) * sum(column) / total
            found += (seen - expected) ** 2 / expected
    return found


def looks(count: int, number: int = 4) -> list[int]:
    """Return the sample sizes at which the test is looked at, doubling up to `count`."""
    return sorted({max(1, count // 2**back) for back in range(number)})


def spent(sizes: Sequence[int], alpha: float) -> list[float]:
    """Return what each look may spend of the error rate, in proportion to what it adds to the sample.

    The shares sum to alpha, so the whole test raises a false alarm at most that often, however the looks
    depend on each other.
    """
    before = [0, *sizes[:-1]]
    return [alpha * (size - last) / sizes[-1] for size, last in zip(sizes, before, strict=True)]


def detectable(count: int, alpha: float, power: float) -> float:
    """Return the shift in one first token's probability (of a half) that `count` answers a side would show
    with the given power.
    """
    z = float(stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power))
    return z * math.sqrt(0.5 / count)
