"""Budgets follow acceptance and cost, by a simulated clock: good drafts help, useless ones cost little."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest

from fakes import ContextTarget
from foredraft.control import AcceptanceBudget, FixedBudget, PassCosts, cost, pass_costs
from foredraft.control.acceptance import Acceptance, Request
from foredraft.control.cost import DraftTimes
from foredraft.control.promises import Ledger, Promise, Turnover
from foredraft.control.worth import best_budgets
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.sampling import Noise
from foredraft.types import SamplingParams, Source, SpecStats, StepOutput
from foredraft.zoo import kept

SECONDS = {1: 0.015, 4: 0.015, 8: 0.0165, 16: 0.021, 32: 0.032, 64: 0.058, 128: 0.11}
Rate = Callable[[str, int], float]  # chance that a guess for this position of the answer is right


def passes() -> PassCosts:
    return PassCosts(SECONDS, seq_s=0.0015)


def sequence(name: str = "r", tokens: int = 99) -> Sequence:
    return Sequence(name, SamplingParams(max_tokens=tokens), [1], 1, 1 + tokens, Noise(0), None, 0.0)


class Clockwork:
    """Decodes imaginary requests: a guess is right by chance, passes and drafts take what the tables say."""

    def __init__(
        self,
        controller: AcceptanceBudget,
        rate: Rate,
        *,
        level_s: float,
        seed: int = 0,
        lookup: tuple[Source, Rate] | None = None,
    ) -> None:
        self.controller, self.rate, self.level_s, self.lookup = controller, rate, level_s, lookup
        self.random, self.costs = random.Random(seed), passes()
        self.plain_s = self.taken_s = 0.0
        self.budgets: list[int] = []
        self.looked_up = 0

    def run(self, load: int, tokens: int, tag: str = "") -> float:
        """Serve `load` requests at once; return the time plain decoding takes over the time taken."""
        before = self.plain_s, self.taken_s
        live = [(sequence(f"{tag}{i}", tokens), SpecStats()) for i in range(load)]
        while live:
            self._step(live)
            for seq, _ in live:
                if len(seq.tokens) >= seq.limit:
                    self.controller.forget(seq.request_id)
            live = [pair for pair in live if len(pair[0].tokens) < pair[0].limit]
        return (self.plain_s - before[0]) / (self.taken_s - before[1])

    def _step(self, live: list[tuple[Sequence, SpecStats]]) -> None:
        if self.lookup:
            for seq, _ in live:
                seq.sources = (self.lookup[0], self.controller.source)
        budgets = self.controller.budgets([seq for seq, _ in live], len(live))
        self.budgets += budgets
        outputs, nodes, deepest, emitted = [], 0, 0, 0
        for (seq, stats), budget in zip(live, budgets, strict=True):
            levels, accepted, rate = min(budget, seq.levels_left), 0, self.rate
            looked_up = self.lookup is not None and seq.source == self.lookup[0]
            if self.lookup and looked_up:
                rate = self.lookup[1]
                self.looked_up += 1
            while accepted < levels and self.random.random() < rate(
                seq.request_id, len(seq.tokens) + accepted
            ):
                accepted += 1
            stats.add(SpecStats(steps=1))
            seq.tokens += [0] * (accepted + 1)
            nodes, emitted = nodes + levels, emitted + accepted + 1
            deepest = max(deepest, 0 if looked_up else levels)
            drafted, path = tuple(range(-1, levels - 1)), tuple(range(accepted))
            outputs.append(StepOutput(seq.request_id, [], "", None, "", None, stats, drafted, path))
        noise = self.random.lognormvariate(0, 0.1)
        target_s = self.costs.seconds(len(live) + nodes, len(live)) * noise
        draft_s = deepest * self.level_s * self.random.lognormvariate(0, 0.1)
        self.controller.observe(outputs, StepTimes(draft_s, target_s, 0.0003, len(live) + nodes))
        self.taken_s += target_s + draft_s + 0.0003
        self.plain_s += (self.costs.seconds(len(live), len(live)) * noise + 0.0003) * emitted / len(live)


RATES: dict[str, Rate] = {
    "useless": lambda name, pos: 0.0,
    "poor": lambda name, pos: 0.2,
    "good, then useless": lambda name, pos: 0.95 if pos < 64 else 0.0,
    "useless, then good": lambda name, pos: 0.0 if pos < 64 else 0.95,
    "every other request": lambda name, pos: 0.0 if name[-1] in "13579" else 0.9,
}


@pytest.mark.parametrize("load", [1, 2, 8, 32])
@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("level_s", [0.0, 0.001, 0.003])
def test_never_slower(kind: str, load: int, level_s: float) -> None:
    """Lookup (levels for nothing), a light head and a slow draft model; measured passes and guessed ones."""
    for costs in (passes(), None):
        controller = AcceptanceBudget(Source(15 if level_s == 0 else 8), costs=costs)
        clockwork = Clockwork(controller, RATES[kind], level_s=level_s)
        for turn in range(3):
            assert clockwork.run(load, 128, f"{turn}-") > 0.97
        assert clockwork.plain_s / clockwork.taken_s > 0.98


@pytest.mark.parametrize(("load", "least"), [(1, 5.0), (4, 2.8), (16, 1.9)])
def test_good_drafts_are_used(load: int, least: float) -> None:
    assert Clockwork(AcceptanceBudget(Source(15)), lambda name, pos: 0.95, level_s=0.0).run(load, 200) > least


@pytest.mark.parametrize("level_s", [0.0005, 0.001])
def test_what_was_turned_off_turns_on_again(level_s: float) -> None:
    clockwork = Clockwork(AcceptanceBudget(Source(8), costs=passes()), lambda n, p: 0.0, level_s=level_s)
    clockwork.run(1, 300)
    assert sum(clockwork.budgets[40:]) < 300
    clockwork.rate = RATES["useless, then good"]
    assert clockwork.run(1, 300) > 1.8


@pytest.mark.parametrize("load", [1, 8])
def test_the_better_source_drafts(load: int) -> None:
    """A lookup is taken where it copies, the head where it does not, also if that changes half-way."""
    lookup, head = Source(15, method="lookup"), Source(8)

    def run(rate: Rate) -> tuple[float, float]:
        controller = AcceptanceBudget(head, costs=passes())
        clockwork = Clockwork(controller, lambda n, p: 0.6, level_s=0.001, lookup=(lookup, rate))
        gain = clockwork.run(load, 400)
        return clockwork.looked_up / len(clockwork.budgets), gain

    used, gain = run(lambda name, pos: 0.95)
    assert used > 0.9
    assert gain > (3.5 if load == 1 else 2)
    used, gain = run(lambda name, pos: 0.0)
    assert used < 0.15
    alone = Clockwork(AcceptanceBudget(head, costs=passes()), lambda n, p: 0.6, level_s=0.001).run(load, 400)
    assert gain > 0.93 * alone
    if load == 1:  # where one request must not go by the many others
        used, gain = run(lambda name, pos: 0.0 if pos < 200 else 0.95)
        assert 0.1 < used < 0.6
        assert gain > 1.2 * alone


@pytest.mark.parametrize("load", [4, 8, 16, 32])
@pytest.mark.parametrize("level_s", [0.0, 0.001])
def test_the_last_of_a_batch_does_not_wait_for_the_drafts_of_others(load: int, level_s: float) -> None:
    """Of answers of one length, all begun at once, only every other can be drafted well."""
    controller = AcceptanceBudget(Source(8), costs=passes())
    clockwork = Clockwork(controller, lambda n, p: 0.0 if n[-1] in "13579" else 0.8, level_s=level_s)
    plain_s = 0.0
    for turn in range(6):
        clockwork.run(load, 128, f"{turn}-")
        plain_s += 128 * (clockwork.costs.seconds(load, load) + 0.0003)
    assert plain_s / clockwork.taken_s > 0.97


def test_a_slow_draft_is_used_less() -> None:
    used = []
    for level_s in (0.0, 0.004):
        clockwork = Clockwork(AcceptanceBudget(Source(12)), lambda name, pos: 0.6, level_s=level_s)
        clockwork.run(1, 300)
        used.append(sum(clockwork.budgets) / len(clockwork.budgets))
    assert used[1] < used[0] / 2


def test_best_budgets_are_the_best() -> None:
    """Against every combination of budgets of three sequences."""
    rates = (0.9, 0.5, 0.2)
    gains = [[rate ** (node + 1) for node in range(4)] for rate in rates]
    source = Source(4)

    def pass_s(nodes: int) -> float:
        return 1 + 0.08 * nodes

    def draft_s(deepest: Mapping[Source, int]) -> float:
        return 0.05 * deepest.get(source, 0)

    def speed(budgets: tuple[int, ...]) -> float:
        emitted = 3 + sum(sum(some[:budget]) for some, budget in zip(gains, budgets, strict=True))
        return emitted / (pass_s(sum(budgets)) + draft_s({source: max(budgets)}))

    told = gains, [source] * 3, draft_s, [0.0] * 3
    found, rate = best_budgets(*told, pass_s)
    assert rate == pytest.approx(speed(tuple(found)))
    assert speed(tuple(found)) == pytest.approx(max(map(speed, product(range(5), repeat=3))), rel=0.01)
    assert best_budgets(*told, lambda nodes: 1 + nodes)[0] == [0, 0, 0]
    assert best_budgets([], [], draft_s, [], pass_s)[0] == []
    # Beside a prompt that takes as long as a hundred steps a node must be worth no less.
    beside, _ = best_budgets(*told, lambda nodes: 100 + pass_s(nodes), rate=rate)
    assert sum(beside) <= sum(found)


def test_nobody_loses_more_for_others_than_the_slack_allows() -> None:
    """What the second loses by drafts of the first: their time, and rows that are likely rejected."""
    gains, source = [[0.9, 0.8, 0.7], [0.0]], Source(3)
    told = (
        gains,
        [source, source],
        lambda deepest: 0.1 if deepest else 0.0,
        [0.0, 0.0],
        lambda nodes: 1 + 0.1 * nodes,
    )
    for slacks, budgets in (
        (None, [3, 0]),
        ([0.0, 0.17], [3, 0]),  # 0.1 and 0.6 of a row
        ([0.0, 0.14], [2, 0]),
        ([0.0, 0.115], [1, 0]),
        ([9.0, 0.1], [0, 0]),
    ):
        assert best_budgets(*told, slacks=slacks)[0] == budgets
    # One that gains by its own drafts may lose by all.
    assert best_budgets([[0.9], [0.9]], *told[1:], slacks=[0.0, 0.0])[0] == [1, 1]


def test_what_must_be_read_first_counts() -> None:
    gains, source = [[0.9], [0.9]], Source(1)
    told = gains, [source, source], lambda deepest: 0.0
    assert best_budgets(*told, [0.0, 0.0], lambda nodes: 1 + 0.1 * nodes)[0] == [1, 1]
    assert best_budgets(*told, [0.0, 0.5], lambda nodes: 1 + 0.1 * nodes)[0] == [1, 0]


def test_trust_falls_where_promises_are_not_kept() -> None:
    """Half as many more tokens are promised, none are given; then plain steps forgive."""
    ledger = Ledger()
    assert ledger.trust == 1
    for _ in range(100):
        ledger.observe(Promise(1.5, 1.1, plain_s=0.01), tokens=1.0, seconds=0.011)
        ledger.observe(Promise(1.0, 1.0, plain_s=0.01), tokens=1.0, seconds=0.01)
    assert ledger.trust == pytest.approx(1 / 1.5, abs=0.05)
    for _ in range(3000):
        ledger.observe(Promise(1.0, 1.0, plain_s=0.01), tokens=1.0, seconds=0.01)
    assert ledger.trust > 0.95
    for _ in range(200):  # a whole machine that is slow breaks no promise
        ledger.observe(Promise(1.5, 1.1, plain_s=0.01), tokens=1.5, seconds=0.022)
        ledger.observe(Promise(1.0, 1.0, plain_s=0.01), tokens=1.0, seconds=0.02)
    assert ledger.trust > 0.97


def test_what_one_draft_gives_is_chance() -> None:
    """Three that give nothing cost a lone request little trust; of three times sixteen that says more."""
    trust = []
    for count in (1, 16):
        ledger = Ledger(count)
        for _ in range(3):
            ledger.observe(Promise(1.8, 1.2, plain_s=0.01), tokens=1.0, seconds=0.012)
        trust.append(ledger.trust)
    assert trust[0] > 0.95
    assert trust[1] < 0.87


def test_no_draft_is_blamed_before_plain_steps_are_known() -> None:
    """The table says half of what this machine takes, for all steps."""
    ledger = Ledger(1)
    for _ in range(20):
        ledger.observe(Promise(1.5, 1.2, 0.01), 1.5, 0.024)
    assert ledger.trust == 1
    for _ in range(20):
        ledger.observe(Promise(1, 1, 0.01, asked=False), 1.0, 0.02)
        ledger.observe(Promise(1.5, 1.2, 0.01), 1.5, 0.024)
    assert ledger.trust > 0.97


def test_a_new_lone_request_asks_whatever_others_gained() -> None:
    controller = AcceptanceBudget(Source(8), costs=passes())
    clockwork = Clockwork(controller, RATES["useless"], level_s=0.001)

    def rests(steps: int) -> int:
        """How many of some steps of a new request rest."""
        seq, found = sequence("new"), 0
        for _ in range(steps):
            if controller.rests(1, 1):
                found += 1
            else:
                controller.budgets([seq], 1)
                controller._ledger(1).observe(Promise(1, 1, 0.015), 1.0, 0.0155)
        controller.forget("new")
        return found

    clockwork.run(1, 100)
    assert rests(200) > 100
    assert rests(6) == 0


def test_a_lone_request_owes_nobody() -> None:
    """One that has lost steps by its own drafts still drafts; beside another it waits."""
    costs = PassCosts({1: 0.01, 2: 0.0105, 4: 0.0115, 8: 0.0135}, seq_s=0.0)
    drafted = []
    for others in (0, 1):
        controller = AcceptanceBudget(Source(1, prior=0.5), costs=costs)
        seqs = [sequence(str(number)) for number in range(1 + others)]
        for seq in seqs:
            controller._request(seq.request_id).slack = -1.0
        controller._draft_times.observe("", len(seqs), 1, 0.004, 0)
        drafted.append(controller.budgets(seqs, len(seqs)))
    assert drafted == [[1], [0, 0]]


def test_where_asking_does_not_pay_few_steps_ask() -> None:
    """Asking takes a twentieth of a step; then, what is asked for doubles the tokens."""
    ledger = Ledger()

    def steps(count: int, tokens: float, seconds: float) -> int:
        asked = 0
        for _ in range(count):
            if ledger.rests(1.02, every=8):
                ledger.observe(Promise(1, 1, 0.01, asked=False), 1.0, 0.01)
            else:
                asked += 1
                ledger.observe(Promise(tokens, 1.05, 0.01), tokens, seconds)
        return asked

    steps(200, 1.0, 0.0105)
    assert steps(160, 1.0, 0.0105) == 20
    steps(200, 2.0, 0.0105)
    assert steps(160, 2.0, 0.0105) == 160


def test_places_that_are_taken_again() -> None:
    """By others while some still run; not by a new batch, or much later."""
    turnover = Turnover()
    for _ in range(12):
        turnover.left()
        turnover.step()
        turnover.joined(alone=False)
    assert turnover.steady
    for _ in range(12):
        turnover.left()
        for _ in range(20):
            turnover.step()
        turnover.joined(alone=False)
    assert not turnover.steady
    for _ in range(12):
        turnover.left()
        turnover.joined(alone=True)
    assert not turnover.steady


def test_reading_a_text_late_is_told_from_drafting() -> None:
    times = DraftTimes()
    times.observe("head", 1, 2, 0.009, unread=100)  # nothing to tell it from yet
    assert times.reading_s("head", 100) == 0
    for _ in range(100):
        times.observe("head", 1, 2, 0.002, unread=0)
        times.observe("head", 1, 2, 0.005, unread=100)
    assert times.seconds("head", 1, 2) == pytest.approx(0.002, rel=0.05)
    assert times.reading_s("head", 100) == pytest.approx(0.003, rel=0.05)
    assert times.seconds("head", 8, 2) == times.seconds("head", 1, 2)


def test_trees_are_judged_by_their_nodes() -> None:
    """Sixteen nodes on four levels: what each rank gives is learnt, and that a draft is four levels deep."""
    acceptance, request = Acceptance(Source(20, tree=True)), Request()
    for turn in range(200):
        path = (0, 2, 5) if turn % 2 else (1,)
        acceptance.learn(request, nodes=16, levels=4, path=path)
    assert acceptance.levels_of(16) == pytest.approx(4, rel=0.05)
    gains = acceptance.gains(request)
    assert len(gains) == 20
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == pytest.approx(0.5, abs=0.1)
    assert sum(gains[:6]) == pytest.approx(2, rel=0.25)
    assert sum(gains[16:]) < 0.2


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("nodes", [2, 6])
def test_gains_of_chains_go_on_beyond_what_was_drafted(rate: float, nodes: int) -> None:
    acceptance, dice = Acceptance(Source(10)), random.Random(0)
    for _ in range(1000):
        accepted = next((n for n in range(nodes) if dice.random() >= rate), nodes)
        acceptance.learn(Request(), nodes, nodes, range(accepted))
    fresh = acceptance.gains(Request())
    for rank, gain in enumerate(fresh[:8]):
        assert gain == pytest.approx(rate ** (rank + 1), abs=0.15)


def test_a_few_early_misses_do_not_end_drafting() -> None:
    """Later requests still try: what the first one met may be its own."""
    acceptance = Acceptance(Source(15))
    for _ in range(8):
        acceptance.learn(Request(), 2, 2, ())
    assert acceptance.gains(Request())[0] > 0.25


def test_forgotten_requests_leave_nothing() -> None:
    controller = AcceptanceBudget(Source(4))
    Clockwork(controller, lambda name, pos: 1.0, level_s=0.0).run(2, 20)
    controller.forget("0")
    assert not controller._requests


def test_fixed_is_fixed() -> None:
    controller = FixedBudget(3)
    assert controller.budgets([sequence(), sequence()], 2) == [3, 3]


def test_pass_costs_are_lines_between_points() -> None:
    costs = PassCosts({1: 1.0, 2: 0.8, 4: 1.6, 8: 2.0}, seq_s=0.25)
    assert costs.seconds(1) == costs.seconds(2) == 0.8  # one row can be fed as two
    assert costs.seconds(3) == pytest.approx(1.2)
    assert costs.seconds(16) == pytest.approx(2.8)
    assert costs.seconds(4, 3) == pytest.approx(2.1)


def test_rows_could_be_fed_in_several_passes() -> None:
    """A pass of many rows that was timed while the machine was busy is not believed."""
    assert PassCosts({1: 1.0, 8: 2.0, 32: 9.0, 40: 9.5}).points == [1.0, 2.0, 8.0, 9.5]


def test_pass_costs_follow_what_passes_take() -> None:
    costs = PassCosts.guess()
    costs.observe(1, 1, 0.5)
    assert costs.seconds(1) == pytest.approx(0.5)
    for _ in range(400):
        costs.observe(1, 1, 1.0)
        costs.observe(8, 1, 3.0)
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.1)
    assert costs.seconds(8) == pytest.approx(3.0, rel=0.1)


def test_requests_with_budgets_of_their_own_are_neither_probed_nor_in_the_way() -> None:
    controller = AcceptanceBudget(Source(15))
    clock = Clockwork(controller, lambda name, pos: 0.0 if pos < 100 else 0.95, level_s=0.001)
    off = SamplingParams(max_tokens=10_000, budget=0)
    live = [(Sequence(f"off {i}", off, [1], 1, 10_001, Noise(0), None, 0.0), SpecStats()) for i in range(2)]
    live.append((sequence("auto", 10_000), SpecStats()))
    for _ in range(500):
        clock._step(live)
    assert not any(clock.budgets[0::3] + clock.budgets[1::3])
    assert min(clock.budgets[2::3][-100:]) > 2


def test_another_model_at_the_same_place_is_timed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_KEPT_S", 0.0)
    monkeypatch.setattr(kept, "LEAST_BYTES", 1)
    model, costs = tmp_path / "model", tmp_path / "costs"
    model.mkdir()
    for number, weights in enumerate(("small", "larger"), start=1):
        (model / "weights").write_text(weights)
        pass_costs(ContextTarget(), str(model), where=costs)
        assert len(list(costs.iterdir())) == number


def test_the_fastest_passes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ContextTarget()
    monkeypatch.setattr(cost, "_KEPT_S", 1e9)
    pass_costs(target, "toy", where=tmp_path)
    assert not list(tmp_path.iterdir())  # too quick to be worth a file
    monkeypatch.setattr(cost, "_KEPT_S", 0.0)
    first = pass_costs(target, "toy", where=tmp_path)
    assert all(a <= b for a, b in zip(first.points, first.points[1:], strict=False))
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["target"] == "toy"
    known = {"target": "toy", "seconds": {"1": 1e-9, "4": 2e-9, "999": 5.0}, "seq_s": 0.0}
    file.write_text(json.dumps(known))  # from a quieter time
    again = pass_costs(target, "toy", where=tmp_path)
    assert (again.seconds(1), again.seconds(4), again.rows[-1]) == (1e-9, 2e-9, 999)
    known["seconds"] = dict.fromkeys(map(str, again.rows), 1e-9)
    file.write_text(json.dumps(known, indent=1))
    pass_costs(target, "toy", where=tmp_path)
    assert file.read_text() == json.dumps(known, indent=1)  # nothing was faster: it is left alone
    for damaged in ("{}", "[]", "{", '{"seconds": {"a": 1}}'):
        file.write_text(damaged)
        assert pass_costs(target, "toy", where=tmp_path).seconds(1) > 1e-9
    monkeypatch.setattr(cost, "_PATIENCE_S", 0.0)
    assert cost.measure(target).rows == [1, 2]


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_KEPT_S", 0.0)
    (tmp_path / "file").write_text("")
    assert pass_costs(ContextTarget(max_len=40), "toy", where=tmp_path / "file").seconds(1) > 0


def test_what_was_weighed_holds_while_the_same_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 16 steps; not once something was learnt, another request is there or another source drafts."""
    weighed: list[int] = []
    weigh = AcceptanceBudget._weigh

    def noted(self: AcceptanceBudget, seqs: list[Sequence], *rest: object) -> object:
        weighed.append(len(seqs))
        return weigh(self, seqs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(AcceptanceBudget, "_weigh", noted)
    controller = AcceptanceBudget(Source(8, prior=0.001), costs=passes())
    first, second, other = sequence("first"), sequence("second"), Source(8, prior=0.001, grade=1)

    def step(*seqs: Sequence, drafted: tuple[int, ...] = ()) -> int:
        before = len(weighed)
        assert controller.budgets(list(seqs), len(seqs)) == [0] * len(seqs)
        outputs = [
            StepOutput(s.request_id, [], "", None, "", None, SpecStats(steps=2), drafted, ()) for s in seqs
        ]
        controller.observe(outputs, StepTimes(0.0, 1e-4, 0.0, len(seqs)))
        return len(weighed) - before

    assert [step(first) for _ in range(20)] == [1] + [0] * 16 + [1, 0, 0]
    assert [step(first, second), step(first, second), step(first)] == [1, 0, 1]
    first.sources = (other,)
    assert [step(first), step(first)] == [1, 0]
    assert first.source == other
    assert [step(first, drafted=(-1,)), step(first), step(first)] == [0, 1, 0]
