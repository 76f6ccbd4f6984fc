"""Logits to law: against Hugging Face's processors, and against loops over single numbers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from foredraft import sampling
from foredraft.sampling import forbid, to_laws, widen
from foredraft.types import SamplingParams

NO_IDS = torch.empty(0, dtype=torch.int64)
examples = settings(max_examples=150, derandomize=True)


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
    for values in product((1.0, 0.6, 2.0), (0, 1, 50), (1.0, 0.9, 0.3), (0.0, 0.05))
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


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_in_which_nothing_is_possible_leaves_the_others_alone(options: dict[str, float]) -> None:
    logits, params = random_logits(3, 200), SamplingParams(**options)
    logits[1] = -torch.inf
    laws = to_laws(logits, params)
    assert not laws[1].any()
    assert torch.equal(laws[::2], to_laws(logits[::2], params))
    assert not to_laws(logits[1:2], params).any()


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


def test_draws_never_change() -> None:
    """Seeds must give the same texts in every release."""
    laws = (torch.arange(1, 201) / 20_100).expand(12, -1)
    keys = torch.tensor([sampling.Noise(42).key(pos) for pos in range(12)])
    assert sampling.draw_rows(laws, keys).tolist() == [
        136,
        151,
        158,
        61,
        157,
        136,
        183,
        150,
        27,
        66,
        156,
        162,
    ]


# What runs on a device only


class Elsewhere(torch.Tensor):
    """Numbers that are on the CPU and say that they are not."""

    device = torch.device("meta")


def test_the_device_finds_and_sorts_as_the_cpu_does() -> None:
    logits, bound = random_logits(4, 90).round(), torch.tensor([[2.0], [-torch.inf], [0.0], [5.0]])
    bound[3] = logits[3].max()
    for rows in (slice(None), slice(3, 4)):
        here, there = logits[rows], logits[rows].as_subclass(Elsewhere)
        for ours, theirs in zip(
            sampling._candidates(here, bound[rows]), sampling._candidates(there, bound[rows]), strict=True
        ):
            assert ours.tolist() == theirs.tolist()
        assert sampling._sorted(here).tolist() == sampling._sorted(there).tolist()


def test_bias_and_draws_stay_on_the_device_of_the_logits() -> None:
    """On a device that holds no numbers, so that a tensor made elsewhere is an error."""
    logits = sampling.add_bias(random_logits(2, 150).to("meta"), SamplingParams(logit_bias={1: 2.0}))
    keys = torch.zeros(2, dtype=torch.int64, device="meta")
    assert sampling.draw_rows(logits, keys).device.type == "meta"


@pytest.mark.parametrize("top_p", [1e-50, 5e-324])
def test_the_smallest_top_p_keeps_the_best_token(top_p: float) -> None:
    law = to_laws(torch.tensor([[1.0, 3.0, 2.0]]), SamplingParams(top_p=top_p))
    assert law.tolist() == [[0.0, 1.0, 0.0]]


def test_a_narrow_vocabulary_is_widened() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.bfloat16)
    full = widen(logits, torch.tensor([4, 0, 2]), 5)
    no = -math.inf
    assert full.dtype == torch.bfloat16
    assert full.tolist() == [[2.0, no, 3.0, no, 1.0], [5.0, no, 6.0, no, 4.0]]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str
)
def test_no_rows_have_no_laws(options: dict[str, Any]) -> None:
    laws = to_laws(torch.empty(0, 7, dtype=torch.bfloat16), SamplingParams(**options))
    assert (laws.shape, laws.dtype) == ((0, 7), torch.float32)


def test_what_is_not_allowed_is_ruled_out() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    ruled = forbid(logits, torch.tensor([[True, False], [True, True]]))
    assert ruled.dtype == torch.float32
    assert ruled.tolist() == [[1.0, -math.inf], [3.0, 4.0]]
    assert logits.tolist() == [[1.0, 2.0], [3.0, 4.0]]
