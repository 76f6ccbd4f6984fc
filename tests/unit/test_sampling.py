"""Logits to law: against Hugging Face's processors, and against loops over single numbers."""

from __future__ import annotations

from itertools import product

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

NO_IDS = torch.empty(0, dtype=torch.int64)
examples = settings(max_examples=150, deadline=None, derandomize=True)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def hugging_face(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law of Hugging Face's warpers, in the order that generate() puts them."""
    scores = logits.float()
    if params.temperature != 1:
        scores = hf.TemperatureLogitsWarper(float(params.temperature))(NO_IDS, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(NO_IDS, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(NO_IDS, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(NO_IDS, scores)
    return torch.softmax(scores, -1)


def assert_same_laws(logits: Tensor, params: SamplingParams) -> None:
    """Equal to rounding. At the edge of the nucleus Hugging Face takes any of the tied tokens, and there its
    float32 sum over the vocabulary can be off by a token or two.
    """
    ours, theirs = to_laws(logits, params), hugging_face(logits, params)
    assert ours.dtype == torch.float32
    assert ours.shape == logits.shape
    for logit, our, their in zip(logits, ours, theirs, strict=True):
        differ = (our > 0) != (their > 0)
        count, other = int((our > 0).sum()), int((their > 0).sum())
        if count == other:
            assert len(logit[differ].unique()) <= 1
            our, their = our.sort().values, their.sort().values
        else:
            assert params.top_p < 1
            assert len(logit) > 1000
            assert abs(count - other) <= 2 + count // 1000
            our, their = our[~differ], their[~differ]
        torch.testing.assert_close(our, their, atol=1e-6, rtol=1e-4)


GRID = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in product((1.0, 0.6, 1.7), (0, 1, 50), (1.0, 0.9, 0.3), (0.0, 0.05))
]


@pytest.mark.parametrize("options", GRID, ids=str)
@pytest.mark.parametrize("vocab", [5, 100, 1000])
def test_laws_are_those_of_hugging_face(options: dict[str, float], vocab: int) -> None:
    assert_same_laws(random_logits(6, vocab, seed=vocab), SamplingParams(**options))


@pytest.mark.parametrize("options", GRID, ids=str)
def test_ties_are_cut_as_hugging_face_cuts_them(options: dict[str, float]) -> None:
    """Coarse logits, as bfloat16 makes them: every edge runs through a group of ties."""
    logits = (random_logits(6, 300, seed=3) * 2).round() / 2
    assert_same_laws(logits, SamplingParams(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.95, "top_k": 64},
        {"min_p": 0.02},
        {"top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [49_152, 50_257, 262_144])
def test_laws_of_real_vocabularies(options: dict[str, float], vocab: int) -> None:
    """Peaked, middling and nearly flat rows."""
    logits = random_logits(3, vocab) * torch.tensor([[3.0], [1.0], [0.1]])
    assert_same_laws(logits, SamplingParams(**options))
    assert_same_laws(logits.bfloat16(), SamplingParams(**options))


@pytest.mark.parametrize("options", [{"top_k": 10**6}, {"top_k": 100}, {"top_k": 99}, {"top_k": 1}], ids=str)
def test_top_k_up_to_and_beyond_the_vocabulary(options: dict[str, int]) -> None:
    assert_same_laws(random_logits(4, 100), SamplingParams(**options))


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_p": 1 - 1e-7}], ids=str)
def test_extreme_cuts(options: dict[str, float]) -> None:
    logits = random_logits(4, 2000)
    laws = to_laws(logits, SamplingParams(**options))
    kept = (laws > 0).sum(-1)
    assert (kept == 1).all() if options.get("top_p") != 1 - 1e-7 else (kept > 1900).all()
    assert torch.equal(laws.argmax(-1), logits.argmax(-1))


def test_all_tied_logits() -> None:
    logits = torch.zeros(2, 640)
    assert torch.equal(to_laws(logits, SamplingParams(top_k=5)), torch.full((2, 640), 1 / 640))
    assert (to_laws(logits, SamplingParams(top_p=0.5)) > 0).sum(-1).tolist() == [320, 320]


def test_banned_tokens_have_no_mass_under_any_cut() -> None:
    logits = random_logits(3, 200)
    logits[:, 10:] = -torch.inf
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-6}, {"top_k": 50, "top_p": 0.99}):
        laws = to_laws(logits, SamplingParams(**options))
        assert float(laws[:, 10:].sum()) == 0
        torch.testing.assert_close(laws.sum(-1), torch.ones(3))


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 100.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_extreme_temperatures_stay_finite(temperature: float, options: dict[str, float]) -> None:
    logits = random_logits(4, 500, scale=20)
    laws = to_laws(logits, SamplingParams(temperature=temperature, **options))
    torch.testing.assert_close(laws.sum(-1), torch.ones(4))
    if temperature < 1:
        assert torch.equal(laws.argmax(-1), logits.argmax(-1))


def test_temperature_zero_is_the_first_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    assert to_laws(logits, SamplingParams(temperature=0)).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0}])
def test_a_row_has_one_law_alone_and_in_company(options: dict[str, float]) -> None:
    """Plain decoding sees one row where verification sees many."""
    logits, params = random_logits(9, 5000), SamplingParams(**options)
    laws = to_laws(logits, params)
    for row in range(9):
        assert torch.equal(to_laws(logits[row], params), laws[row])
    assert torch.equal(to_laws(logits.view(3, 3, -1), params), laws.view(3, 3, -1))


