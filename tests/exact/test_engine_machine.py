"""The engine driven at random: requests join, leave, wait, lose their cache and share beginnings, and no
answer shows any of it.

FOREDRAFT_THOROUGH=1 runs thousands of histories instead of a few dozen.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import torch
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
from torch import Tensor

from fakes import ContextTarget, RandomProposer
from foredraft.control import AcceptanceBudget, FixedBudget
from foredraft.engine import Engine, EngineConfig, drafter, engine, kv, scheduler
from foredraft.engine.kv import BlockPool, BlockTable, extend_keys
from foredraft.engine.protocols import Proposer
from foredraft.engine.sequence import Sequence
from foredraft.propose import DraftModelProposer, NgramProposer
from foredraft.sampling import penalize, to_laws
from foredraft.text import TextStream
from foredraft.types import Draft, SamplingParams, StepOutput, Verdict

THOROUGH = os.environ.get("FOREDRAFT_THOROUGH") == "1"
VOCAB, EOS, MAX_LEN = 5, 4, 40
BLOCK = 4  # small, so that every text crosses many borders between blocks
BEGINNINGS = ([0, 1, 2, 3] * 5, [0, 1, 2, 3, 0, 1, 2, 2] * 3, [3, 3, 1] * 7)
TARGET = ContextTarget(VOCAB, eos_ids=[EOS])  # one for all, as it remembers its logits
SEEN: Counter[str] = Counter()  # what the histories of this run have met


class NearTarget(ContextTarget):
    """A draft model with the target's law after two texts of three, and another law after the rest."""

    def logits(self, text: Seq[int]) -> Tensor:
        return TARGET.logits(text) if sum(text) % 3 else super().logits(text)


class Failing:
    """A proposer that now and then raises: before it has drafted, after it has, or after it has learnt."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.needs = inner, inner.needs
        self.generator = torch.Generator().manual_seed(0)

    def _fail(self) -> None:
        if int(torch.randint(12, (1,), generator=self.generator)) == 0:
            SEEN["failures of a proposer"] += 1
            raise RuntimeError("planted")

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self._fail()
        drafts = self.inner.propose(seqs, budgets)
        self._fail()
        return drafts

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        self.inner.observe(seqs, verdicts, hidden)
        self._fail()

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


def draft_model(model: ContextTarget, tree: tuple[int, ...] | None = None) -> Proposer:
    return DraftModelProposer(model, vocab_size=VOCAB, kv_tokens=80, tree=tree)


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "random trees": lambda: RandomProposer(TARGET),
    "random chains": lambda: RandomProposer(TARGET, chain=True),
    "ngram": lambda: NgramProposer(min_size=1),
    "same model": lambda: draft_model(TARGET),
    "near model": lambda: draft_model(NearTarget(VOCAB, seed=1)),
    "near tree": lambda: draft_model(NearTarget(VOCAB, seed=1), (3, 2, 2)),
    "far tree": lambda: draft_model(ContextTarget(VOCAB + 2, seed=1, order=1), (2, 2, 1)),
}
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


class Letters:
    """Stands in for a Detokenizer: token 0 is the letter a, and so on."""

    def added(self, before: int | None, token: int) -> bytes:
        return bytes([ord("a") + token])


def sink_of(params: SamplingParams) -> TextStream:
    return TextStream(Letters(), params.stop, params.min_tokens)  # type: ignore[arg-type]


@dataclass(eq=False)
class Request:
    """A request and all that it was given so far."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[StepOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def logprobs(self) -> list[float]:
        return [entry.logprob for output in self.outputs for entry in output.logprobs or ()]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason


def alone(request: Request, room: int) -> Request:
    """The same request without drafts, in an engine of its own."""
    config = EngineConfig(max_seqs=1, max_len=room, max_batch_tokens=64, kv_tokens=room)
    plain = Engine(TARGET, config=config, make_sink=sink_of)
    plain.add(request.prompt, request.params)
    found = Request(request.prompt, request.params)
    while plain.has_work:
        found.outputs += plain.step()
    return found


def check_counts(request: Request) -> None:
    """Usage is what was emitted, and origins say where each token came from."""
    stats, origins = request.outputs[-1].stats, "".join(output.origins for output in request.outputs)
    assert stats.emitted == len(request.tokens) == len(origins)
    assert stats.accepted == origins.count("a") == sum(stats.accepted_at)
    assert stats.accepted <= stats.levels <= stats.drafted
    if request.params.logprobs is not None:
        assert len(request.logprobs) == len(request.tokens)
    if request.finish_reason == "cancelled":
        assert request.text == "".join(chr(ord("a") + token) for token in request.tokens)
    SEEN["answers: " + str(request.finish_reason)] += 1
    SEEN["accepted"] += stats.accepted
    SEEN["recovered"] += origins.count("r")


def check_equal(request: Request, room: int) -> None:
    """The answer, or what there is of a cancelled one, is that of the request alone."""
    wanted = alone(request, room)
    end = len(request.tokens)
    assert request.tokens == wanted.tokens[:end]
    assert request.logprobs == pytest.approx(wanted.logprobs[:end], abs=1e-5)
    if request.finish_reason != "cancelled":
        assert (end, request.finish_reason) == (len(wanted.tokens), wanted.finish_reason)
        assert request.text == wanted.text
    SEEN["answers compared"] += 1


