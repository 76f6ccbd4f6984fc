"""Two controllers: a fixed budget, and one that asks what the next step's drafts are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from foredraft.control.acceptance import Acceptance, Request
from foredraft.control.cost import DraftCosts, PassCosts
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.tree import depths
from foredraft.types import Source, StepOutput

Deepest = Mapping[Source, int]  # of each source that drafts, the most nodes of a sequence

_WORTHWHILE = 1.01  # of plain decoding: what a draft must promise
_LEAST = 0.01  # chance that a node is accepted, under which none is weighed
_PROBES = 0.007  # share of the time that may go into drafts that do not promise that
_PROBE = 2  # nodes of such a draft
_UNTRIED = 32  # steps after which a method is tried again although another promises more
_LEARN = 0.1  # weight of the newest step in times
_AGAIN = 16  # steps for which what was weighed holds, if nothing was learnt and the same is asked


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
class _Weighed:
    """What was asked last, and what came of it: gains and budgets, and for how many more steps these hold."""

    asked: object = None
    gains: list[list[float]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    left: int = _AGAIN


class AcceptanceBudget:
    """Give each step the sources and budgets with the most expected tokens per second, all sequences
    together.

    A node adds the chance that it is accepted (Acceptance) and takes what one more row adds to the target's
    pass (PassCosts), and a level what it adds to the draft, which is measured while running. Sequences that
    draft nothing are probed with a small draft now and then; probes take less than 1 % of the time.

    source: how a proposer drafts that does not tell.
    """

    def __init__(self, source: Source, *, costs: PassCosts | None = None) -> None:
        self.source = source
        self.costs = PassCosts.guess() if costs is None else costs
        self._acceptances: dict[Source, Acceptance] = {}
        self._requests: dict[str, Request] = {}
        self._drafts: dict[str, dict[int, DraftCosts]] = {}  # of a method, by sequences.bit_length()
        self._other_s = 0.0
        self._allowance_s = 0.0  # what probes may take now
        self._lessons = 0  # drafts judged so far
        self._weighed = _Weighed()

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Choose for each sequence a source, and return how many nodes it may draft."""
        requests = [self._requests.setdefault(seq.request_id, Request()) for seq in seqs]
        count, weighed = len(seqs), self._weighed
        asked = (batch_tokens, self._lessons, *((seq.request_id, seq.sources) for seq in seqs))

        def pass_s(nodes: int, fed: int = batch_tokens) -> float:
            return self.costs.seconds(fed + nodes, count) + self._other_s

        if asked == weighed.asked and weighed.left > 0:
            weighed.left -= 1
            for seq, request in zip(seqs, requests, strict=True):
                seq.source, request.steps = request.source, request.steps + 1
        else:
            weighed = self._weighed = _Weighed(asked, *self._weigh(seqs, requests, batch_tokens, pass_s))
        budgets = list(weighed.budgets)
        self._probe(
            requests,
            weighed.gains,
            budgets,
            lambda nodes, deepest: pass_s(nodes) + self._draft_s(deepest, count),
        )
        return budgets

    def _weigh(
        self,
        seqs: Seq[Sequence],
        requests: Seq[Request],
        batch_tokens: int,
        pass_s: Callable[..., float],
    ) -> tuple[list[list[float]], list[int]]:
        """Choose sources; return the gains of each sequence's nodes, and the best budgets."""
        count = len(seqs)

        def alone_s(nodes: int) -> float:
            return pass_s(nodes, count)

        def draft_s(deepest: Deepest) -> float:
            return self._draft_s(deepest, count)

        known: dict[Source, list[float]] = {}

        def alike_s(source: Source, most: int) -> list[float]:
            """A step's times if all draft 0, 1, 2 … `most` nodes of a source, and maybe more."""
            times = known.setdefault(source, [])
            for size in range(len(times), most + 1):
                times.append(alone_s(size * count) + draft_s({source: size}))
            return times

        pairs = zip(seqs, requests, strict=True)
        gains = [self._choose(seq, request, alike_s) for seq, request in pairs]
        drafted_by = [request.source for request in requests]
        budgets, rate = best_budgets(gains, drafted_by, alone_s, draft_s)
        if batch_tokens > count:  # a prompt's time is spent anyway: a node must be worth its own
            budgets, _ = best_budgets(gains, drafted_by, pass_s, draft_s, rate)
        return gains, budgets

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Count what was judged and accepted, and time the pass and the draft."""
        levels_of: dict[str, int] = {}  # by method
        nodes, drafting, probing, steady = 0, 0, 0, True
        for output in outputs:
            request = self._requests.setdefault(output.request_id, Request())
            drafted, source = len(output.parents), request.source
            if drafted and source is not None:
                levels = max(depths(output.parents))
                self._of(source).learn(request, drafted, levels, output.path)
                self._lessons += 1
                levels_of[source.method] = max(levels, levels_of.get(source.method, 0))
                nodes, drafting, probing = nodes + drafted, drafting + 1, probing + request.probing
                steady &= request.idle == 0 and output.stats.steps > 1  # else the draft also caught up
            request.idle = 0 if drafted else request.idle + 1
        count = max(len(outputs), 1)
        if probing:
            extra_s = self.costs.seconds(times.rows, count) - self.costs.seconds(times.rows - nodes, count)
            self._allowance_s -= (times.draft_s + extra_s) * probing / drafting
        self._time(times, count)
        if len(levels_of) == 1:
            ((method, deepest),) = levels_of.items()
            self._time_draft(method, count, deepest, times.draft_s, steady)

    def forget(self, request_id: str) -> None:
        """Drop what was learnt of a request."""
        self._requests.pop(request_id, None)

    def _of(self, source: Source) -> Acceptance:
        if source not in self._acceptances:
            self._acceptances[source] = Acceptance(source)
        return self._acceptances[source]

    def _choose(
        self, seq: Sequence, request: Request, alike_s: Callable[[Source, int], list[float]]
    ) -> list[float]:
        """Choose the source that would give the most if all sequences had one alike, or one that was not
        tried for long; return its gains.
        """
        best: list[float] = []
        best_rate, request.source = 0.0, None
        request.steps += 1
        sources = (self.source,) if seq.sources is None else seq.sources
        for source in sources:
            gains = self._of(source).gains(request)[: max(seq.levels_left, 0)]
            while len(gains) > 1 and gains[-1] < _LEAST:
                gains.pop()
            rate = 0.0
            if len(sources) > 1:
                totals = accumulate(gains, initial=1.0)
                times = alike_s(source, len(gains))
                rate = max(total / s for total, s in zip(totals, times, strict=False))
                if request.steps - request.chosen.get(source.method, 0) > _UNTRIED:
                    rate = inf
            if request.source is None or rate > best_rate:
                best, best_rate, request.source = gains, rate, source
        seq.source = request.source
        if request.source is not None:
            request.chosen[request.source.method] = request.steps
        return best

    def _draft_s(self, deepest: Deepest, count: int) -> float:
        """Seconds of drafts of so many nodes, by source: those of one method are made together."""
        if len(deepest) == 1:  # nearly always
            ((source, nodes),) = deepest.items()
            return self._method_s(source.method, count, self._of(source).levels_of(nodes))
        levels: dict[str, float] = {}
        for source, nodes in deepest.items():
            its = self._of(source).levels_of(nodes)
            levels[source.method] = max(its, levels.get(source.method, 0.0))
        return sum(self._method_s(method, count, its) for method, its in levels.items())

    def _time(self, times: StepTimes, count: int) -> None:
        if not self.costs.known:
            self._other_s = times.other_s
        if times.rows <= self.costs.rows[-1]:  # a long prompt says little of few rows
            self.costs.observe(times.rows, count, times.target_s)
        self._other_s += _LEARN * (times.other_s - self._other_s)
        self._allowance_s += _PROBES * (times.draft_s + times.target_s + times.other_s)

    def _time_draft(self, method: str, count: int, levels: int, seconds: float, steady: bool) -> None:
        known, size = self._drafts.setdefault(method, {}), count.bit_length()
        if size not in known and steady:
            known[size] = DraftCosts(levels, seconds)
        elif size in known and (steady or seconds < known[size].seconds(levels)):
            known[size].observe(levels, seconds)

    def _method_s(self, method: str, count: int, levels: float) -> float:
        """Seconds of drafts of so many levels for so many sequences."""
        known = self._drafts.get(method)
        if not known or not levels:
            return 0.0
        size = count.bit_length()
        return known[min(known, key=lambda other: abs(other - size))].seconds(levels)

    def _probe(
        self,
        requests: Seq[Request],
        gains: Seq[Seq[float]],
        budgets: list[int],
        seconds: Callable[[int, Deepest], float],
    ) -> None:
        """Let those that were idle longest draft a little, as far as the allowance goes."""
        for request in requests:
            request.probing = False
        nodes, left_s, deepest = sum(budgets), self._allowance_s, _deepest(requests, budgets)
        most_s = 0.0
        for seq in sorted(range(len(requests)), key=lambda seq: -requests[seq].idle):
            source = requests[seq].source
            if budgets[seq] or not gains[seq] or not requests[seq].idle or source is None:
                continue
            deeper = {**deepest, source: max(_PROBE, deepest.get(source, 0))}
            cost_s = seconds(nodes + _PROBE, deeper) - seconds(nodes, deepest)
            most_s = max(most_s, cost_s)
            if cost_s > left_s:
                break
            budgets[seq] = min(_PROBE, len(gains[seq]))
            requests[seq].probing = True
            nodes, deepest, left_s = nodes + _PROBE, deeper, left_s - cost_s
        if most_s:
            self._allowance_s = min(self._allowance_s, 2 * most_s)  # what was saved up long ago is gone


def _deepest(requests: Seq[Request], budgets: Seq[int]) -> dict[Source, int]:
    found: dict[Source, int] = {}
    for request, budget in zip(requests, budgets, strict=True):
        if budget and request.source is not None:
            found[request.source] = max(budget, found.get(request.source, 0))
    return found


def best_budgets(
    gains: Seq[Seq[float]],
    sources: Seq[Source | None],
    pass_s: Callable[[int], float],
    draft_s: Callable[[Deepest], float],
    rate: float | None = None,
) -> tuple[list[int], float]:
    """Return how many nodes each sequence drafts for the most expected tokens per second, and how many these
    are; with a `rate` of tokens per second, for the most tokens less what the step's time is worth at it.

    gains[seq][n]: what node n of a sequence adds to its tokens, never growing with n; without any node each
    sequence emits one. sources[seq]: what drafts them, None where nothing can. pass_s: seconds of a step
    with so many nodes in all, without the draft; draft_s: of drafts of at most deepest[source] nodes a
    sequence. All budgets are 0 where the best promises less than 1 % more than that.
    """
    budgets = [0] * len(gains)
    if not gains:
        return budgets, 0.0
    order = sorted((-gain, node, seq) for seq, some in enumerate(gains) for node, gain in enumerate(some))
    emitted, drafting_s = float(len(gains)), 0.0
    deepest: dict[Source, int] = {}
    plain_s = pass_s(0)
    most, best = _WORTHWHILE * _worth(emitted, plain_s, plain_s, rate), 0
    left = -sum(loss for loss, _, _ in order)
    seconds = plain_s
    for taken, (loss, node, seq) in enumerate(order, start=1):
        if _worth(emitted + left, seconds, plain_s, rate) <= most:
            break  # even if all that is left took no time
        source = sources[seq]
        assert source is not None
        emitted, left = emitted - loss, left + loss
        if node >= deepest.get(source, 0):
            deepest[source] = node + 1
            drafting_s = draft_s(deepest)
        seconds = pass_s(taken) + drafting_s
        worth = _worth(emitted, seconds, plain_s, rate)
        if worth > most:
            most, best = worth, taken
    for _, _, seq in order[:best]:
        budgets[seq] += 1
    return budgets, most


def _worth(emitted: float, seconds: float, plain_s: float, rate: float | None) -> float:
    return emitted / seconds if rate is None else emitted - rate * (seconds - plain_s)