@examples
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 300),
    coarse=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "temperature": st.floats(0.05, 3),
            "top_k": st.integers(0, 310),
            "top_p": st.floats(0.01, 1),
            "min_p": st.floats(0, 1),
        }
    ),
)
def test_any_law_is_a_law(seed: int, vocab: int, coarse: bool, options: dict[str, float]) -> None:
    logits = random_logits(3, vocab, seed)
    logits = logits.round() if coarse else logits
    laws = to_laws(logits, SamplingParams(**options))
    torch.testing.assert_close(laws.sum(-1), torch.ones(3))
    assert (laws >= 0).all()
    least = torch.where(laws > 0, logits, torch.inf).amin(-1, keepdim=True)
    assert (laws[logits > least] > 0).all()  # what is kept is the top of the row


@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 1000, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_torch_argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(5, vocab).round().to(dtype)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(sampling.argmax(logits), first)
    assert torch.equal(sampling.argmax(logits[0]), first[0])


# Penalties, min_tokens, bias


def test_no_penalty_returns_the_very_same_tensor() -> None:
    logits = random_logits(2, 10)
    assert penalize(logits, SamplingParams(), [1], [[2], [3]], [0]) is logits
    assert penalize(logits, SamplingParams(min_tokens=1), [1], [[2], [3]], [0]) is logits
    assert sampling.add_bias(logits, SamplingParams()) is logits
    assert not sampling.needs_history(SamplingParams(top_k=3, logit_bias={1: 2.0}))
    for options in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"min_tokens": 3}):
        assert sampling.needs_history(SamplingParams(**options))
    assert sampling.needs_history(SamplingParams(frequency_penalty=-0.1))


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
    params = SamplingParams(min_tokens=3, stop_token_ids=(6, 11), logit_bias={2: 100.0})
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
    assert torch.equal(penalize(logits, params, [3, 12], [[]], []), penalize(logits, params, [3], [[]], []))


def test_processors_run_in_order_and_in_float32() -> None:
    """Penalty before bias before temperature before the cuts."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]]).bfloat16()
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 0.5}, temperature=0.5, top_k=2)
    laws = to_laws(penalize(logits, params, [0], [[]], []), params)
    torch.testing.assert_close(laws, torch.softmax(torch.tensor([[2.0, 3.0, -torch.inf, -torch.inf]]), -1))
    assert laws.dtype == torch.float32


def test_a_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias names token 12, but the model has tokens 0 to 9 only"):
        sampling.add_bias(random_logits(1, 10), SamplingParams(logit_bias={12: 1.0}))
