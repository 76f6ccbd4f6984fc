"""Budgets follow acceptance, and come back after they went to 0."""

from __future__ import annotations

import pytest

from foredraft.control import AcceptanceBudget, FixedBudget
from foredraft.control.budgets import best_length
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.sampling import Noise
from foredraft.types import SamplingParams, SpecStats, StepOutput

FAST = StepTimes(draft_s=0.0, target_s=1.0, other_s=0.0, rows=1)


def sequence() -> Sequence:
    return Sequence("r", SamplingParams(), [1], 1, 100, Noise(0), None, 0.0)


def steps(controller: AcceptanceBudget, accepts: float, count: int, times: StepTimes = FAST) -> list[int]:
    """Run `count` steps in which a share `accepts` of each draft is accepted; return the budgets."""
    seq, stats, budgets = sequence(), SpecStats(), []
    for _ in range(count):
        (budget,) = controller.budgets([seq], 1)
        stats.add(SpecStats(steps=1, levels=budget, accepted=int(accepts * budget)))
        controller.observe([StepOutput("r", [], "", None, "", None, stats)], times)
        budgets.append(budget)
    return budgets


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.3])
def test_best_length_is_the_best(rate: float, cost: float) -> None:
    def speed(length: int) -> float:
        return sum(rate**depth for depth in range(length + 1)) / (1 + length * cost)

    assert speed(best_length(rate, cost, 12)) == pytest.approx(max(speed(n) for n in range(13)))


def test_good_drafts_grow_and_useless_ones_end() -> None:
    assert steps(AcceptanceBudget(longest=12), 1.0, 40)[-1] == 12
    useless = steps(AcceptanceBudget(longest=12, row_cost=0.1), 0.0, 200)
    assert useless[0] > 0
    assert sum(useless[40:]) <= 160 // 8  # only probes are left
    assert max(useless[40:]) == 1
    assert any(useless[40:])


def test_a_slow_draft_is_used_less() -> None:
    slow = StepTimes(draft_s=3.0, target_s=1.0, other_s=0.0, rows=1)
    fast = steps(AcceptanceBudget(longest=12), 0.5, 60)
    assert sum(steps(AcceptanceBudget(longest=12), 0.5, 60, slow)) < sum(fast)


def test_forgotten_requests_leave_nothing() -> None:
    controller = AcceptanceBudget(longest=4)
    steps(controller, 1.0, 3)
    controller.forget("r")
    controller.forget("r")
    assert not controller._records


def test_fixed_is_fixed() -> None:
    controller = FixedBudget(3)
    assert controller.budgets([sequence(), sequence()], 2) == [3, 3]
