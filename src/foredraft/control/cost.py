"""What a target pass takes, by how many rows and sequences share it: measured once a machine and model, kept
in the user's cache, corrected while running.
"""

from __future__ import annotations

import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BlockTable
from foredraft.engine.protocols import Target
from foredraft.engine.watch import Watch
from foredraft.types import NO_DRAFT, chain
from foredraft.zoo import kept

_KEPT = "costs"
_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_OFTEN = 32  # passes of up to so many rows are measured at every start
_SEQS = 8  # sequences of one row each, beside one sequence of as many rows
_CONTEXT = 128  # tokens before the measured rows
_REPEATS = 4
_PATIENCE_S = 4.0  # measuring stops here; what is missing is drawn on in a line
_KEPT_S = 0.5  # what is measured sooner leaves no file
_DRIFT, _POINT = 0.1, 0.02  # how far one pass moves the whole table, and the nearest point in it
_ODD = 1.5  # a pass or draft this many times off teaches no more than one this far off
_LEARN, _ASSUMED = (
    0.1,
    0.1,
)  # weight of the newest draft; of what is assumed of a level, as a variance of levels
_GUESS = {1: 1.0, 4: 1.03, 8: 1.1, 16: 1.35, 32: 1.9, 128: 5.0}  # SmolLM2 on two cores, in passes of one row


