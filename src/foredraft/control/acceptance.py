"""How often guesses are accepted: by depth, for a request and over all requests so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from foredraft.types import SpecStats

_FADE, _FADE_ALL = 0.9, 0.98  # of what a step taught, per later step that drafted
_WORTH, _WORTH_DEPTH = 2.0, 4.0  # guesses that the rate known before is worth: to a request, to one depth
_MOST = 0.99  # no guess is certain


@dataclass(slots=True)
class Counts:
    """Decayed counts by depth: guesses that were judged (those before them were right) and those accepted."""

    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def learn(self, levels: int, accepted: int, fade: float) -> None:
        """Take in one draft of `levels` levels, of which `accepted` were accepted."""
        missing = levels - len(self.judged)
        self.judged += [0.0] * missing
        self.accepted += [0.0] * missing
        for depth in range(len(self.judged)):
            self.judged[depth] = fade * self.judged[depth] + (depth < levels and depth <= accepted)
            self.accepted[depth] = fade * self.accepted[depth] + (depth < accepted)

    def rate(self, before: float, worth: float) -> float:
        """The rate over all depths, given the one that was assumed before."""
        return (sum(self.accepted) + worth * before) / (sum(self.judged) + worth)

    def rate_at(self, depth: int, before: float) -> float:
        """The rate at one depth, given what the others make it."""
        if depth >= len(self.judged):
            return before
        return (self.accepted[depth] + _WORTH_DEPTH * before) / (self.judged[depth] + _WORTH_DEPTH)


@dataclass(slots=True)
class Request:
    """What is known of one request: its counts, how much of its record is in them, the steps since it last
    drafted, and whether it is being probed.
    """

    counts: Counts = field(default_factory=Counts)
    drafted: int = 0
    levels: int = 0
    accepted: int = 0
    idle: int = 0
    probing: bool = False

    def newest(self, stats: SpecStats) -> tuple[int, int, int]:
        """Return nodes drafted, levels and accepted of the request's newest step."""
        step = stats.drafted - self.drafted, stats.levels - self.levels, stats.accepted - self.accepted
        self.drafted, self.levels, self.accepted = stats.drafted, stats.levels, stats.accepted
        return step


class Acceptance:
    """Chances that guesses are accepted. `prior` is the rate assumed before anything was judged.

    A request's rate starts from that of all requests before it; its rates by depth follow theirs in shape.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.all = Counts()
        self.spread = 1.0  # a draft of n nodes is about n ** spread levels deep: 1 for a chain

    def learn(self, request: Request, drafted: int, levels: int, accepted: int) -> None:
        """Take in a step of a request."""
        request.counts.learn(levels, accepted, _FADE)
        self.all.learn(levels, accepted, _FADE_ALL)
        if drafted > 1:
            self.spread += 0.1 * (math.log(levels) / math.log(drafted) - self.spread)

    def levels_of(self, nodes: int) -> float:
        """How deep a draft of so many nodes is likely to be."""
        return math.pow(nodes, self.spread)

    def gains(self, request: Request, longest: int) -> list[float]:
        """Expected accepted tokens that the first, second, … node of a draft adds; they never grow."""
        overall = self.all.rate(self.prior, _WORTH)
        mine = request.counts.rate(overall, _WORTH)
        depths = math.ceil(self.levels_of(longest))
        reach, totals = 1.0, [0.0]
        for depth in range(depths):
            shape = self.all.rate_at(depth, overall) / overall if overall > 0 else 1.0
            reach *= min(_MOST, request.counts.rate_at(depth, min(_MOST, mine * shape)))
            totals.append(totals[-1] + reach)
        if self.spread == 1.0:
            return [b - a for a, b in pairwise(totals)][:longest]
        return self._spread(totals, longest)

    def _spread(self, totals: list[float], longest: int) -> list[float]:
        """Share out what `levels_of` levels give among the nodes of a tree."""
        gains: list[float] = []
        before = 0.0
        for nodes in range(1, longest + 1):
            level = min(self.levels_of(nodes), len(totals) - 1)
            whole = int(level)
            after = totals[whole]
            if whole + 1 < len(totals):
                after += (level - whole) * (totals[whole + 1] - totals[whole])
            gain = max(0.0, after - before)
            gains.append(min(gain, gains[-1]) if gains else gain)
            before = after
        return gains
