"""Two controllers: a fixed budget, and one that follows each request's own acceptance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.types import StepOutput

_DECAY = 0.9  # of what a step taught, per later step that drafted
_PRIOR = 1.0  # guesses that the prior rate is worth
_PRIOR_RATE = 0.6
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

    @property
    def rate(self) -> float:
        """The chance that the next guess is accepted, given that those before it were."""
        return (self.accepted + _PRIOR * _PRIOR_RATE) / (self.judged + _PRIOR)


class AcceptanceBudget:
    """Draft as long as one more guess raises the expected tokens per second of the request.

    With chance `a` per guess, n guesses emit 1 + a + … + a^n tokens and take 1 + n * cost passes, where cost
    is what one more row and one more draft level take, as shares of a plain pass (Leviathan et al., arXiv
    2211.17192, section 3.3). A request for which no guess pays drafts one again every few steps, to notice a
    change.
    """

    def __init__(self, *, longest: int, row_cost: float, level_cost: float = 0.0) -> None:
        self.longest, self.cost = longest, row_cost + level_cost
        self._records: dict[str, _Record] = {}

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return for each sequence the length with the best expected rate."""
        return [self._budget(self._records.setdefault(seq.request_id, _Record())) for seq in seqs]

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Count what was judged and accepted; forget who finished."""
        for output in outputs:
            record = self._records[output.request_id]
            levels = output.stats.levels - record.seen_levels
            accepted = output.stats.accepted - record.seen_accepted
            record.seen_levels, record.seen_accepted = output.stats.levels, output.stats.accepted
            if levels:
                record.judged = _DECAY * record.judged + min(levels, accepted + 1)
                record.accepted = _DECAY * record.accepted + accepted
            if output.finish_reason is not None:
                del self._records[output.request_id]

    def _budget(self, record: _Record) -> int:
        best = best_length(record.rate, self.cost, self.longest)
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