class PassCosts:
    """Seconds of a target pass. Between measured numbers of rows it is a line, beyond the last one too."""

    def __init__(self, seconds: dict[int, float], *, seq_s: float = 0.0) -> None:
        self.rows = sorted(seconds)
        assert len(self.rows) >= 2
        self.points = [seconds[rows] for rows in self.rows]
        self.seq_s = seq_s
        self.drift = 1.0
        for more, rows in enumerate(self.rows):  # rows could be fed in several passes
            whole = (-(-rows // fewer) * s for fewer, s in zip(self.rows[:more], self.points, strict=False))
            self.points[more] = min([self.points[more], *whole])
        level(self.points)

    @classmethod
    def guess(cls) -> PassCosts:
        """A table for a target that was not measured; the first pass gives its scale."""
        costs = cls(dict(_GUESS), seq_s=0.03)
        costs.drift = 0.0
        return costs

    @property
    def known(self) -> bool:
        """False while only the table's shape is known, not its scale."""
        return self.drift > 0

    def seconds(self, rows: int, seqs: int = 1) -> float:
        """Return what a pass over `rows` rows of `seqs` sequences takes."""
        return self._shape(rows, seqs) * (self.drift or 1.0)

    def observe(self, rows: int, seqs: int, seconds: float) -> None:
        """Learn from one pass."""
        shape = self._shape(rows, seqs)
        if not self.known:
            self.drift = seconds / shape
            return
        ratio = min(_ODD, max(1 / _ODD, seconds / (shape * self.drift)))
        self.drift *= ratio**_DRIFT
        near = min(range(len(self.rows)), key=lambda point: abs(self.rows[point] - rows))
        self.points[near] *= ratio**_POINT
        level(self.points, near)

    def _shape(self, rows: int, seqs: int) -> float:
        return on_line(self.rows, self.points, rows) + self.seq_s * (seqs - 1)


class DraftCosts:
    """Seconds of drafts of some levels: what any draft takes and what a level adds, by a line through those
    seen. Until these were of several depths, all of it is thought to grow with the levels.
    """

    def __init__(self, levels: float, seconds: float) -> None:
        self._levels, self._seconds = levels, seconds  # running means
        self._spread = self._together = 0.0  # running variance of levels, covariance with seconds

    def seconds(self, levels: float) -> float:
        """Return what a draft of so many levels takes."""
        whole = self._seconds / self._levels
        slope = (self._together + _ASSUMED * whole) / (self._spread + _ASSUMED)
        return max(0.0, self._seconds + min(max(slope, 0.0), whole) * (levels - self._levels))

    def observe(self, levels: float, seconds: float) -> None:
        """Learn from one draft."""
        known = self.seconds(levels)
        seconds = min(max(seconds, known / _ODD), known * _ODD)
        more, longer = levels - self._levels, seconds - self._seconds
        self._levels += _LEARN * more
        self._seconds += _LEARN * longer
        self._spread = (1 - _LEARN) * (self._spread + _LEARN * more * more)
        self._together = (1 - _LEARN) * (self._together + _LEARN * more * longer)


class DraftTimes:
    """What drafts of each method take, and reading a text for them."""

    def __init__(self) -> None:
        self._costs: dict[str, dict[int, DraftCosts]] = {}  # of a method, by sequences.bit_length()
        self._reading_s: dict[str, float] = {}  # of a method, by token

    def seconds(self, method: str, count: int, levels: float) -> float:
        """Return what drafts of so many levels for so many sequences take, by the nearest known load."""
        known = self._costs.get(method)
        if not known or not levels:
            return 0.0
        size = count.bit_length()
        return known[min(known, key=lambda other: abs(other - size))].seconds(levels)

    def reading_s(self, method: str, tokens: int) -> float:
        """Return what reading so many tokens takes beside that."""
        return tokens * self._reading_s.get(method, 0.0)

    def observe(self, method: str, count: int, levels: int, seconds: float, unread: int) -> None:
        """Learn from one step's drafts. unread: tokens read for them, 0 if only those of the step before."""
        known, size = self._costs.setdefault(method, {}), count.bit_length()
        usual_s = self.seconds(method, count, levels)
        if unread and usual_s:
            before_s = self._reading_s.get(method, 0.0)
            now_s = max(0.0, seconds - usual_s) / unread
            self._reading_s[method] = before_s + _LEARN * (now_s - before_s)
        if size not in known and not unread:
            known[size] = DraftCosts(levels, seconds)
        elif size in known and (not unread or seconds < usual_s):
            known[size].observe(levels, seconds)


def on_line(rows: Seq[int], points: Seq[float], at: float) -> float:
    """Return the value at a number of rows: between those measured, in order, on the line through two points,
    beyond the last as between the last two, before the first what that is.
    """
    if len(rows) == 1:
        return points[0]
    right = min(max(bisect_right(rows, at), 1), len(rows) - 1)
    x0, x1, y0, y1 = rows[right - 1], rows[right], points[right - 1], points[right]
    return y0 + (y1 - y0) * (max(at, rows[0]) - x0) / (x1 - x0)


def level(points: list[float], fixed: int = -1) -> None:
    """Let more rows never take less time, since they could be fed and not used: points before the fixed one
    are lowered, those after it raised.
    """
    fixed %= len(points)
    for left in range(fixed - 1, -1, -1):
        points[left] = min(points[left], points[left + 1])
    for right in range(fixed + 1, len(points)):
        points[right] = max(points[right], points[right - 1])


def pass_costs(target: Target, name: str, *, where: Path | None = None) -> PassCosts:
    """Return what passes of the target `name` take on this machine: measured now, in a few seconds at most
    and under one where the cache knows them. Of all measurements the fastest count, since what disturbs only
    adds. A cache that cannot be read or written is done without.
    """
    key = _key(target, name)
    before: dict[int, float] = {}
    try:
        known = kept.recall(_KEPT, key, where)
        before = {int(rows): float(seconds) for rows, seconds in known["seconds"].items()}
        apart = float(known["seq_s"])
    except (ValueError, KeyError, TypeError, AttributeError):
        before, apart = {}, float("inf")
    begun = time.perf_counter()
    costs = measure(target, 1, _OFTEN) if before else measure(target)
    took_s = time.perf_counter() - begun
    if not before and took_s < _KEPT_S:
        return costs
    now = dict(zip(costs.rows, costs.points, strict=True))
    seconds = {
        rows: min(some.get(rows, float("inf")) for some in (before, now)) for rows in {**before, **now}
    }
    costs = PassCosts(seconds, seq_s=min(apart, costs.seq_s))
    if (seconds, costs.seq_s) == (before, apart):
        return costs
    kept.keep(_KEPT, key, {"target": name, "seconds": seconds, "seq_s": costs.seq_s}, where)
    return costs


def measure(
    target: Target,
    repeats: int = _REPEATS,
    most: int = _ROWS[-1],
    clock: Callable[[], float] = time.perf_counter,
) -> PassCosts:
    """Time passes over random text, behind a context that is as empty as the cache; the fastest counts.
    most: rows of a pass.
    """
    most = min(most, target.max_len - _CONTEXT - 1)
    sizes = [rows for rows in _ROWS if rows <= max(most, 2)]
    context = min(_CONTEXT, max(target.max_len - sizes[-1] - 1, 1))
    room = context + sizes[-1] + 1
    kv = target.make_kv(room + _SEQS * (context + 1) + 32 * _SEQS)
    tables = [BlockTable() for _ in range(_SEQS + 1)]
    for table, length in zip(tables, [room] + [context + 1] * _SEQS, strict=True):
        kv.pool.grow(table, length)
    text = (torch.arange(room) * 7919 % target.vocab_size).tolist()

    watch = Watch(target.device, clock)

    def one(rows: int) -> float:
        draft = chain(text[context : context + rows - 1]) if rows > 1 else NO_DRAFT
        return timed([Feed(text[:1], context, tables[0], draft)])

    def timed(feeds: Seq[Feed]) -> float:
        batch = make_batch(feeds)
        watch.start()
        target.forward(batch, kv)
        watch.stop()
        return watch.seconds()

    seconds: dict[int, float] = {}
    apart = float("inf")
    one(sizes[-1])  # what only the first pass takes
    begun = clock()
    for repeat in range(repeats):
        for rows in sizes:
            if len(seconds) >= 2 and clock() - begun > _PATIENCE_S:
                break
            took = one(rows)
            seconds[rows] = min(took, seconds.get(rows, took))
        if repeat == 0 or clock() - begun <= _PATIENCE_S:
            feeds = [Feed(text[:1], context, table, NO_DRAFT) for table in tables[1:]]
            apart = min(apart, timed(feeds))
    costs = PassCosts(seconds)
    costs.seq_s = max(0.0, apart - costs.seconds(_SEQS)) / (_SEQS - 1)
    return costs


def _key(target: Target, name: str) -> str:
    facts = [
        kept.model_key(Path(name)) or name,
        type(target).__name__,
        str(getattr(target, "dtype", "")),
        str(target.device),
    ]
    facts += [platform.node(), platform.processor(), platform.machine(), str(os.cpu_count())]
    facts += [str(torch.get_num_threads())]
    return kept.key(facts)
