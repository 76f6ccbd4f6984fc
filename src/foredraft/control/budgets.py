"""The controller that asks what the next step's drafts are worth."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from foredraft.control.acceptance import Acceptance, Request
from foredraft.control.cost import DraftTimes, PassCosts
from foredraft.control.promises import Ledger, Promise, Turnover
from foredraft.control.worth import WORTHWHILE, Deepest, best_budgets, deepest_of
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.tree import depths
from foredraft.types import Source, StepOutput

_LEAST = 0.01  # chance that a node is accepted, under which none is weighed
_PROBES = 0.007  # share of the time that may go into drafts that do not promise that
_FEW = 4  # sequences up to which it is that; many have less to win
_PROBE = 2  # nodes of such a draft
_UNTRIED = 32  # steps after which a method is tried again although another promises more
_LEARN = 0.1  # weight of the newest step in times
_FOR = 16  # steps for the sake of which a method reads what it has not read of a text
_PAYS, _PAYS_ALL = 1.02, 1.1  # gain of asking that is enough; the same while a request is behind
_FRESH = 8  # steps in which a lone request asks although others did not gain by it
_ASK = 8  # one step of about so many asks where it does not pay
_SHARE, _DEBT = 0.005, 2.0  # plain steps that a request may lose by a step for others; most that it owes
_AGAIN = 16  # steps for which what was weighed holds, if nothing was learnt and the same is asked


@dataclass(slots=True)
class _Weighed:
    """What was asked last, and what came of it: gains and budgets, and for how many more steps these hold."""

    asked: object = None
    gains: list[list[float]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    left: int = _AGAIN


@dataclass(slots=True)
class _Alike:
    """Seconds of steps in which `count` sequences draft 0, 1, 2 … nodes each, by source; for how many more
    weighings these hold.
    """

    count: int = 0
    seconds: dict[Source, list[float]] = field(default_factory=dict)
    left: int = _AGAIN


class AcceptanceBudget:
    """Give each step the sources and budgets with the most expected tokens per second, all sequences
    together.

    A node adds the chance that it is accepted (Acceptance) and takes what one more row adds to the target's
    pass (PassCosts), and a level what it adds to the draft, which is measured while running. Sequences that
    draft nothing are probed with a small draft now and then; probes take less than 1 % of the time. Three
    things keep all of that from making anything slower: a Ledger of what drafts gave of what they promised,
    rests where asking does not pay, and, unless places of requests are soon taken by others (Turnover), an
    account of what each request has won by its own drafts and lost by everybody's.

    source: how a proposer drafts that does not tell.
    """

    def __init__(self, source: Source, *, costs: PassCosts | None = None) -> None:
        self.source = source
        self.costs = PassCosts.guess() if costs is None else costs
        self._acceptances: dict[Source, Acceptance] = {}
        self._requests: dict[str, Request] = {}
        self._draft_times = DraftTimes()
        self._other_s = 0.0
        self._allowance_s = 0.0  # what probes may take now
        self._lessons = 0  # drafts judged so far
        self._ledgers: dict[int, Ledger] = {}  # by sequences.bit_length()
        self._turnover = Turnover()
        self._promise: Promise | None = None  # of the step that runs now, if it can teach
        self._weighed = _Weighed()
        self._alike = _Alike()

    def rests(self, count: int, batch_tokens: int) -> bool:
        """True if a step should go without drafts, and without asking about them, which takes time."""
        steady = self._turnover.steady
        behind = count > 1 and not steady and any(its.slack < 0 for its in self._requests.values())
        every = _ASK if steady else min(2 * _ASK, max(_ASK // 2, 2 * count))
        known = self._requests.values()
        fresh = count == 1 and (not known or any(request.steps < _FRESH for request in known))
        rests = self._ledger(count).rests(_PAYS_ALL if behind else _PAYS, every, fresh=fresh)
        if rests and batch_tokens == count:
            self._promise = Promise(1, 1, self._plain_s(count), asked=False)
        return rests

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        """Choose for each sequence a source, and return how many nodes it may draft."""
        requests = [self._request(seq.request_id) for seq in seqs]
        for seq, request in zip(seqs, requests, strict=True):
            request.length = len(seq.tokens)
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

        def step_s(nodes: int, deepest: Deepest) -> float:
            return pass_s(nodes) + self._draft_s(deepest, count)

        probing = self._probe(requests, weighed.gains, budgets, step_s)
        chosen = all(seq.params.budget == "auto" for seq in seqs)
        self._promise = None
        if chosen and not probing and batch_tokens == count:
            tokens = 1 + sum(sum(some[:n]) for some, n in zip(weighed.gains, budgets, strict=True)) / count
            plain_s = self._plain_s(count)
            seconds = step_s(sum(budgets), deepest_of(requests, budgets)) if tokens > 1 else plain_s
            seconds += sum(self._unread_s(its) for its, n in zip(requests, budgets, strict=True) if n)
            self._promise = Promise(tokens, seconds / plain_s, plain_s)
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

        if count != self._alike.count or self._alike.left == 0:
            self._alike = _Alike(count)
        self._alike.left -= 1

        def alike_s(source: Source, most: int) -> list[float]:
            """A step's times if all draft 0, 1, 2 … `most` nodes of a source, and maybe more."""
            times = self._alike.seconds.setdefault(source, [])
            for size in range(len(times), most + 1):
                times.append(alone_s(size * count) + draft_s({source: size}))
            return times

        pairs = zip(seqs, requests, strict=True)
        gains = [self._choose(seq, request, alike_s) for seq, request in pairs]
        drafted_by = [request.source for request in requests]
        least = WORTHWHILE / self._ledger(count).trust
        alone = count == 1 or self._turnover.steady
        slacks = None
        if not alone:
            slacks = [
                max(request.slack, 0.0) if seq.params.budget == "auto" else inf
                for seq, request in zip(seqs, requests, strict=True)
            ]
        begin_s = [
            self._unread_s(request) / max(1, min(_FOR, seq.levels_left))
            for seq, request in zip(seqs, requests, strict=True)
        ]
        told = gains, drafted_by, draft_s, begin_s
        budgets, rate = best_budgets(*told, alone_s, least=least, slacks=slacks)
        if batch_tokens > count:  # a prompt's time is spent anyway: a node must be worth its own
            budgets, _ = best_budgets(*told, pass_s, rate=rate)
        return gains, budgets

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Count what was judged and accepted, and time the pass and the draft."""
        count = max(len(outputs), 1)
        nodes = sum(len(output.parents) for output in outputs)
        accepted = sum(len(output.path) for output in outputs)
        nodes_s = lost_s = 0.0
        if nodes:
            nodes_s = self.costs.seconds(times.rows, count) - self.costs.seconds(times.rows - nodes, count)
            lost_s = nodes_s * (nodes - accepted) / nodes
        change = _SHARE - (times.draft_s + lost_s) / self._plain_s(count)
        levels_of: dict[str, int] = {}  # by method
        drafting, probing, steady, unread = 0, 0, True, 0
        for output in outputs:
            request = self._request(output.request_id)
            request.slack = max(-_DEBT, request.slack + change + len(output.path))
            request.idle += 1
            source = request.source
            if output.parents and source is not None:
                levels = max(depths(output.parents))
                self._of(source).learn(request, len(output.parents), levels, output.path)
                self._lessons += 1
                levels_of[source.method] = max(levels, levels_of.get(source.method, 0))
                drafting, probing = drafting + 1, probing + request.probing
                unread += request.length - request.read.get(source.method, 0)
                request.read[source.method] = request.length
                steady &= request.idle == 1 and output.stats.steps > 1  # else the draft also caught up
                request.idle = 0
        if probing:
            self._allowance_s -= (times.draft_s + nodes_s) * probing / drafting
        if self._promise is not None:
            tokens = 1 + accepted / count
            seconds = times.draft_s + times.target_s + times.other_s
            self._ledger(count).observe(self._promise, tokens, seconds)
            self._promise = None
        self._turnover.step()
        self._time(times, count)
        if len(levels_of) == 1:
            ((method, deepest),) = levels_of.items()
            self._draft_times.observe(method, count, deepest, times.draft_s, 0 if steady else unread)

    def forget(self, request_id: str) -> None:
        """Drop what was learnt of a request."""
        if self._requests.pop(request_id, None) is not None:
            self._turnover.left()

    def _request(self, request_id: str) -> Request:
        if request_id not in self._requests:
            self._turnover.joined(alone=not self._requests)
            self._requests[request_id] = Request()
        return self._requests[request_id]

    def _ledger(self, count: int) -> Ledger:
        if count.bit_length() not in self._ledgers:
            self._ledgers[count.bit_length()] = Ledger(count)
        return self._ledgers[count.bit_length()]

    def _of(self, source: Source) -> Acceptance:
        if source not in self._acceptances:
            self._acceptances[source] = Acceptance(source)
        return self._acceptances[source]

    def _choose(
        self, seq: Sequence, request: Request, alike_s: Callable[[Source, int], list[float]]
    ) -> list[float]:
        """Choose the source that would give the most if all sequences had one alike, or one that was not
        tried for long; return its gains, none for a request with a budget of its own: there is nothing to
        choose or probe.
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
        return best if seq.params.budget == "auto" else []

    def _plain_s(self, count: int) -> float:
        """Seconds of a step of so many sequences without drafts."""
        return self.costs.seconds(count, count) + self._other_s

    def _unread_s(self, request: Request) -> float:
        """Seconds of reading what its source's method has not read of a text yet."""
        method = "" if request.source is None else request.source.method
        return self._draft_times.reading_s(method, request.length - request.read.get(method, 0))

    def _draft_s(self, deepest: Deepest, count: int) -> float:
        """Seconds of drafts of so many nodes, by source: those of one method are made together."""
        if len(deepest) == 1:  # nearly always
            ((source, nodes),) = deepest.items()
            return self._draft_times.seconds(source.method, count, self._of(source).levels_of(nodes))
        levels: dict[str, float] = {}
        for source, nodes in deepest.items():
            its = self._of(source).levels_of(nodes)
            levels[source.method] = max(its, levels.get(source.method, 0.0))
        return sum(self._draft_times.seconds(method, count, its) for method, its in levels.items())

    def _time(self, times: StepTimes, count: int) -> None:
        if not self.costs.known:
            self._other_s = times.other_s
        if times.rows <= self.costs.rows[-1]:  # a long prompt says little of few rows
            self.costs.observe(times.rows, count, times.target_s)
        self._other_s += _LEARN * (times.other_s - self._other_s)
        probes = _PROBES * min(1.0, _FEW / count)
        self._allowance_s += probes * (times.draft_s + times.target_s + times.other_s)

    def _probe(
        self,
        requests: Seq[Request],
        gains: Seq[Seq[float]],
        budgets: list[int],
        seconds: Callable[[int, Deepest], float],
    ) -> bool:
        """Let those that were idle longest draft a little, as far as the allowance goes; True if any does."""
        for request in requests:
            request.probing = False
        nodes, left_s, deepest = sum(budgets), self._allowance_s, deepest_of(requests, budgets)
        most_s = 0.0
        for seq in sorted(range(len(requests)), key=lambda seq: -requests[seq].idle):
            source = requests[seq].source
            if budgets[seq] or not gains[seq] or not requests[seq].idle or source is None:
                continue
            deeper = {**deepest, source: max(_PROBE, deepest.get(source, 0))}
            cost_s = seconds(nodes + _PROBE, deeper) - seconds(nodes, deepest) + self._unread_s(requests[seq])
            most_s = max(most_s, cost_s)
            if cost_s > left_s:
                break
            budgets[seq] = min(_PROBE, len(gains[seq]))
            requests[seq].probing = True
            nodes, deepest, left_s = nodes + _PROBE, deeper, left_s - cost_s
        if most_s:
            self._allowance_s = min(self._allowance_s, 2 * most_s)  # what was saved up long ago is gone
        return any(request.probing for request in requests)
