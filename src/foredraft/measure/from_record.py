"""Advice from a measurement alone: its acceptance by depth, and what a drafted step took at each load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.errors import ConfigError
from foredraft.measure.reasons import WORTH, AtLoad, of_draft, of_requests
from foredraft.measure.records import Record
from foredraft.measure.stats import Figures, figures

_STEADY = (
    0.8  # share of its deepest draft that a chain drafts on average, if it drafts the same at every step
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A variant at a load: what was measured, and the budget that would have been best.

    Drafting `drafted` nodes made a step take 1 + drafted * node_cost plain ones. best_budget: None where it
    drafted trees, or not the same at every step, so that the record does not tell what other budgets would
    give; best_speedup is that of what it did.
    """

    arm: str
    load: str
    measured: float
    drafted: float
    node_cost: float
    accept_rate: float
    best_budget: int | None
    best_speedup: float


def estimates(record: Record) -> list[Estimate]:
    """Return an estimate for each variant and load that tells its acceptance; raises ConfigError if none."""
    found = []
    for load in record.header.loads:
        base = figures(record, record.arms[0], load)
        for arm in record.arms[1:]:
            mine = figures(record, arm, load)
            if base is not None and mine is not None:
                estimate = _estimate(base, mine)
                found += [estimate] if estimate is not None else []
    if not found:
        raise ConfigError(
            "the record has no variant that drafted and told its acceptance, with answers or at /metrics: "
            "nothing can be advised from it"
        )
    return found


def reasons(record: Record, found: Sequence[Estimate]) -> list[str]:
    """Return what speaks for and against drafting, as far as a record and its estimates tell."""
    lines = []
    for arm in dict.fromkeys(one.arm for one in found):
        lines += of_draft(arm, [_at_load(one) for one in found if one.arm == arm])
    lengths = [r.emitted for r in record.results if r.arm == record.arms[0] and r.error is None]
    return [*lines, *of_requests(lengths, _temperature(record.header.command))]


def _at_load(one: Estimate) -> AtLoad:
    deepest = one.best_budget is not None and one.best_budget >= one.drafted
    return AtLoad(one.load, one.accept_rate, one.measured, one.best_budget, deepest)


def _temperature(command: str) -> float:
    """Return what the command that measured asked for; what requests say themselves is in no record."""
    found = re.findall(r"--temperature[ =](\d*\.?\d+)", command)
    return float(found[-1]) if found else 0.0


def _estimate(base: Figures, mine: Figures) -> Estimate | None:
    told, emitted, rate = mine.acceptance, mine.mean_emitted, mine.accept_rate
    if told is None or not told.steps or not told.drafted or emitted is None or rate is None:
        return None
    if mine.speedup is None or not base.inter_token or not mine.inter_token:
        return None
    drafted = told.drafted / told.steps
    node_cost = max(mine.inter_token * emitted / base.inter_token - 1, 0.0) / drafted
    levels = len(mine.accepted_at) or round(drafted)
    best, speed = None, emitted / (1 + drafted * node_cost)
    if levels and told.levels == told.drafted and drafted >= _STEADY * levels:
        best, speed = _best(mine.accepted_at or _geometric(rate, levels), node_cost)
    return Estimate(mine.arm, mine.load, mine.speedup.value, drafted, node_cost, rate, best, speed)


def _best(reached: list[float], node_cost: float) -> tuple[int, float]:
    """Return the budget with the highest speed-up, 0 if none is worth it, and that speed-up."""
    tokens, best, speed = 1.0, 0, 1.0
    for budget, share in enumerate(reached, 1):
        tokens += share
        if tokens / (1 + budget * node_cost) > speed:
            best, speed = budget, tokens / (1 + budget * node_cost)
    return (best, speed) if speed >= WORTH else (0, 1.0)


def _geometric(rate: float, levels: int) -> list[float]:
    """Shares by depth for an acceptance that is the same at every depth, given the mean over all levels."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(middle**depth for depth in range(1, levels + 1)) / max(levels, 1)
        low, high = (middle, high) if mean < rate else (low, middle)
    return [low**depth for depth in range(1, levels + 1)]
