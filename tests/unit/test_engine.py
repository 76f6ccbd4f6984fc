"""The loop over a fake target whose logits depend on every cached token: any slip in the books changes the
text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from fakes import ContextTarget, RandomProposer
from foredraft.control import AcceptanceBudget, FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.pool import BLOCK
from foredraft.engine.protocols import StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.errors import CapacityError, ConfigError
from foredraft.propose import DraftModelProposer, NgramProposer, SuffixProposer
from foredraft.types import Draft, Needs, SamplingParams, Source, StepOutput, chain

GREEDY = SamplingParams(temperature=0, max_tokens=40)
CONFIG = EngineConfig(max_seqs=4, max_len=512, max_batch_tokens=16, kv_tokens=2048)


def prompt_of(length: int, seed: int, vocab: int = 7) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_greedy(target: ContextTarget, prompt: list[int], length: int) -> list[int]:
    """The definition: argmax, again and again."""
    text = list(prompt)
    for _ in range(length):
        text.append(int(target.logits(text).argmax()))
        if text[-1] in target.eos_ids:
            break
    return text[len(prompt) :]


def drafting(target: ContextTarget, proposer: object, budget: int = 5, **config: int) -> Engine:
    options = {**{name: getattr(CONFIG, name) for name in CONFIG.__slots__}, **config}
    return Engine(
        target,
        proposer,  # type: ignore[arg-type]
        config=EngineConfig(**options),
        controller=FixedBudget(budget),
    )


def run(engine: Engine, limit: int = 10_000) -> dict[str, list[StepOutput]]:
    found: dict[str, list[StepOutput]] = {}
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    assert not engine.has_work
    pool = engine._kv.pool
    assert pool.free == pool.size
    return found


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


PROPOSERS = {
    "random trees": lambda target: RandomProposer(target),
    "random chains": lambda target: RandomProposer(target, chain=True),
    "ngram": lambda target: NgramProposer(min_size=1),
    "suffix": lambda target: SuffixProposer(memory_tokens=1000),
    "same model": lambda target: DraftModelProposer(
        ContextTarget(target.vocab_size, seed=target.seed), vocab_size=target.vocab_size, kv_tokens=4096
    ),
    "other model, tree": lambda target: DraftModelProposer(
        ContextTarget(target.vocab_size + 2, seed=1, order=1),
        vocab_size=target.vocab_size,
        kv_tokens=4096,
        tree=(3, 2, 2),
    ),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_is_the_targets_own(name: str) -> None:
    target = ContextTarget(eos_ids=[3])
    prompts = [prompt_of(length, length) for length in (1, 5, 17, 40, 63, 64, 65, 2, 90)]
    engine = drafting(target, PROPOSERS[name](target))
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    found = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens(found[request_id]) == plain_greedy(target, prompt, 40)
        stats = found[request_id][-1].stats
        assert stats.emitted == len(tokens(found[request_id]))
        assert stats.accepted <= stats.levels <= stats.drafted
        assert sum(stats.accepted_at) == stats.accepted
        assert stats.steps == len(found[request_id])


def test_a_perfect_draft_is_accepted_whole() -> None:
    target = ContextTarget()
    engine = drafting(target, PROPOSERS["same model"](target), budget=4)
    engine.add(prompt_of(6, 1), SamplingParams(temperature=0, max_tokens=50))
    (outputs,) = run(engine).values()
    stats = outputs[-1].stats
    assert stats.accept_rate == 1
    assert stats.steps == 10
    assert stats.mean_emitted == 5
    assert stats.accepted_at == [10] * 4
    assert "".join(output.origins for output in outputs) == "aaaab" * 10


def test_sampling_with_one_seed_gives_one_text_under_matching() -> None:
    """Fixed drafts are verified by matching, so drafting never shows."""
    target = ContextTarget()
    params = SamplingParams(seed=5, max_tokens=60, temperature=1.3, top_p=0.9)
    texts = []
    for proposer in (None, RandomProposer(target), NgramProposer(min_size=1)):
        engine = drafting(target, proposer) if proposer else Engine(target, config=CONFIG)
        engine.add(prompt_of(9, 2), params)
        (outputs,) = run(engine).values()
        texts.append(tokens(outputs))
    assert texts[0] == texts[1] == texts[2]


def test_reproducible_holds_for_drawn_drafts() -> None:
    target = ContextTarget()
    params = SamplingParams(seed=5, max_tokens=60, reproducible=True)
    texts = []
    for proposer in (None, PROPOSERS["same model"](target)):
        engine = drafting(target, proposer) if proposer else Engine(target, config=CONFIG)
        engine.add(prompt_of(9, 2), params)
        (outputs,) = run(engine).values()
        texts.append(tokens(outputs))
    assert texts[0] == texts[1]
    assert outputs[-1].stats.accept_rate == 1  # the same law and the same noise always agree


def test_little_memory_only_makes_requests_wait() -> None:
    """Preempted and resumed requests give the same text as undisturbed ones."""
    target = ContextTarget()
    prompts = [prompt_of(30 + 7 * seed, seed) for seed in range(6)]
    engine = drafting(target, RandomProposer(target), max_len=160, kv_tokens=5 * BLOCK)
    ids = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in prompts]
    found = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens(found[request_id]) == plain_greedy(target, prompt, 60)


def test_requests_join_and_leave_at_any_step() -> None:
    target = ContextTarget()
    engine = drafting(target, RandomProposer(target))
    prompts = {f"r{i}": prompt_of(3 + i, i) for i in range(8)}
    found: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}
    for step in count():
        if step % 2 == 0 and step // 2 < 8:
            engine.add(prompts[f"r{step // 2}"], GREEDY, f"r{step // 2}")
        if step == 9:
            engine.cancel("r2")
            engine.cancel("never heard of")
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            reasons[output.request_id] = output.finish_reason
        if step > 20 and not engine.has_work:
            break
    for request_id, prompt in prompts.items():
        whole = plain_greedy(target, prompt, 40)
        assert found[request_id] == whole[: len(found[request_id])]
        assert reasons[request_id] == ("cancelled" if request_id == "r2" else "length")
    assert engine._kv.pool.free == engine._kv.pool.size
    assert not engine.drafter.proposer.known  # type: ignore[union-attr]


def test_stops_inside_an_accepted_run_cut_text_and_cache_alike() -> None:
    target = ContextTarget()
    prompt = prompt_of(6, 1)
    whole = plain_greedy(target, prompt, 40)
    stop = whole[20]
    wanted = whole[: whole.index(stop) + 1]
    engine = drafting(target, PROPOSERS["same model"](target), budget=7)
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,)))
    (outputs,) = run(engine).values()
    assert tokens(outputs) == wanted
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stats.emitted == len(wanted)


def test_min_tokens_and_ignore_eos() -> None:
    target = ContextTarget(eos_ids=[3])
    prompt = prompt_of(6, 1)
    for proposer in (None, PROPOSERS["same model"](target)):
        engine = drafting(target, proposer) if proposer else Engine(target, config=CONFIG)
        late = engine.add(prompt, SamplingParams(temperature=0, max_tokens=40, min_tokens=30))
        never = engine.add(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        found = run(engine)
        assert 3 not in tokens(found[late])[:29]
        assert len(tokens(found[never])) == 40
        unending = ContextTarget()
        assert tokens(found[never]) == plain_greedy(unending, prompt, 40)


def test_logprobs_are_the_targets_at_every_emitted_token() -> None:
    target = ContextTarget()
    prompt = prompt_of(6, 1)
    engine = drafting(target, RandomProposer(target))
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=30, logprobs=2))
    (outputs,) = run(engine).values()
    text = list(prompt)
    for output in outputs:
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            law = torch.log_softmax(target.logits(text), -1)
            assert entry.token == token
            assert entry.logprob == pytest.approx(float(law[token]), abs=1e-5)
            assert [t for t, _ in entry.top] == law.topk(2).indices.tolist()
            text.append(token)


def test_budget_per_request_overrides_the_controller() -> None:
    target = ContextTarget()
    engine = drafting(target, PROPOSERS["same model"](target), budget=5)
    plain = engine.add(prompt_of(6, 1), SamplingParams(temperature=0, max_tokens=40, budget=0))
    short = engine.add(prompt_of(6, 1), SamplingParams(temperature=0, max_tokens=40, budget=1))
    found = run(engine)
    assert found[plain][-1].stats.drafted == 0
    assert found[short][-1].stats.mean_emitted == 2
    assert tokens(found[plain]) == tokens(found[short])


class Asked:
    """A controller that rests in most steps, and notes in which it was asked."""

    def __init__(self) -> None:
        self.step, self.asked, self.offered = 0, list[int](), list[tuple[int, int]]()

    def rests(self, count: int, batch_tokens: int) -> bool:
        self.offered.append((count, batch_tokens))
        return self.step % 4 != 0

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        self.asked.append(self.step)
        return [3] * len(seqs)

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        self.step += 1


def test_a_controller_that_rests_is_not_asked() -> None:
    """Texts are the same; a request with a budget of its own is asked for all the same."""
    target, controller = ContextTarget(7), Asked()
    engine = Engine(target, RandomProposer(target), config=CONFIG, controller=controller)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = [engine.add([first, 2], params) for first in range(2)]
    found = run(engine)
    assert [tokens(found[request]) for request in ids] == [
        plain_greedy(target, [first, 2], 20) for first in range(2)
    ]
    assert controller.asked == list(range(0, controller.step, 4))
    assert controller.offered[:2] == [(2, 4), (2, 2)]
    controller.asked.clear()
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, budget=0))
    first = controller.step
    run(engine)
    assert controller.asked == list(range(first, controller.step))


def test_a_draft_model_may_be_told_of_steps_before_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    target, controller = ContextTarget(7), Asked()
    controller.step = 1
    model = DraftModelProposer(ContextTarget(7), vocab_size=target.vocab_size, kv_tokens=2048)
    engine = Engine(target, model, config=CONFIG, controller=controller)
    ids = [
        engine.add([first, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for first in range(2)
    ]
    found = run(engine)
    for first, request in enumerate(ids):
        assert tokens(found[request]) == plain_greedy(target, [first, 2], 20)
        assert found[request][-1].stats.accepted > 0
    assert not caplog.records


class Never(AcceptanceBudget):
    """Weighs, and drafts nothing."""

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> list[int]:
        return [0 for _ in super().budgets(seqs, batch_tokens)]


def test_a_request_that_joins_while_nothing_is_drafted() -> None:
    """It may emit and end before anybody asked for its drafts."""
    target, controller = ContextTarget(7), Never(Source(4))
    engine = Engine(target, RandomProposer(target), config=CONFIG, controller=controller)
    for first in range(3):
        engine.add([first, 2], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    found: dict[str, list[int]] = {}
    for number in range(150):
        engine.add([3, number % 7], SamplingParams(temperature=0, max_tokens=1), f"{number}")
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert all(found[f"{number}"] == plain_greedy(target, [3, number % 7], 1) for number in range(150))


def test_context_end_is_length() -> None:
    target = ContextTarget()
    engine = drafting(target, PROPOSERS["same model"](target), max_len=50)
    engine.add(prompt_of(40, 1), SamplingParams(temperature=0, max_tokens=100))
    (outputs,) = run(engine).values()
    assert len(tokens(outputs)) == 10
    assert outputs[-1].finish_reason == "length"


def test_bad_requests_are_refused_at_once() -> None:
    target = ContextTarget()
    engine = Engine(target, config=EngineConfig(max_seqs=2, max_len=20, max_batch_tokens=8, kv_tokens=64))
    with pytest.raises(ConfigError, match="prompt is empty"):
        engine.add([], GREEDY)
    with pytest.raises(CapacityError, match="prompt has 20 tokens"):
        engine.add([1] * 20, GREEDY)
    wrong: list[Any] = [[1.5], ["a"], 3, None, b"ab", {1: 2}, {1, 2}, torch.tensor([[1, 2]])]
    for prompt in wrong:
        with pytest.raises(ConfigError, match="no list of token ids"):
            engine.add(prompt, SamplingParams())
    for params in wrong:
        with pytest.raises(ConfigError, match="give SamplingParams"):
            engine.add([1], params)
    with pytest.raises(ConfigError, match="prompt has token 7, but the model's vocabulary ends at 6"):
        engine.add([1, 7], GREEDY)
    with pytest.raises(ConfigError, match="logit_bias has token 9"):
        engine.add([1], SamplingParams(logit_bias={9: 1.0}))
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        engine.add([1], SamplingParams(stop=("x",)))
    engine.add([1], GREEDY, "a")
    with pytest.raises(ConfigError, match="already running"):
        engine.add([1], GREEDY, "a")
    engine.cancel("a")
    with pytest.raises(ConfigError, match="already running"):  # until that is reported
        engine.add([1], GREEDY, "a")
    assert [output.finish_reason for output in engine.step()] == ["cancelled"]
    engine.add([1], GREEDY, "a")
    with pytest.raises(ConfigError, match="max_batch_tokens=1"):
        EngineConfig(max_seqs=2, max_batch_tokens=1)
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        Engine(ContextTarget(max_len=10), config=CONFIG)


class CountingTarget(ContextTarget):
    """Counts the rows that every pass feeds."""

    rows = 0

    def forward(self, batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        self.rows += len(batch.token_ids)
        return super().forward(batch, kv, hidden_layers)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_equal_beginnings_are_fed_once(prefix_cache: bool) -> None:
    target = CountingTarget()
    prompt = prompt_of(3 * BLOCK + 5, 1)
    options = {**{name: getattr(CONFIG, name) for name in CONFIG.__slots__}, "prefix_cache": prefix_cache}
    engine = Engine(target, config=EngineConfig(**options))
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = [engine.add(prompt, params) for _ in range(3)]
    found = run(engine)
    again = engine.add([*prompt, 1, 2], params)  # a later turn of the same conversation
    found |= run(engine)
    for request_id in ids:
        assert tokens(found[request_id]) == plain_greedy(target, prompt, 4)
    assert tokens(found[again]) == plain_greedy(target, [*prompt, 1, 2], 4)
    once, decoded = len(prompt), 4 * 3
    shared = once + 2 * 5 + 7 if prefix_cache else 4 * once + 2
    assert target.rows == shared + decoded


class FailingProposer(RandomProposer):
    """Raises for one request, when asked what could draft, to draft, or when told what became of a draft."""

    def __init__(self, target: ContextTarget, method: str) -> None:
        super().__init__(target)
        self.method = method

    def fail(self, *_: Any) -> None:
        raise RuntimeError("planted")

    def _fail(self, method: str, seqs: Any) -> None:
        if method == self.method and any(seq.request_id == "bad" and len(seq.output) > 5 for seq in seqs):
            raise RuntimeError("planted")

    def sources(self, seq: Any) -> tuple[Source, ...]:
        self._fail("sources", [seq])
        return (Source(4),)

    def propose(self, seqs: Any, budgets: Any) -> Any:
        self._fail("propose", seqs)
        return super().propose(seqs, budgets)

    def observe(self, seqs: Any, verdicts: Any, hidden: Any) -> None:
        self._fail("observe", seqs)
        super().observe(seqs, verdicts, hidden)


class Closing(RandomProposer):
    """Cancels requests while a step runs, as a stream does that is closed when garbage is collected."""

    def propose(self, seqs: Any, budgets: Any) -> Any:
        if any(len(seq.output) == 5 for seq in seqs):
            for name in ("first", "second"):
                self.engine.cancel(name)
        return super().propose(seqs, budgets)

    engine: Engine


def test_requests_may_be_cancelled_while_a_step_runs() -> None:
    target = ContextTarget(vocab_size=7)
    proposer = Closing(target)
    proposer.engine = engine = drafting(target, proposer, budget=1)
    for first, name in enumerate(("first", "second", "third")):
        engine.add([first, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), name)
    found = run(engine)
    assert [found[name][-1].finish_reason for name in ("first", "second")] == ["cancelled"] * 2
    assert tokens(found["third"]) == plain_greedy(target, [2, 2], 20)


def test_what_was_cancelled_is_reported_though_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ContextTarget(vocab_size=7)
    engine = Engine(target, config=CONFIG)
    for name in ("request-0", None):  # a caller's own id is not given again
        engine.add([1, 2], GREEDY, name)
    engine.cancel("request-0")
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", FailingProposer(target, "").fail)
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
    (gone, *_) = engine.step()
    assert (gone.request_id, gone.finish_reason) == ("request-0", "cancelled")


LAWS = torch.full((2, 7), 1 / 7)
WRONG: dict[str, Any] = {
    "a draft has 6 nodes, and the budget was 5": chain([1] * 6),
    "the tokens [1, -1]": chain([1, -1]),
    "the tokens [7]": chain([7]),
    "the tokens [1.0]": Draft(torch.tensor([1.0]), (-1,)),
    "the tokens [[1]]": Draft(torch.tensor([[1]]), (-1,)),
    "float32 (1, 7), not float (2, 7)": chain([1], LAWS[:1], "iid"),
    "float32 (2, 6), not float (2, 7)": chain([1], LAWS[:, 1:], "distinct"),
    "int64 (2, 7), not float (2, 7)": chain([1], LAWS.long(), "iid"),
    "levels that are left": None,  # made below
    "'list' object has no attribute": [1, 2],
}


class Wrong(RandomProposer):
    """Drafts for one request what no step can verify, a while after it began."""

    draft: Any = None

    def _one(self, seq: Sequence, budget: int) -> Any:
        if seq.request_id != "bad" or len(seq.output) < 6:
            return super()._one(seq, budget)
        if self.draft is None:
            near = seq.levels_left < budget
            return chain([1] * (seq.levels_left + 1)) if near else super()._one(seq, 1)
        return self.draft


@pytest.mark.parametrize("fault", WRONG)
def test_a_draft_that_cannot_be_verified_is_a_proposers_failure(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = ContextTarget(vocab_size=7)
    proposer = Wrong(target)
    proposer.draft = WRONG[fault]
    engine = drafting(target, proposer)
    prompts = {"bad": [1, 2], "good": [2, 3]}
    for request_id, prompt in prompts.items():
        engine.add(prompt, GREEDY, request_id)
    found = run(engine)
    for request_id, prompt in prompts.items():
        assert tokens(found[request_id]) == plain_greedy(target, prompt, 40)
    (record,) = caplog.records
    assert record.getMessage().startswith("bad goes on without drafts: the proposer failed: ")
    assert fault in record.getMessage()
    assert found["good"][-1].stats.accepted > 0


class FailingController(Asked):
    """Fails in one way at its eighth step, or when it is to forget."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def _fail(self, way: str) -> None:
        if way == self.way and (self.step >= 8 or way == "forget"):
            raise RuntimeError("planted")

    def rests(self, count: int, batch_tokens: int) -> bool:
        self._fail("rests")
        return False

    def budgets(self, seqs: Seq[Sequence], batch_tokens: int) -> Any:
        self._fail("budgets")
        wrong = {"too few": [3], "negative": [-1] * len(seqs), "no number": [None] * len(seqs)}
        return wrong.get(self.way, [3] * len(seqs)) if self.step >= 8 else [3] * len(seqs)

    def observe(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        super().observe(outputs, times)
        self._fail("observe")

    def forget(self, request_id: str) -> None:
        self._fail("forget")


@pytest.mark.parametrize("way", ["rests", "budgets", "too few", "negative", "no number", "observe", "forget"])
def test_a_failing_controller_ends_drafting_and_nothing_else(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = ContextTarget(eos_ids=[3])
    controller = FailingController(way)
    engine = Engine(target, RandomProposer(target), config=CONFIG, controller=controller)
    prompts = [prompt_of(length, length) for length in (1, 5, 17, 40, 63, 2)]
    ids = [engine.add(prompt, replace(GREEDY, ignore_eos=True)) for prompt in prompts]
    found = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens(found[request_id]) == plain_greedy(ContextTarget(), prompt, 40)
    assert found[ids[0]][-1].stats.accepted > 0
    if way == "forget":
        assert "FailingController failed to forget request-0: RuntimeError('planted')" in caplog.text
    else:
        (record,) = caplog.records
        assert record.getMessage().startswith("no request is drafted for any more: the controller failed: ")
        assert found[ids[-1]][-1].stats.drafted == 0


def test_an_engine_needs_no_more_than_a_target() -> None:
    """Outputs keep the counts of their step; the engine's own seconds are those of its steps."""
    target, clock = ContextTarget(7), count(0.0)
    engine = Engine(target, clock=lambda: next(clock))
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), "one")
    assert [output.stats.emitted for output in run(engine)["one"]] == [1, 2, 3, 4, 5]
    stats = engine.stats
    assert stats.total_s == stats.prompt_s + stats.draft_s + stats.target_s + stats.other_s > 0


