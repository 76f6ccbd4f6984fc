"""Two controllers: a fixed budget, and one that asks what the next step's drafts are worth."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.control.acceptance import Acceptance, Request
from foredraft.control.cost import PassCosts
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.tree import depths
from foredraft.types import StepOutput

PRIOR = 0.6  # acceptance before anything is known
_WORTHWHILE = 1.01  # of plain decoding: what a draft must promise
_PROBES = 0.007  # share of the time that may go into drafts that do not promise that
_PROBE = 2  # nodes of such a draft
_LEARN = 0.1  # weight of the newest step in times


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


class AcceptanceBudget:
    """Give each step the budgets with the most expected tokens per second, all sequences together.

    A node adds the chance that it is accepted (Acceptance) and takes what one more row adds to the target's
    pass (PassCosts), and a level what it adds to the draft, which is measured while running. Sequences that
    draft nothing are probed with a small draft now and then; probes take less than 1 % of the time.

    longest: the most nodes a sequence may draft. prior: how often the first guess is expected to be accepted,
    for a draft of known quality. tree: whether drafts are trees.
    """

    def __init__(
        self, *, longest: int, costs: PassCosts | None = None, prior: float = PRIOR, tree: bool = False
    ) -> None:
        self.costs = PassCosts.guess() if costs is None else costs
        self.acceptance = Acceptance(prior, longest, tree=tree)
        self._requests: dict[str, Request] = {}
        self._level_s: dict[int, float] = {}  # seconds of a draft level, by sequences.bit_length()
        self._other_s = 0.0
        self._allowance_s = 0.0  # what probes may take now

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Return for each sequence how many nodes it may draft."""
        requests = [self._requests.setdefault(seq.request_id, Request()) for seq in seqs]
        gains = [
            self.acceptance.gains(request)[: max(seq.levels_left, 0)]
            for request, seq in zip(requests, seqs, strict=True)
        ]
        count, level_s = len(seqs), self._level(len(seqs))

        def seconds(nodes: int, deepest: int) -> float:
            draft_s = level_s * self.acceptance.levels_of(deepest)
            return self.costs.seconds(batch_tokens + nodes, count) + draft_s + self._other_s

        budgets = best_budgets(gains, seconds)
        self._probe(requests, gains, budgets, seconds)
        return budgets

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Count what was judged and accepted, and time the pass and the draft."""
        deepest, nodes, drafting, probing, steady = 0, 0, 0, 0, True
        for output in outputs:
            request = self._requests[output.request_id]
            drafted = len(output.parents)
            if drafted:
                levels = max(depths(output.parents))
                self.acceptance.learn(request, drafted, levels, output.path)
                deepest, nodes = max(deepest, levels), nodes + drafted
                drafting, probing = drafting + 1, probing + request.probing
                steady &= request.idle == 0 and output.stats.steps > 1  # else the draft also caught up
            request.idle = 0 if drafted else request.idle + 1
        count = max(len(outputs), 1)
        if probing:
            extra_s = self.costs.seconds(times.rows, count) - self.costs.seconds(times.rows - nodes, count)
            self._allowance_s -= (times.draft_s + extra_s) * probing / drafting
        self._time(times, count, deepest, steady)

    def forget(self, request_id: str) -> None:
        """Drop what was learnt of a request."""
        self._requests.pop(request_id, None)

    def _time(self, times: StepTimes, count: int, deepest: int, steady: bool) -> None:
        if not self.costs.known:
            self._other_s = times.other_s
        self.costs.observe(times.rows, count, times.target_s)
        self._other_s += _LEARN * (times.other_s - self._other_s)
        self._allowance_s += _PROBES * (times.draft_s + times.target_s + times.other_s)
        if not deepest:
            return
        found, size = times.draft_s / deepest, count.bit_length()
        known = self._level_s.get(size)
        if steady and known is None:
            self._level_s[size] = found
        elif known is not None and (steady or found < known):
            self._level_s[size] += _LEARN * (found - known)

    def _level(self, count: int) -> float:
        """Seconds of one draft level for so many sequences."""
        if not self._level_s:
            return 0.0
        size = count.bit_length()
        return self._level_s[min(self._level_s, key=lambda known: abs(known - size))]

    def _probe(
        self,
        requests: Seq[Request],
        gains: Seq[Seq[float]],
        budgets: list[int],
        seconds: Callable[[int, int], float],
    ) -> None:
        """Let those that were idle longest draft a little, as far as the allowance goes."""
        for request in requests:
            request.probing = False
        one_s = seconds(_PROBE, _PROBE) - seconds(0, 0)
        self._allowance_s = min(self._allowance_s, 2 * one_s)  # what was saved up long ago is gone
        nodes, deepest, left_s = sum(budgets), max(budgets, default=0), self._allowance_s
        for seq in sorted(range(len(requests)), key=lambda seq: -requests[seq].idle):
            if budgets[seq] or not gains[seq] or not requests[seq].idle:
                continue
            cost_s = seconds(nodes + _PROBE, max(deepest, _PROBE)) - seconds(nodes, deepest)
            if cost_s > left_s:
                return
            budgets[seq] = min(_PROBE, len(gains[seq]))
            requests[seq].probing = True
            nodes, deepest, left_s = nodes + _PROBE, max(deepest, _PROBE), left_s - cost_s


def best_budgets(gains: Seq[Seq[float]], seconds: Callable[[int, int], float]) -> list[int]:
    """Return how many nodes each sequence drafts for the most expected tokens per second.

    gains[seq][n]: what node n of a sequence adds to its tokens, never growing with n; without any node each
    sequence emits one. seconds(nodes, deepest): the step's time with so many nodes in all and at most
    `deepest` a sequence. All budgets are 0 where the best promises less than 1 % more than that.
    """
    budgets = [0] * len(gains)
    if not gains:
        return budgets
    order = sorted((-gain, node, seq) for seq, some in enumerate(gains) for node, gain in enumerate(some))
    emitted, deepest = float(len(gains)), 0
    best_rate, best = _WORTHWHILE * emitted / seconds(0, 0), 0
    for taken, (loss, node, _) in enumerate(order, start=1):
        emitted -= loss
        deepest = max(deepest, node + 1)
        rate = emitted / seconds(taken, deepest)
        if rate > best_rate:
            best_rate, best = rate, taken
    for _, _, seq in order[:best]:
        budgets[seq] += 1
    return budgets
