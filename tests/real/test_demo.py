"""The demo on the default model: drafting changes no answer, ties of bfloat16 apart."""

from __future__ import annotations

import pytest

from foredraft import LLM, SamplingParams
from foredraft.demo import demo_prompts, mean_speedup, run_demo

pytestmark = pytest.mark.real
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_drafted_answers_are_those_of_plain_decoding(dtype: str) -> None:
    llm = LLM("smollm2-135m", draft="ngram", dtype=dtype, budget=5, max_seqs=8, prefix_cache=False)
    edits = [entry for entry in demo_prompts() if entry.category == "code edit"]
    pairs = run_demo(llm, edits, GREEDY, lambda pair: None)
    wrong = [pair.comparison.why for pair in pairs if pair.comparison.identical == "NO"]
    assert wrong == []
    if llm.dtype == "float32":
        assert all(pair.comparison.identical == "yes" for pair in pairs)
    assert sum(pair.drafted.stats.accepted for pair in pairs) > 0
    found = mean_speedup(pairs)
    assert 0 < found.low <= found.mean <= found.high
