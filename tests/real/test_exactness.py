"""All that a request is given is what plain decoding gives, on SmolLM2 in float32: a small version of
benchmarks/exactness.py, with requests that arrive at random, are cancelled, wait and are preempted.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from arrivals import Model, Request, serve
from decode import load
from exactness import BATCHES, BUDGETS, LONGEST, alone, asked, judge, requests_of

from foredraft import zoo

pytestmark = pytest.mark.real
PROMPTS, LENGTH, NOISE = 12, 12, 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    zoo.pull("smollm2-135m")
    return Model.load("smollm2-135m", tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def plain(model: Model) -> list[Request]:
    return [alone(model, r, LENGTH) for r in requests_of(model, load(None, 0), PROMPTS, LENGTH)]


@pytest.mark.parametrize("draft", BUDGETS)
def test_no_draft_changes_an_answer(draft: str, model: Model, plain: list[Request]) -> None:
    dice, longest = random.Random(1), LONGEST + LENGTH
    wanted = {request.name: request for request in plain}
    answers: list[Request] = []
    for batch in BATCHES:
        room = max(longest, batch * longest // 6)
        engine = model.engine(draft, max_seqs=batch, max_len=longest, kv_tokens=room)
        some = asked(plain, draft, batch, dice)
        serve(engine, some, batch, dice)
        answers += some
    verdicts = [judge(model, wanted[answer.name], answer, NOISE) for answer in answers]
    assert [verdict for verdict in verdicts if verdict[0] == "DIFFERENT"] == []
    assert {answer.setting for answer in answers} == {request.setting for request in plain}
    assert any(answer.end == "cancelled" for answer in answers)
    assert sum(answer.outputs[-1].stats.accepted for answer in answers) > 0
    assert sum(answer.preempted for answer in answers) > 0


def test_the_judge_sees_what_is_planted(model: Model, plain: list[Request]) -> None:
    wanted = next(request for request in plain if request.setting == "greedy")
    assert judge(model, wanted, wanted, NOISE) == ("equal", "")
    last = wanted.outputs[-1]
    assert last.logprobs is not None
    (entry,) = last.logprobs
    for name, fault in {
        "length": replace(last, token_ids=[], logprobs=[]),
        "end": replace(last, finish_reason="stop"),
        "text": replace(last, text=last.text + " "),
        "logprobs": replace(last, logprobs=[replace(entry, logprob=entry.logprob - 2e-4)]),
        "usage": replace(last, stats=replace(last.stats, emitted=last.stats.emitted + 1)),
    }.items():
        verdict, why = judge(model, wanted, replace(wanted, outputs=[*wanted.outputs[:-1], fault]), NOISE)
        assert verdict == "DIFFERENT"
        assert name in why
    other = replace(last, token_ids=[(last.token_ids[0] + 1) % model.target.vocab_size])
    got = replace(wanted, outputs=[*wanted.outputs[:-1], other])
    assert judge(model, wanted, got, NOISE)[0] == "DIFFERENT"
