"""Greedy text in float32 is what transformers' own generate says, on SmolLM2, for all drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality import judge, reference, truncated_copy

from foredraft import LLM, SamplingParams, zoo
from foredraft.demo import demo_prompts
from foredraft.text import encode_chat

pytestmark = pytest.mark.real
LENGTH = 24


@pytest.fixture(scope="module")
def path() -> Path:
    return zoo.resolve("smollm2-135m")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cases(path: Path, model: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": p.text}]) for p in demo_prompts()[::2]]
    return [(prompt, reference(model, prompt, LENGTH)) for prompt in prompts]


@pytest.fixture(scope="module")
def draft(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return truncated_copy(path, tmp_path_factory.mktemp("draft"), 8)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ["plain", "ngram", "chain", "tree"])
def test_text_is_the_targets_own(
    kind: str, batch: int, model: Any, cases: list[tuple[list[int], list[int]]], draft: Path
) -> None:
    names = {"plain": None, "ngram": "ngram", "chain": draft, "tree": draft}
    tree = (3, 2, 2) if kind == "tree" else None
    llm = LLM("smollm2-135m", names[kind], dtype="float32", max_seqs=batch, max_len=1024, tree=tree)
    answers = llm.generate([p for p, _ in cases], SamplingParams(temperature=0, max_tokens=LENGTH))
    verdicts = [
        judge(model, prompt, wanted, answer.token_ids, noise=1e-3)
        for (prompt, wanted), answer in zip(cases, answers, strict=True)
    ]
    assert "DIFFERENT" not in verdicts
    if kind != "plain":
        assert sum(answer.stats.drafted for answer in answers) > 0
