"""What steps promised and what came of it. Drafts are made because they look best, and tend to give less; and
asking for them takes time even where none is made.
"""

from __future__ import annotations

from dataclasses import dataclass

_FADE = 0.98  # of what a step taught, per later step of its kind
_FORGIVE, _KINDLY = 0.998, 0.1  # of drafted steps, per plain one, which adds so much of a kept promise
_WORTH = 10.0  # steps that what is assumed at first is worth; it fades too
_SURE = 8  # drafts whose tokens together say something
_LEAST = 0.5  # trust
_HOPED = 1.1  # of steps that ask over those that rest, before any was seen
_CLEAR = 1.25  # gain from which on no step rests to compare
_SOON, _SEEN = 8, 8.0  # steps within which a place is taken again; places over which that is judged
_FIRST = 4  # plain steps of a lone request before its drafted ones are blamed for their seconds
_COMPARE = 16  # where asking pays, one step of so many rests


class Sums:
    """The ratio of two decayed sums."""

    def __init__(self, ratio: float = 1.0, *, weight: float = 1.0) -> None:
        """weight: of a step, which fades and outdoes what is assumed at first so much more slowly."""
        self._above, self._below = _WORTH / weight * ratio, _WORTH / weight
        self._fade = 1 - (1 - _FADE) * weight

    def add(self, above: float, below: float, fade: float | None = None) -> None:
        """Add to both what one step gave."""
        fade = self._fade if fade is None else fade
        self._above, self._below = fade * self._above + above, fade * self._below + below

    @property
    def ratio(self) -> float:
        """The first over the second."""
        return self._above / self._below


@dataclass(frozen=True, slots=True)
class Promise:
    """What a step is expected to give and take, in tokens and seconds of a plain one, which takes plain_s;
    and whether drafts were asked for at all.
    """

    tokens: float
    seconds: float
    plain_s: float
    asked: bool = True


class Ledger:
    """What came of the steps of about one load: which share of what they promise drafted steps give, set
    against plain ones, whose seconds are expected by the same table; and whether asking pays.
    """

    def __init__(self, count: int = _SURE) -> None:
        """count: sequences of a step."""
        # Of each: what was expected and found, or given and taken, in tokens and seconds of a plain step.
        self._tokens = Sums(weight=min(1.0, count / _SURE))  # what one draft gives is chance
        self._drafted_s, self._plain_s = Sums(), Sums()
        self._asked, self._rested = Sums(_HOPED), Sums()
        self._turn, self._unknown = 0, _FIRST if count == 1 else 0

    def observe(self, promise: Promise, tokens: float, seconds: float) -> None:
        """Learn from a step: it gave so many times the tokens of a plain one, in so many seconds."""
        seconds /= promise.plain_s
        (self._asked if promise.asked else self._rested).add(tokens, seconds)
        if promise.tokens > 1:
            self._tokens.add(promise.tokens, tokens)
            if self._unknown == 0:
                self._drafted_s.add(promise.seconds, seconds)
            return
        self._unknown = max(0, self._unknown - 1)
        self._plain_s.add(promise.seconds, seconds)
        if promise.asked:
            self._tokens.add(_KINDLY, _KINDLY, _FORGIVE)
            self._drafted_s.add(_KINDLY, _KINDLY, _FORGIVE)

    @property
    def trust(self) -> float:
        """The share of what drafted steps promise that they give, between a half and 1."""
        share = self._drafted_s.ratio / self._plain_s.ratio / self._tokens.ratio
        return min(1.0, max(_LEAST, share))

    @property
    def gain(self) -> float:
        """Tokens per second of steps that ask, over those of steps that rest."""
        return self._asked.ratio / self._rested.ratio

    def rests(self, needed: float, every: int, *, fresh: bool = False) -> bool:
        """True if the next step should not ask. Where asking gains less than what is `needed`, one of `every`
        so many steps asks; else some rest, to compare. With a `fresh` request all ask: what older ones gained
        says little of it.
        """
        self._turn += 1
        if fresh:
            return False
        if self.gain < needed:
            return self._turn % every != 0
        return self.gain < _CLEAR and self._turn % _COMPARE == 0


class Turnover:
    """Whether the places of requests that end are soon taken by others. Where they are, more tokens per
    second is what counts; where not, a request that ends early only leaves the others behind.
    """

    def __init__(self) -> None:
        self._free: list[int] = []  # steps since each free place was left
        self._taken = 0.0  # share of the last places

    def left(self) -> None:
        """A request has ended."""
        self._free.append(0)

    def joined(self, alone: bool) -> None:
        """Another one is there; alone: if no other is left, which is a new beginning."""
        if alone:
            self._free.clear()
        elif self._free:
            self._free.pop(0)
            self._taken += (1 - self._taken) / _SEEN

    def step(self) -> None:
        """A step is over."""
        self._free = [steps + 1 for steps in self._free]
        while self._free and self._free[0] > _SOON:
            self._free.pop(0)
            self._taken -= self._taken / _SEEN

    @property
    def steady(self) -> bool:
        """True if most places are taken again."""
        return self._taken > 0.5
