"""How often each node of a draft is accepted: for a request, and over all requests so far.

Nodes count by rank, their place in the draft: proposers put the most promising first. So what was seen of a
draft also tells of every shorter one, chain or tree alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

_FADE, _FADE_ALL = 0.9, 0.98  # of what a step taught, per later step that drafted
_WORTH, _WORTH_ALL = 2.0, 8.0  # drafts that what was assumed before is worth: to a request, and over all
_WORTH_RANK = 4.0  # drafts that its neighbours are worth to one rank
_MOST = 0.99  # no guess is certain


@dataclass(slots=True)
class Counts:
    """Decayed counts by rank: drafts that had such a node, those of which it was accepted, and those of which
    the node before it was.
    """

    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)

    def learn(self, nodes: int, path: Seq[int], fade: float) -> None:
        """Take in one draft of so many nodes, of which those in `path` were accepted."""
        missing = [0.0] * (nodes - len(self.judged))
        for counts in (self.judged, self.accepted, self.before):
            counts += missing
        right = set(path)
        for rank in range(len(self.judged)):
            has = rank < nodes
            self.judged[rank] = fade * self.judged[rank] + has
            self.accepted[rank] = fade * self.accepted[rank] + (rank in right)
            self.before[rank] = fade * self.before[rank] + (has and rank - 1 in right)

    def gains(self, assumed: Seq[float], worth: float) -> list[float]:
        """Return the chance of each rank to be accepted, given the one assumed before anything was seen.

        The first is corrected by what was seen of it. Each later one follows the one before it as assumed,
        times a correction that all share, and then by what was seen of it alone.
        """
        steps = [after / before for before, after in pairwise(assumed)]
        seen = min(len(self.judged) - 1, len(steps))
        followed = sum(self.accepted[1 : seen + 1])
        expected = sum(self.before[rank + 1] * steps[rank] for rank in range(seen))
        correction = (followed + _WORTH) / (expected + _WORTH)
        gains: list[float] = []
        for rank, first in enumerate(assumed):
            if rank == 0:
                gain = self._mixed(0, first, worth)
            else:
                step = min(_MOST, steps[rank - 1] * correction)
                gain = min(gains[-1], self._mixed(rank, gains[-1] * step, _WORTH_RANK))
            gains.append(gain)
        return gains

    def _mixed(self, rank: int, assumed: float, worth: float) -> float:
        if rank >= len(self.judged):
            return assumed
        return min(_MOST, (self.accepted[rank] + worth * assumed) / (self.judged[rank] + worth))


@dataclass(slots=True)
class Request:
    """What is known of one request: its counts, the steps since it last drafted, and whether it is being
    probed.
    """

    counts: Counts = field(default_factory=Counts)
    idle: int = 0
    probing: bool = False


class Acceptance:
    """Chances that guesses are accepted.

    prior: the acceptance rate assumed before anything was judged. tree: whether drafts are trees, of which
    later nodes lie beside earlier ones and lose less. A request starts from what all before it made of that.
    """

    def __init__(self, prior: float, longest: int, *, tree: bool = False) -> None:
        self.all = Counts()
        self.prior = [prior / (rank + 1) if tree else prior ** (rank + 1) for rank in range(longest)]
        self.spread = 1.0  # a draft of n nodes is about n ** spread levels deep: 1 for a chain

    def learn(self, request: Request, nodes: int, levels: int, path: Seq[int]) -> None:
        """Take in a step of a request."""
        request.counts.learn(nodes, path, _FADE)
        self.all.learn(nodes, path, _FADE_ALL)
        if nodes > 1:
            self.spread += 0.1 * (math.log(levels) / math.log(nodes) - self.spread)

    def levels_of(self, nodes: int) -> float:
        """How deep a draft of so many nodes is likely to be."""
        return math.pow(nodes, self.spread)

    def gains(self, request: Request) -> list[float]:
        """Expected accepted tokens that the first, second, … node of a draft adds; they never grow."""
        return request.counts.gains(self.all.gains(self.prior, _WORTH_ALL), _WORTH)
