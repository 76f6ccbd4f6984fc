"""Do an engine's answers follow the laws that it states itself? A bet that may be looked at any time.

With every token the engine tells the log-probabilities of the likeliest ones, from the very pass that decided
it, and what was guessed there is known. So no other sample is needed: a fortune is staked, token after token,
on ways in which the answers could stray from these laws (guesses accepted too often or too seldom, laws too
sharp or too flat). While the laws are kept no stake is expected to grow, so it ever reaches 1 / alpha with
chance alpha at most, however often one looks (Ville 1939; Waudby-Smith and Ramdas, arXiv 2010.09686).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
_SHARES = (0.01, 0.03, 0.1, 0.3)  # of guesses accepted, or rejected, wrongly
_POWERS = (0.7, 0.9, 1.1, 1.4)  # of a law, renormalised: flatter and sharper
_LEAST = 1e-6  # a smaller probability counts as this


@dataclass(frozen=True, slots=True)
class Guess:
    """What was guessed at one place: tokens, siblings in a tree; chance: the draft's own probability of the
    one token, where it was drawn and not chosen.
    """

    tokens: tuple[Hashable, ...]
    chance: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One token. law: probabilities, falling, the last those of all tokens that are not told; cell: which of
    these it was. guessed: between what bounds lies the chance that a guess is right (None: there was none);
    hit: whether one was.
    """

    law: tuple[float, ...]
    cell: int
    guessed: tuple[float, float] | None = None
    hit: bool = False


def stated_law(top: Mapping[Hashable, float], temperature: float, top_k: int) -> dict[Hashable, float] | None:
    """Return the law that raw log-probabilities of the likeliest tokens give, as far as they tell; None if
    not at all: at other temperatures than 1 they must go beyond the top_k, and no tie may lie at its edge.
    """
    logs = sorted(top.items(), key=lambda entry: -entry[1])
    if temperature == 1 and not top_k:
        return {token: math.exp(log) for token, log in logs}
    whole = sum(math.exp(log) for _, log in logs) > 1 - _LEAST
    if not whole and (not top_k or len(logs) <= top_k):
        return None
    if 0 < top_k < len(logs):
        if logs[top_k - 1][1] == logs[top_k][1]:
            return None
        logs = logs[:top_k]
    rates = [math.exp((log - logs[0][1]) / temperature) for _, log in logs]
    return {token: rate / sum(rates) for (token, _), rate in zip(logs, rates, strict=True)}


def place_of(law: Mapping[Hashable, float], token: Hashable, guess: Guess | None) -> Place:
    """Return what is staked on, from a law as stated_law gives it."""
    rest = max(0.0, 1.0 - sum(law.values()))
    cell = list(law).index(token) if token in law else len(law)
    cells = (*law.values(), rest)
    if guess is None:
        return Place(cells, cell)
    known = sum(law.get(guessed, 0.0) for guessed in guess.tokens)
    untold = sum(guessed not in law for guessed in guess.tokens)
    low, high = known, min(1.0, known + min(rest, untold * min(law.values(), default=1.0)))
    if guess.chance is not None:  # drawn: it is kept with chance min(1, target / draft)
        low, high = min(1.0, low / guess.chance), min(1.0, high / guess.chance)
    return Place(cells, cell, (low, high), token in guess.tokens)


class Stakes:
    """The fortune so far: half of it on guesses, half on the shape of the laws."""

    def __init__(self) -> None:
        self._guesses = np.zeros(2 * len(_SHARES))  # log of each stake's growth
        self._shapes = np.zeros(2 * len(_SHARES) + len(_POWERS))
        self._chances: list[float] = []
        self.tokens, self.best = 0, 0.0

    @property
    def guesses(self) -> int:
        """How many places with a guess were seen."""
        return len(self._chances)

    @property
    def pvalue(self) -> float:
        """One over the largest fortune so far: at most this is the chance of ever growing so large."""
        return math.exp(-max(self.best, 0.0))

    def add(self, places: Iterable[Place]) -> None:
        """Take in tokens in any order in which each one's law was known before it."""
        some = list(places)
        if not some:
            return
        guessed = [(place.guessed, place.hit) for place in some if place.guessed is not None]
        if guessed:
            bounds = np.array([bounds for bounds, _ in guessed])
            self._guesses += _strayed(bounds, np.array([hit for _, hit in guessed])).sum(axis=1)
            self._chances += bounds[:, 1].tolist()
        self._shapes += _shapes(some).sum(axis=1)
        self.tokens += len(some)
        halves = [np.logaddexp.reduce(s) - math.log(2 * len(s)) for s in (self._guesses, self._shapes)]
        self.best = max(self.best, float(np.logaddexp(*halves)))

    def detectable(self, alpha: float, power: float) -> float | None:
        """Return the share of wrongly accepted guesses that these places would have shown with the given
        power; None if none would.
        """
        low, high = 0.0, 1.0 - _LEAST
        if not self._chances or not self._shows(high, alpha, power):
            return None
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self._shows(middle, alpha, power) else (middle, high)
        return high

    def _shows(self, share: float, alpha: float, power: float) -> bool:
        chances = np.clip(self._chances, _LEAST, 1 - _LEAST)
        hits = chances + share * (1 - chances)
        if_hit, if_not = np.log(hits / chances), math.log1p(-share)
        mean = float(np.sum(hits * if_hit + (1 - hits) * if_not))
        spread = math.sqrt(float(np.sum(hits * (1 - hits) * (if_hit - if_not) ** 2)))
        needed = math.log(2 * len(self._guesses) / alpha)
        return mean - float(stats.norm.isf(1 - power)) * spread >= needed


def _strayed(bounds: Floats, hits: NDArray[np.bool_]) -> Floats:
    """Return the log growth of stakes on more and on fewer hits than stated, [stakes, places].

    bounds: [places, 2] around the chance of a hit. With the upper one a stake on more hits grows no faster
    than it may, with the lower one a stake on fewer.
    """
    low = np.minimum(bounds[:, 0], 1 - _LEAST)
    high = np.clip(bounds[:, 1], _LEAST, 1.0)
    more = [np.where(hits, np.log((high + s * (1 - high)) / high), math.log1p(-s)) for s in _SHARES]
    fewer = [np.where(hits, math.log1p(-s), np.log1p(s * low / (1 - low))) for s in _SHARES]
    return np.array(more + fewer)


def _shapes(places: Sequence[Place]) -> Floats:
    """Return the log growth of stakes on other laws than the stated ones, [stakes, places]."""
    laws = np.zeros((len(places), max(len(place.law) for place in places)))
    for row, place in enumerate(places):
        laws[row, : len(place.law)] = place.law
    rows = np.arange(len(places)), np.array([place.cell for place in places])
    first = laws[:, 0]
    toward = _strayed(np.stack([first, first], axis=1), rows[1] == 0)
    return np.concatenate([toward, np.array([_powered(laws, rows, power) for power in _POWERS])])


def _powered(laws: Floats, rows: Any, power: float) -> Floats:
    said = laws[rows]
    other = np.power(laws, power, where=laws > 0, out=np.zeros_like(laws))
    growth = np.maximum(said, _LEAST) ** (power - 1) / other.sum(axis=1)
    found: Floats = np.log(growth)
    return found