@pytest.mark.parametrize(
    ("method", "beside"), [("sources", 40), ("sources", 3), ("propose", 40), ("observe", 40)]
)
def test_a_failing_proposer_is_switched_off(
    method: str, beside: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = ContextTarget()
    engine = drafting(target, FailingProposer(target, method))
    prompts = {"good": (prompt_of(6, 1), beside), "bad": (prompt_of(7, 2), 40)}
    for request_id, (prompt, length) in prompts.items():
        engine.add(prompt, replace(GREEDY, max_tokens=length), request_id)
    found = run(engine)
    for request_id, (prompt, length) in prompts.items():
        assert tokens(found[request_id]) == plain_greedy(target, prompt, length)
    assert "bad goes on without drafts: the proposer failed: RuntimeError('planted')" in caplog.text
    assert not engine.drafter.proposer.known  # type: ignore[union-attr]


class HiddenReader(RandomProposer):
    """Keeps the hidden states it is shown, which in the fake are the tokens of their positions."""

    def __init__(self, target: ContextTarget) -> None:
        super().__init__(target)
        self.needs = Needs(hidden_layers=(0, 3))
        self.read: dict[str, dict[int, int]] = {}

    def observe(self, seqs: Any, verdicts: Any, hidden: Any) -> None:
        for seq, verdict, (first, second) in zip(seqs, verdicts, hidden, strict=True):
            assert torch.equal(first + 3, second)
            read = self.read.setdefault(seq.request_id, {})
            read |= zip(range(seq.kv_len - len(first), seq.kv_len), first[:, 0].long().tolist(), strict=True)
            assert read == dict(enumerate(seq.tokens[: seq.kv_len]))
            assert seq.tokens[seq.kv_len] == verdict.next_token or len(seq.tokens) == seq.limit


def test_a_proposer_reads_the_hidden_states_of_every_position() -> None:
    target = ContextTarget(vocab_size=7, seed=3)
    proposer = HiddenReader(target)
    engine = drafting(target, proposer, max_batch_tokens=8)
    for number, length in enumerate((3, 40, 21, 70)):
        engine.add(prompt_of(length, number), GREEDY)
    found = run(engine)
    assert engine.stats.accepted > 0
    assert all(len(read) >= 3 for read in proposer.read.values())
    assert len(proposer.read) == len(found) == 4
