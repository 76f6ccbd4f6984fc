"""Bugs that other engines shipped, tried here on a target whose right answer is known token by token.

The table in docs/exactness.md says which engine had which, and names the test that would catch it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import ContextTarget, RandomProposer
from foredraft import LLM
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.protocols import Proposer
from foredraft.propose import DraftModelProposer, NgramProposer, SuffixProposer
from foredraft.sampling import Noise, draw, to_laws
from foredraft.types import SamplingParams, StepOutput
from tiny_tokenizers import build_chat_model

ROOT = Path(__file__).parents[2]
VOCAB, EOS, BUDGET = 7, 3, 5
PROMPT = [5, 1, 1, 4, 0, 5, 2]
CONFIG = EngineConfig(max_seqs=8, max_len=256, max_batch_tokens=64, kv_tokens=2048)


def same_model() -> Proposer:
    """Guesses right whenever it sees the same law, so that steps accept whole runs."""
    return DraftModelProposer(ContextTarget(VOCAB), vocab_size=VOCAB, kv_tokens=2048)


def other_tree() -> Proposer:
    other = ContextTarget(VOCAB + 2, seed=1, order=1)
    return DraftModelProposer(other, vocab_size=VOCAB, kv_tokens=2048, tree=(3, 2, 2))


DRAFTERS: dict[str, Callable[[], Proposer]] = {
    "same model": same_model,
    "other model, tree": other_tree,
    "random trees": lambda: RandomProposer(ContextTarget(VOCAB)),
    "ngram": lambda: NgramProposer(min_size=1),
    "suffix": lambda: SuffixProposer(),
}
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


def engine_of(drafter: str | None, config: EngineConfig = CONFIG, eos_ids: tuple[int, ...] = ()) -> Engine:
    target = ContextTarget(VOCAB, eos_ids=eos_ids, max_len=config.max_len)
    if drafter is None:
        return Engine(target, config=config)
    return Engine(target, DRAFTERS[drafter](), config=config, controller=FixedBudget(BUDGET))


def run(engine: Engine) -> dict[str, list[StepOutput]]:
    found: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def answer(engine: Engine, params: SamplingParams) -> list[StepOutput]:
    engine.add(PROMPT, params, "r")
    return run(engine)["r"]


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def scores(text: list[int], params: SamplingParams, eos_ids: tuple[int, ...]) -> Tensor:
    """What decides the token after `text`: penalties, min_tokens and bias written out, number by number."""
    output, found = text[len(PROMPT) :], ContextTarget(VOCAB).logits(text).clone()
    for token in set(text):
        factor = params.repetition_penalty
        found[token] = found[token] * factor if found[token] < 0 else found[token] / factor
    for token in set(output):
        found[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        found[[*eos_ids, *params.stop_token_ids]] = -torch.inf
    for token, bias in params.logit_bias.items():
        found[token] += bias
    return found


def plain(params: SamplingParams, eos_ids: tuple[int, ...] = ()) -> list[int]:
    """The definition of the answer: one token after another, each from its own history."""
    cuts = ("temperature", "top_k", "top_p", "min_p")
    warp = SamplingParams(**{name: getattr(params, name) for name in cuts})
    noise, text = Noise(params.seed or 0), list(PROMPT)
    for _ in range(params.max_tokens):
        law = to_laws(scores(text, params, eos_ids), warp)
        text.append(int(law.argmax()) if params.greedy else draw(law, noise, len(text)))
        if text[-1] in (*eos_ids, *params.stop_token_ids):
            break
    return text[len(PROMPT) :]


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {2: 2.5, 4: -100.0}},
    "min_tokens": {"min_tokens": 14, "stop_token_ids": (0, EOS)},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.4,
        "logit_bias": {6: 1.5},
        "min_tokens": 10,
        "stop_token_ids": (EOS,),
    },
}
WARPERS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.35},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 2, "temperature": 1.4},
}


@every_drafter
@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_processors_see_every_token_of_an_accepted_run(name: str, drafter: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, **PROCESSORS[name])
    outputs = answer(engine_of(drafter), params)
    assert tokens_of(outputs) == plain(params)
    bare = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=params.stop_token_ids)
    assert tokens_of(outputs) != plain(bare)  # the processor matters here
    if drafter == "same model":
        assert outputs[-1].stats.mean_emitted > 3


@every_drafter
@pytest.mark.parametrize("name", [*PROCESSORS, *WARPERS])
def test_sampled_processors_see_every_token_of_an_accepted_run(name: str, drafter: str) -> None:
    options = {**PROCESSORS, **WARPERS}[name]
    params = SamplingParams(seed=4, max_tokens=30, reproducible=True, **options)
    outputs = answer(engine_of(drafter), params)
    assert tokens_of(outputs) == plain(params)
    if drafter == "same model":
        assert outputs[-1].stats.mean_emitted > 3


@pytest.mark.parametrize("name", WARPERS)
def test_rejection_emits_nothing_that_a_cut_forbids(name: str) -> None:
    """The drafted runs of a smaller model, kept or not, and what replaces them."""
    options, origins = WARPERS[name], ""
    for seed in range(10):
        proposer = DraftModelProposer(ContextTarget(VOCAB, seed=9), vocab_size=VOCAB, kv_tokens=2048)
        engine = Engine(ContextTarget(VOCAB), proposer, config=CONFIG, controller=FixedBudget(BUDGET))
        outputs, text = answer(engine, SamplingParams(seed=seed, max_tokens=30, **options)), list(PROMPT)
        for token in tokens_of(outputs):
            assert to_laws(ContextTarget(VOCAB).logits(text), SamplingParams(**options))[token] > 0
            text.append(token)
        origins += "".join(output.origins for output in outputs)
    assert {"a", "r", "b"} == set(origins)


@every_drafter
@pytest.mark.parametrize("by", ["eos", "stop id"])
def test_min_tokens_counts_tokens_not_steps(drafter: str, by: str) -> None:
    """The ending token is by far the likeliest; it comes as soon as it may, after 9 others."""
    eos_ids, stops = ((EOS,), ()) if by == "eos" else ((), (EOS,))
    params = SamplingParams(
        temperature=0, max_tokens=40, min_tokens=9, logit_bias={EOS: 100.0}, stop_token_ids=stops
    )
    outputs = answer(engine_of(drafter, eos_ids=eos_ids), params)
    assert tokens_of(outputs) == plain(params, eos_ids)
    assert tokens_of(outputs).index(EOS) == 9
    assert outputs[-1].finish_reason == "stop"


@every_drafter
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_stop_id_in_an_accepted_run_is_seen_whatever_max_tokens_cuts(drafter: str, max_tokens: int) -> None:
    whole = plain(SamplingParams(temperature=0, max_tokens=14))
    place = next(i for i in range(3, 14) if whole[i] not in whole[:i])  # inside the first run of guesses
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=(whole[place],))
    outputs = answer(engine_of(drafter), params)
    assert tokens_of(outputs) == whole[: min(max_tokens, place + 1)]
    assert outputs[-1].finish_reason == ("stop" if max_tokens > place else "length")


@every_drafter
def test_one_token_is_answered_without_a_draft(drafter: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    (output,) = answer(engine_of(drafter), params)
    assert output.token_ids == plain(params)
    assert output.finish_reason == "length"
    assert output.logprobs is not None
    assert len(output.logprobs) == 1
    assert output.stats.drafted == 0


@every_drafter
@pytest.mark.parametrize("room", range(1, 9))
def test_drafts_end_where_the_context_ends(drafter: str, room: int) -> None:
    """Every token that fits is emitted, none is fed at a position that the model does not have."""
    length = len(PROMPT) + room
    engine = engine_of(drafter, EngineConfig(max_seqs=1, max_len=length, max_batch_tokens=64, kv_tokens=64))
    forward, deepest = engine.target.forward, 0

    def watched(batch: Any, *rest: Any) -> Any:
        nonlocal deepest
        deepest = max(deepest, int(batch.positions.max()))
        return forward(batch, *rest)

    engine.target.forward = watched  # type: ignore[method-assign]
    outputs = answer(engine, SamplingParams(temperature=0, max_tokens=100))
    assert tokens_of(outputs) == plain(SamplingParams(temperature=0, max_tokens=room))
    assert outputs[-1].finish_reason == "length"
    assert deepest < length


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"reproducible": True}], ids=str)
def test_accepted_guesses_carry_the_targets_own_logprob(options: dict[str, Any]) -> None:
    """Raw and before any processor, although these decide what is emitted."""
    processors = {"frequency_penalty": 0.5, "logit_bias": {2: 0.5}, "top_k": 4}
    params = SamplingParams(seed=1, max_tokens=30, logprobs=3, **processors, **options)
    outputs, text = answer(engine_of("same model"), params), list(PROMPT)
    for output in outputs:
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            logs = torch.log_softmax(ContextTarget(VOCAB).logits(text), -1)
            assert entry.token == token
            assert entry.logprob == pytest.approx(float(logs[token]), abs=1e-5)
            assert entry.logprob < 0
            assert [top for top, _ in entry.top] == logs.topk(3).indices.tolist()
            text.append(token)
    assert sum(output.origins.count("a") for output in outputs) > 15


@every_drafter
def test_usage_is_what_was_emitted(drafter: str) -> None:
    """For answers that end by a stop inside a run, by length and by cancelling."""
    whole = plain(SamplingParams(temperature=0, max_tokens=14))
    engine = engine_of(drafter)
    stop = next(token for i, token in enumerate(whole) if i > 2 and token not in whole[:i])
    engine.add(PROMPT, SamplingParams(temperature=0, stop_token_ids=(stop,)), "stop")
    engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=11), "length")
    engine.add(PROMPT, SamplingParams(temperature=0), "cancelled")
    first = engine.step() + engine.step()
    engine.cancel("cancelled")
    found = run(engine)
    for name in ("stop", "length", "cancelled"):
        outputs = [output for output in first if output.request_id == name] + found.get(name, [])
        stats = outputs[-1].stats
        assert outputs[-1].finish_reason == name
        assert stats.emitted == len(tokens_of(outputs))
        assert len("".join(output.origins for output in outputs)) == stats.emitted
        assert (
            sum(output.origins.count("a") for output in outputs) == stats.accepted == sum(stats.accepted_at)
        )
        assert stats.accepted <= stats.levels <= stats.drafted
    emitted = len(tokens_of(first)) + sum(map(len, map(tokens_of, found.values())))
    assert engine.stats.emitted == emitted


@every_drafter
def test_one_requests_parameters_never_change_the_next(drafter: str) -> None:
    """Alone, one after another under one name, and all together: the same answers by the same steps."""
    every = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(seed=1, max_tokens=9, logit_bias={2: 5.0}, budget=0),
        SamplingParams(seed=1, max_tokens=25, repetition_penalty=1.8, min_tokens=20),
        SamplingParams(seed=2, max_tokens=12, temperature=1.9, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=20, top_k=2, stop_token_ids=(6,), budget=2),
        SamplingParams(temperature=0, max_tokens=20, presence_penalty=-1.5),
        SamplingParams(seed=1, max_tokens=20, reproducible=True, min_p=0.3),
    ]

    def steps(outputs: list[StepOutput]) -> list[tuple[int, ...]]:
        if drafter == "random trees":  # other guesses every time
            return [tuple(tokens_of(outputs))]
        return [tuple(output.token_ids) for output in outputs]

    alone = [steps(answer(engine_of(drafter, eos_ids=(EOS,)), params)) for params in every]
    engine = engine_of(drafter, eos_ids=(EOS,))
    assert [steps(answer(engine, params)) for params in every] == alone
    requests = [engine.add(PROMPT, params) for params in every]
    found = run(engine)
    assert [steps(found[request]) for request in requests] == alone


def test_the_drafts_cache_counts_when_memory_is_planned(tmp_path: Path) -> None:
    model = build_chat_model(tmp_path)
    alone, drafted = LLM(model, kv_gb=5e-5), LLM(model, model, kv_gb=5e-5)
    assert 1 < drafted.max_len == alone.max_len // 2


# The table


def page() -> str:
    return (ROOT / "docs/exactness.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page())
    assert len(named) > 40
    for file, name in named:
        path = ROOT / file if file.startswith("benchmarks/") else ROOT / "tests" / file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, f"{file} has no {name}"


def test_every_bug_has_a_test_or_a_reason() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 26))
    for _, source, bug, here in rows:
        assert re.fullmatch(r"[\w.-]+#\d+", source)
        assert bug
        assert "::" in here or re.match(r"not yet: |cannot apply: ", here), source
