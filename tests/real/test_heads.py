"""The drafts that are shipped for SmolLM2 load by name, are right often enough, and change nothing."""

from __future__ import annotations

import json

import pytest

from foredraft import LLM, SamplingParams, zoo
from foredraft.demo import demo_prompts

pytestmark = pytest.mark.real
LENGTH = 24


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", dtype="float32", kv_gb=1)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled", "auto"])
def test_shipped_heads(kind: str, plain: LLM) -> None:
    drafted = LLM("smollm2-135m", kind, dtype="float32", kv_gb=1, budget=6)
    prompts = [prompt.text for prompt in demo_prompts()][:4]
    for params in (
        SamplingParams(temperature=0, max_tokens=LENGTH),
        SamplingParams(temperature=1, seed=1, max_tokens=LENGTH, reproducible=True, repetition_penalty=1.1),
    ):
        wanted, found = plain.generate(prompts, params), drafted.generate(prompts, params)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert drafted.engine.stats.mean_emitted > 1.2
    assert drafted.draft == {"auto": "eagle+suffix"}.get(kind, kind)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_shipped_heads_say_where_they_come_from(kind: str) -> None:
    (path,) = zoo.shipped(kind)
    record = json.loads((path / "provenance.json").read_text(encoding="utf-8"))
    assert record["target"] == "smollm2-135m"
    assert {"command", "options", "versions", "prompts_sha256", "losses", "held_out_accepted_at"} <= set(
        record
    )
