"""Two controllers: a fixed budget, and one that follows each request's own acceptance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.types import SpecStats, StepOutput

_DECAY = 0.9  # of what a step taught, per later step that drafted
_PRIOR = 1.0  # guesses that the prior rate is worth
_PRIOR_RATE = 0.6
_ROW_COST = 0.025  # of a pass of SmolLM2 on a CPU: docs/performance.md
_PROBE_EVERY = 16  # steps without a draft before one is tried again


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same budget for every sequence at every step."""

    budget: int

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return the fixed budget for each."""
        return [self.budget] * len(seqs)

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Learn nothing."""

    def forget(self, request_id: str) -> None:
        """Hold nothing."""


@dataclass(slots=True)
class _Record:
    """Decayed counts of one request: guesses that were judged, those accepted, and steps since the last
    draft.
    """

    judged: float = 0.0
    accepted: float = 0.0
    idle: int = 0
    seen_levels: int = 0
    seen_accepted: int = 0

    def learn(self, stats: SpecStats) -> int:
        """Take in the request's newest step; return how many levels it drafted."""
        levels, accepted = stats.levels - self.seen_levels, stats.accepted - self.seen_accepted
        self.seen_levels, self.seen_accepted = stats.levels, stats.accepted
        if levels:
            self.judged = _DECAY * self.judged + min(levels, accepted + 1)
            self.accepted = _DECAY * self.accepted + accepted
        return levels

    @property
    def rate(self) -> float:
        """The chance that the next guess is accepted, given that those before it were."""
        return (self.accepted + _PRIOR * _PRIOR_RATE) / (self.judged + _PRIOR)


class AcceptanceBudget:
    """Draft as long as one more guess raises the expected tokens per second of the request.

    With chance `a` per guess, n guesses emit 1 + a + … + a^n tokens and take 1 + n * cost passes, where cost
    is what one more row and one more draft level take, as shares of a target pass (Leviathan et al., arXiv
    2211.17192, section 3.3). The level's share is measured while running. A request for which no guess pays
    drafts one again every few steps, to notice a change.
    """

    def __init__(self, *, longest: int, row_cost: float = _ROW_COST) -> None:
        self.longest, self.row_cost = longest, row_cost
        self.level_cost = 0.0
        self._records: dict[str, _Record] = {}

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return for each sequence the length with the best expected rate."""
        return [self._budget(self._records.setdefault(seq.request_id, _Record())) for seq in seqs]

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Count what was judged and accepted, and time the draft."""
        deepest = 0
        for output in outputs:
            deepest = max(deepest, self._records[output.request_id].learn(output.stats))
        fresh = any(output.stats.steps == 1 for output in outputs)  # its draft also read the prompt
        if deepest and not fresh:
            cost = times.draft_s / deepest / times.target_s
            self.level_cost += (1 - _DECAY) * (cost - self.level_cost)

    def forget(self, request_id: str) -> None:
        """Drop what was learnt of a request."""
        self._records.pop(request_id, None)

    def _budget(self, record: _Record) -> int:
        best = best_length(record.rate, self.row_cost + self.level_cost, self.longest)
        record.idle = 0 if best else record.idle + 1
        return 1 if record.idle and record.idle % _PROBE_EVERY == 0 else best


def best_length(rate: float, cost: float, longest: int) -> int:
    """Return the draft length, 0 … longest, with the most expected tokens per plain pass of time."""
    tokens, reached, best, best_speed = 1.0, 1.0, 0, 1.0
    for length in range(1, longest + 1):
        reached *= rate
        tokens += reached
        speed = tokens / (1 + length * cost)
        if speed > best_speed:
            best, best_speed = length, speed
    return best
