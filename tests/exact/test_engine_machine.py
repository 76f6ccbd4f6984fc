"""The engine driven at random: requests join, leave, wait, lose their cache and share beginnings, and no
answer shows any of it.

FOREDRAFT_THOROUGH=1 runs thousands of histories instead of a hundred.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from exact.history import (
    EOS,
    PROPOSERS,
    SEEN,
    TARGET,
    VOCAB,
    Request,
    check_books,
    check_cache,
    check_counts,
    check_equal,
    check_possible,
    sink_of,
    stored,
    watched,
)
from foredraft.control import AcceptanceBudget, FixedBudget
from foredraft.engine import Engine, EngineConfig, drafter, engine, kv, pool, scheduler, sequence
from foredraft.engine.pool import extend_keys
from foredraft.engine.sequence import Sequence
from foredraft.propose import DraftModelProposer, draft_model
from foredraft.types import SamplingParams, Source, StepOutput

THOROUGH = os.environ.get("FOREDRAFT_THOROUGH") == "1"
MAX_LEN = 40
BLOCK = 4  # small, so that every text crosses many borders between blocks
BEGINNINGS = ([0, 1, 2, 3] * 5, [0, 1, 2, 3, 0, 1, 2, 2] * 3, [3, 3, 1] * 7)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    top_k=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.1]),
    logit_bias=st.sampled_from([{}, {}, {EOS: -100.0, 1: 0.8}]),
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(3, 20),
    min_tokens=st.integers(0, 3),
    stop=st.sampled_from([(), (), ("cab", "dd")]),
    stop_token_ids=st.sampled_from([(), (), (2,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
    reproducible=st.sampled_from([False, False, True]),
    budget=st.sampled_from(["auto", "auto", "auto", *range(8)]),
)


class EngineMachine(RuleBasedStateMachine):
    """One engine and the requests it has."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.inner = PROPOSERS[name]() if name else None
        self.patch = pytest.MonkeyPatch()
        for module in (draft_model, drafter, engine, kv, pool, scheduler, sequence):
            self.patch.setattr(module, "BLOCK", BLOCK)
        self.requests: dict[str, Request] = {}
        self.texts: dict[bytes, list[int]] = {}  # of every block that was ever filled, by key
        SEEN["histories"] += 1

    @initialize(
        failing=st.sampled_from([False, False, True]),
        budget=st.sampled_from(["auto", *range(8)]),
        max_seqs=st.sampled_from([1, 2, 3, 4, 4]),
        more_rows=st.sampled_from([0, 1, 2, 4, 12]),
        blocks=st.integers(8, 14),
    )
    def begin(self, failing: bool, budget: str | int, max_seqs: int, more_rows: int, blocks: int) -> None:
        self.room = min(MAX_LEN, blocks * BLOCK)
        controller = AcceptanceBudget(Source(7)) if isinstance(budget, str) else FixedBudget(budget)
        config = EngineConfig(
            max_seqs=max_seqs,
            max_len=MAX_LEN,
            max_batch_tokens=max_seqs + more_rows,
            kv_tokens=blocks * BLOCK,
        )
        self.proposer = watched(self.inner, failing) if self.inner else None
        self.engine = Engine(
            TARGET,
            self.proposer,
            config=config,
            controller=controller if self.inner else None,
            make_sink=sink_of,
            clock=count(0.0).__next__,  # every time it is asked, a second has passed
        )
        self.pool, self.scheduler = self.engine._kv.pool, self.engine._scheduler

    @property
    def live(self) -> list[Sequence]:
        return list(self.engine._seqs.values())

    def note_texts(self, text: list[int]) -> None:
        keys: list[bytes] = []
        extend_keys(keys, text)
        self.texts |= {key: text[i * BLOCK : (i + 1) * BLOCK] for i, key in enumerate(keys)}

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        shared=st.sampled_from([0, 1, 3, 4, 5, 8, 9, 13, 16, 17, 20]),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        params=PARAMS,
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def add(
        self, beginning: list[int], shared: int, rest: list[int], params: SamplingParams, copies: int
    ) -> None:
        prompt = beginning[:shared] + rest or [0]
        self.note_texts(prompt)
        for number in range(copies):
            one = replace(params, seed=(params.seed or 0) + number)
            self.requests[self.engine.add(prompt, one)] = Request(prompt, one)

    @rule()
    def step(self) -> None:
        ran, waited = set(self.scheduler.running), set(self.scheduler.waiting)
        for output in self.engine.step():
            self.take(output)
        assert self.proposer is None or not self.proposer.errors
        SEEN["steps"] += 1
        sent_away = ran & set(self.scheduler.waiting)
        assert sent_away == set(list(self.scheduler.waiting)[: len(sent_away)])  # first in line
        SEEN["preemptions for room"] += len(sent_away)
        admitted = waited & set(self.scheduler.running)
        SEEN["beginnings shared"] += sum(seq.table.known > 0 and seq.stats.steps < 2 for seq in admitted)

    def take(self, output: StepOutput) -> None:
        request = self.requests[output.request_id]
        request.outputs.append(output)
        text = request.prompt + request.tokens
        self.note_texts(text)
        if output.finish_reason is None:
            seq = self.engine._seqs[output.request_id]
            assert seq.tokens == text
            assert seq.kv_len == len(seq.tokens) - 1
            assert len(seq.table.blocks) <= self.pool.needed(len(seq.tokens))
            return
        assert output.request_id not in self.engine._seqs
        del self.requests[output.request_id]
        check_counts(request)
        check_possible(request, self.room)
        drawn = self.inner is not None and self.inner.needs.draw != "fixed"
        params = request.params
        if drawn and not (params.greedy or params.reproducible or params.budget == 0):
            SEEN["answers drawn from drafts"] += 1
        else:
            check_equal(request, self.room)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 7))
    def cancel(self, place: int) -> None:
        self.engine.cancel(self.live[place % len(self.live)].request_id)

    @precondition(lambda self: self.scheduler.running)
    @rule(place=st.integers(0, 3))
    def preempt(self, place: int) -> None:
        running = self.scheduler.running
        self.scheduler.preempt(running[place % len(running)], self.engine._kv)
        SEEN["preemptions by force"] += 1

    @rule()
    def drain(self) -> None:
        """The oldest request is fed a token a step at least, so nobody starves; and nothing stays behind."""
        patience = 1 + sum(seq.limit for seq in self.live)
        while self.engine.has_work:
            assert patience > 0
            self.step()
            patience -= 1
        assert not self.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.engine.drafter._off
        kept_by = (self.inner, self.engine.drafter.controller)
        for name in ("known", "_indexes", "_states", "_records"):
            assert not any(getattr(owner, name, None) for owner in kept_by)

    @invariant()
    def books_agree(self) -> None:
        check_books(self.pool, [seq.table for seq in self.live])
        if isinstance(self.inner, DraftModelProposer):
            check_books(self.inner._kv.pool, [state.table for state in self.inner._states.values()])
        assert set(self.live) == set(self.scheduler.running) | set(self.scheduler.waiting)
        assert len(self.live) == len(self.scheduler.running) + len(self.scheduler.waiting)
        assert all(not seq.table.blocks and seq.kv_len == 0 for seq in self.scheduler.waiting)

    @invariant()
    def blocks_hold_what_their_owners_believe(self) -> None:
        held = stored(self.engine._kv).view(-1, BLOCK).tolist()
        for key, block in self.pool._block_of.items():
            assert held[block] == self.texts[key]
        for seq in self.scheduler.running:
            check_cache(self.engine._kv, seq.table, seq.tokens[: seq.kv_len])
        if isinstance(self.inner, DraftModelProposer):
            for request_id, state in self.inner._states.items():
                text = self.engine._seqs[request_id].tokens
                check_cache(self.inner._kv, state.table, text[: state.kv_len])

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()
            self.books_agree()
        self.patch.undo()


@pytest.mark.timeout(3600 if THOROUGH else 300)
@pytest.mark.parametrize("name", [None, *PROPOSERS])
def test_no_answer_shows_what_the_engine_went_through(name: str | None) -> None:
    SEEN.clear()
    found = settings(
        max_examples=500 if THOROUGH else 12,
        stateful_step_count=50 if THOROUGH else 30,
        derandomize=not THOROUGH,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: EngineMachine(name), settings=found)
    print(name, *(f"{what}: {number}" for what, number in sorted(SEEN.items())), sep="\n  ")
    met = ["preemptions for room", "preemptions by force", "beginnings shared", "answers compared"]
    if name is not None:
        met += ["planted failures", "accepted"]
    if name not in (None, "same model"):
        met += ["recovered"]
    for what in met:
        assert SEEN[what] > 0, f"no history met {what}"
    assert (SEEN["answers drawn from drafts"] > 0) == (
        name in ("same model", "near model", "lookup or near model")
    )
