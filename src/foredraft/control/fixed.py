"""The controller that decides nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.types import StepOutput


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same budget for every sequence at every step."""

    budget: int

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return the fixed budget for each."""
        return [self.budget] * len(seqs)

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Learn nothing."""
