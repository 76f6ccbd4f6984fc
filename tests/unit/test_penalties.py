"""Penalties, min_tokens, bias: against Hugging Face's processors, and against loops over single numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from foredraft import sampling
from foredraft.errors import ConfigError
from foredraft.sampling import penalize, to_laws
from foredraft.types import SamplingParams

examples = settings(max_examples=150, derandomize=True)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_no_penalty_returns_the_very_same_tensor() -> None:
    logits = random_logits(2, 10)
    assert penalize(logits, SamplingParams(), [1], [[2], [3]], [0]) is logits
    assert penalize(logits, SamplingParams(min_tokens=1), [1], [[2], [3]], [0]) is logits
    assert sampling.add_bias(logits, SamplingParams()) is logits
    assert not sampling.needs_history(SamplingParams(top_k=3, logit_bias={1: 2.0}), 0)
    for options in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"min_tokens": 1}):
        assert sampling.needs_history(SamplingParams(**options), 0)
    assert sampling.needs_history(SamplingParams(frequency_penalty=-0.1), 5)
    assert not sampling.needs_history(SamplingParams(min_tokens=5), 5)


def test_repetition_penalty_is_that_of_hugging_face() -> None:
    logits, prompt = random_logits(3, 50), [3, 3, 7, 49]
    outputs = [[1, 1, 7], [1, 1, 7, 20], []]
    found = penalize(logits, SamplingParams(repetition_penalty=1.3), prompt, outputs, [0])
    for row, output in enumerate(outputs):
        ids = torch.tensor([prompt + output])
        expected = hf.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], expected)


@examples
@given(
    outputs=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.sampled_from([1.0, 0.7, 1.5]),
)
def test_penalties_follow_each_rows_own_history(
    outputs: list[list[int]], presence: float, frequency: float, repetition: float
) -> None:
    """Against a loop over single numbers."""
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    logits, prompt = random_logits(len(outputs), 10), [2, 2, 5]
    before = logits.clone()
    found = penalize(logits, params, prompt, outputs, [0])
    assert torch.equal(logits, before)
    for row, output in enumerate(outputs):
        for token in range(10):
            score = float(logits[row, token])
            if token in prompt + output:
                score = score * repetition if score < 0 else score / repetition
            if token in output:
                score -= frequency * output.count(token) + presence
            assert float(found[row, token]) == pytest.approx(score, abs=1e-5)


def test_min_tokens_bans_what_would_end_the_answer_row_by_row() -> None:
    logits, outputs = random_logits(3, 10), [[4], [4, 4], [4, 4, 4]]
    params = SamplingParams(min_tokens=3, stop_token_ids=(6, 10), logit_bias={2: 100.0})
    found = sampling.add_bias(penalize(logits, params, [1], outputs, [2]), params)
    for row, banned in enumerate([True, True, False]):
        for token in (2, 6):
            assert (float(found[row, token]) == -torch.inf) == banned
    assert torch.isfinite(found).sum() == 30 - 4
    laws = to_laws(penalize(logits, params, [1], outputs, [2]), params)
    assert laws[:2, [2, 6]].sum() == 0


def test_an_eos_that_ends_nothing_is_not_banned() -> None:
    params = SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=(6,))
    found = penalize(random_logits(1, 10), params, [1], [[]], [2])
    assert torch.isinf(found[0]).nonzero().flatten().tolist() == [6]


def test_prompt_ids_beyond_the_head_are_ignored() -> None:
    logits, params = random_logits(1, 10), SamplingParams(repetition_penalty=2.0)
    for beyond in (10, 12):
        found = penalize(logits, params, [3, beyond], [[]], [])
        assert torch.equal(found, penalize(logits, params, [3], [[]], []))


@pytest.mark.parametrize("options", [{"presence_penalty": 1.0}, {"min_tokens": 2}], ids=str)
def test_penalized_logits_are_float32(options: dict[str, float]) -> None:
    logits = random_logits(1, 10).bfloat16()
    assert penalize(logits, SamplingParams(**options), [1], [[2]], [0]).dtype == torch.float32
    assert sampling.add_bias(logits, SamplingParams(logit_bias={1: 0.1})).dtype == torch.float32


def test_processors_run_in_order_and_in_float32() -> None:
    """Penalty before bias before temperature before the cuts."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]]).bfloat16()
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 0.5}, temperature=0.5, top_k=2)
    laws = to_laws(penalize(logits, params, [0], [[]], []), params)
    torch.testing.assert_close(laws, torch.softmax(torch.tensor([[2.0, 3.0, -torch.inf, -torch.inf]]), -1))
    assert laws.dtype == torch.float32


def test_a_bias_leaves_the_logits_it_was_given() -> None:
    """Log-probabilities are read from them afterwards."""
    logits = random_logits(2, 10)
    before = logits.clone()
    biased = sampling.add_bias(logits, SamplingParams(logit_bias={3: 1.0, 4: -2.0}))
    assert torch.equal(logits, before)
    assert (biased - before)[:, [3, 4]].flatten().tolist() == pytest.approx([1, -2, 1, -2], abs=1e-5)


def test_a_bias_on_many_tokens_is_laid_out_once() -> None:
    """And anew for another vocabulary, such as a draft's; in the logits' own precision nothing is rounded."""
    params = SamplingParams(logit_bias={token: token / 8 for token in range(0, 80, 3)})
    for vocab in (80, 90):
        logits = random_logits(3, vocab).bfloat16()
        wanted = logits.float()
        for token, bias in params.logit_bias.items():
            wanted[:, token] += bias
        assert torch.equal(sampling.add_bias(logits, params), wanted)
        row = params.bias_row(vocab, logits.device)
        assert params.bias_row(vocab, logits.device) is row


@pytest.mark.parametrize("token", [10, 12])
def test_a_bias_on_a_token_that_does_not_exist_is_refused(token: int) -> None:
    with pytest.raises(ConfigError, match=f"names token {token}, but the model has tokens 0 to 9 only"):
        sampling.add_bias(random_logits(1, 10), SamplingParams(logit_bias={3: 1.0, token: 1.0}))