def check_possible(request: Request, room: int) -> None:
    """Every token is one that the target may say there, and the answer ends where it must and not before."""
    params, text, sink = request.params, list(request.prompt), sink_of(request.params)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else TARGET.eos_ids)}
    ended = False
    for token in request.tokens:
        assert not ended
        output = text[len(request.prompt) :]
        logits = penalize(TARGET.logits(text)[None], params, request.prompt, [output], TARGET.eos_ids)
        assert to_laws(logits, params)[0, token] > 0
        text.append(token)
        ended = sink.push([token]) is not None or token in stops
    limit = min(room, len(request.prompt) + params.max_tokens)
    reason = "stop" if ended else "length" if len(text) == limit else "cancelled"
    assert request.finish_reason == reason
    SEEN["answers drawn from drafts"] += 1


def check_books(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """No block is lost, or owned twice without being shared text."""
    users = Counter(block for table in tables for block in table.blocks)
    assert all(len(set(table.blocks)) == len(table.blocks) for table in tables)
    assert pool._users == [users[block] for block in range(pool.size)]
    assert pool.free == pool._users.count(0)
    assert pool._block_of == {key: block for block, key in pool._key_of.items()}
    assert set(pool._kept) == {block for block in pool._key_of if users[block] == 0}
    assert all(block in pool._key_of for block, owners in users.items() if owners > 1)


class EngineMachine(RuleBasedStateMachine):
    """One engine and the requests it has."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.inner = PROPOSERS[name]() if name else None
        self.patch = pytest.MonkeyPatch()
        for module in (drafter, engine, kv, scheduler):
            self.patch.setattr(module, "BLOCK", BLOCK)
        self.requests: dict[str, Request] = {}
        self.texts: dict[bytes, list[int]] = {}  # of every block that was ever filled, by key
        SEEN["histories"] += 1

    @initialize(
        failing=st.sampled_from([False, False, True]),
        budget=st.sampled_from(["auto", *range(8)]),
        max_seqs=st.sampled_from([1, 2, 3, 4, 4]),
        more_rows=st.integers(0, 12),
        blocks=st.integers(8, 14),
    )
    def begin(self, failing: bool, budget: str | int, max_seqs: int, more_rows: int, blocks: int) -> None:
        self.room = min(MAX_LEN, blocks * BLOCK)
        controller = AcceptanceBudget(longest=7) if isinstance(budget, str) else FixedBudget(budget)
        config = EngineConfig(
            max_seqs=max_seqs,
            max_len=MAX_LEN,
            max_batch_tokens=max_seqs + more_rows,
            kv_tokens=blocks * BLOCK,
        )
        self.engine = Engine(
            TARGET,
            Failing(self.inner) if self.inner and failing else self.inner,
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
        shared=st.integers(0, 20),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=4),
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
        SEEN["steps"] += 1
        SEEN["preemptions for room"] += len(ran & set(self.scheduler.waiting))
        admitted = waited & set(self.scheduler.running)
        SEEN["beginnings shared"] += sum(seq.remembered > 0 and seq.stats.steps < 2 for seq in admitted)

    def take(self, output: StepOutput) -> None:
        request = self.requests[output.request_id]
        request.outputs.append(output)
        text = request.prompt + request.tokens
        self.note_texts(text)
        if output.finish_reason is None:
            seq = self.engine._seqs[output.request_id]
            assert seq.tokens == text
            assert seq.kv_len == len(seq.tokens) - 1
            return
        assert output.request_id not in self.engine._seqs
        del self.requests[output.request_id]
        check_counts(request)
        drawn = self.inner is not None and self.inner.needs.draw != "fixed"
        params = request.params
        if drawn and not (params.greedy or params.reproducible or params.budget == 0):
            check_possible(request, self.room)
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
        slots = self.engine._kv.keys[0][:, 0, 0].nan_to_num(-1).long()
        held = slots.view(-1, BLOCK).tolist()
        for key, block in self.pool._block_of.items():
            assert held[block] == self.texts[key]
        for seq in self.scheduler.running:
            assert slots[seq.table.slot_ids(0, seq.kv_len)].tolist() == seq.tokens[: seq.kv_len]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()
            self.books_agree()
        self.patch.undo()


@pytest.mark.parametrize("name", [None, *PROPOSERS])
def test_no_answer_shows_what_the_engine_went_through(name: str | None) -> None:
    SEEN.clear()
    found = settings(
        max_examples=500 if THOROUGH else 12,
        stateful_step_count=50 if THOROUGH else 30,
        derandomize=not THOROUGH,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: EngineMachine(name), settings=found)
    print(name, *(f"{what}: {number}" for what, number in sorted(SEEN.items())), sep="\n  ")
    met = ["preemptions for room", "preemptions by force", "beginnings shared", "answers compared"]
    if name is not None:
        met += ["failures of a proposer", "accepted"]
    if name not in (None, "same model"):
        met += ["recovered"]
    for what in met:
        assert SEEN[what] > 0, f"no history met {what}"
    assert (SEEN["answers drawn from drafts"] > 0) == (name in ("same model", "near model"))
