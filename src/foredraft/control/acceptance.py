"""How often each node of a draft is accepted: for a request, and over all requests so far.

Nodes count by rank, their place in the draft: proposers put the most promising first. So what was seen of a
draft also tells of every shorter one, chain or tree alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

from foredraft.types import Source

_FADE, _FADE_ALL = 0.97, 0.98  # of what a step taught, per later step that drafted
_WORTH, _WORTH_ALL = 6.0, 8.0  # drafts that what was assumed before is worth: to a request, and over all
_WORTH_RANK = 8.0  # drafts that its neighbours are worth to one rank
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
            counts[:] = [fade * count for count in counts + missing]
        for rank in range(nodes):
            self.judged[rank] += 1
        for rank in path:
            self.accepted[rank] += 1
            if rank + 1 < nodes:
                self.before[rank + 1] += 1

    def gains(self, assumed: Seq[float], worth: float, *, tree: bool) -> list[float]:
        """Return the chance of each rank to be accepted, given the one assumed before anything was seen.

        The first is corrected by what was seen of it. Each later one is corrected by what all share, and then
        by what was seen of it alone: in a chain it follows the one before it, in a tree it lies beside it.
        """
        if tree:
            return self._beside(assumed, worth)
        steps = [after / before for before, after in pairwise(assumed)]
        seen = min(len(self.judged) - 1, len(steps))
        followed = sum(self.accepted[1 : seen + 1])
        expected = sum(self.before[rank + 1] * steps[rank] for rank in range(seen))
        correction = (followed + _WORTH) / (expected + _WORTH)
        gains = [self._mixed(0, assumed[0], worth)]
        for rank, step in enumerate(steps, start=1):
            following = gains[-1] * min(_MOST, step * correction)
            gains.append(min(gains[-1], self._mixed(rank, following, _WORTH_RANK)))
        return gains

    def _beside(self, assumed: Seq[float], worth: float) -> list[float]:
        expected = sum(judged * chance for judged, chance in zip(self.judged, assumed, strict=False))
        correction = (sum(self.accepted) + worth) / (expected + worth)
        gains = [self._mixed(0, assumed[0], worth)]
        for rank, chance in enumerate(assumed[1:], start=1):
            gains.append(min(gains[-1], self._mixed(rank, min(_MOST, chance * correction), _WORTH_RANK)))
        return gains

    def _mixed(self, rank: int, assumed: float, worth: float) -> float:
        if rank >= len(self.judged):
            return assumed
        return min(_MOST, (self.accepted[rank] + worth * assumed) / (self.judged[rank] + worth))


@dataclass(slots=True)
class Request:
    """What is known of one request: counts by source, the source of its newest draft, its steps and those at
    which each method was last chosen, the steps since it last drafted, and whether it is being probed. known:
    gains by source, and of how many lessons over all requests and of its own. slack: plain steps that it may
    still lose for the sake of others. length: of its text; read: what each method has read of it.
    """

    counts: dict[Source, Counts] = field(default_factory=dict)
    source: Source | None = None
    steps: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    idle: int = 0
    probing: bool = False
    slack: float = 0.5
    length: int = 0
    read: dict[str, int] = field(default_factory=dict)
    lessons: int = 0
    known: dict[Source, tuple[int, int, list[float]]] = field(default_factory=dict)


class Acceptance:
    """Chances that guesses of one source are accepted. A request starts from what all before it made of the
    source's prior.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.all = Counts()
        self.spread = 1.0  # a draft of n nodes is about n ** spread levels deep: 1 for a chain
        ranks = range(source.longest)
        # Of a tree later nodes lie beside earlier ones, and lose less.
        self._prior = [source.prior / (n + 1) if source.tree else source.prior ** (n + 1) for n in ranks]
        self._overall: list[float] = []  # gains over all requests; none until they are asked for
        self._lessons = 0

    def learn(self, request: Request, nodes: int, levels: int, path: Seq[int]) -> None:
        """Take in a step of a request. What it met with other sources fades too: that may have changed."""
        request.counts.setdefault(self.source, Counts())
        for source, counts in request.counts.items():
            here = source == self.source
            counts.learn(nodes if here else 0, path if here else (), _FADE)
        self.all.learn(nodes, path, _FADE_ALL)
        self._overall = []
        self._lessons, request.lessons = self._lessons + 1, request.lessons + 1
        if nodes > 1:
            self.spread += 0.1 * (math.log(levels) / math.log(nodes) - self.spread)

    def levels_of(self, nodes: int) -> float:
        """How deep a draft of so many nodes is likely to be."""
        return math.pow(nodes, self.spread)

    def gains(self, request: Request) -> list[float]:
        """Expected accepted tokens that the first, second, … node of a draft adds; they never grow."""
        known = request.known.get(self.source)
        if known is None or known[:2] != (self._lessons, request.lessons):
            self._overall = self._overall or self._gains_of(self.all, self._prior, _WORTH_ALL)
            counts = request.counts.get(self.source)
            found = self._overall if counts is None else self._gains_of(counts, self._overall, _WORTH)
            known = request.known[self.source] = (self._lessons, request.lessons, found)
        return known[2]

    def _gains_of(self, counts: Counts, assumed: Seq[float], worth: float) -> list[float]:
        return counts.gains(assumed, worth, tree=self.source.tree)
