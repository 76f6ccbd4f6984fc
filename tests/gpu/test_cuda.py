"""On a CUDA device: every kind of draft gives the text of plain decoding, and nothing leaves the device."""

from __future__ import annotations

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.demo import demo_prompts

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = 48


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", dtype="float32", device="cuda", kv_gb=1)


@pytest.mark.parametrize("draft", ["ngram", "suffix", "medusa", "eagle", "auto"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=LENGTH),
        SamplingParams(temperature=0.8, seed=1, max_tokens=LENGTH, reproducible=True, repetition_penalty=1.1),
    ],
    ids=["greedy", "sampled"],
)
def test_drafts_change_nothing(draft: str, params: SamplingParams, plain: LLM) -> None:
    drafted = LLM("smollm2-135m", draft, dtype="float32", device="cuda", kv_gb=1, budget=6)
    prompts = [prompt.text for prompt in demo_prompts()]
    wanted, found = plain.generate(prompts, params), drafted.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert not drafted.engine.drafter._off  # no draft failed
    assert drafted.engine.stats.accepted > 0
