"""Law to token: every draw follows its law, by chi-square with fixed seeds (one failure in a million)."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from foredraft.noise import exponentials
from foredraft.sampling import Noise, draw, draw_rows, draw_siblings, token_logprobs


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws_of(law: Tensor, count: int, seed: int = 1) -> Tensor:
    noise = Noise(seed)
    return draw_rows(law.expand(count, -1), torch.tensor([noise.key(pos) for pos in range(count)]))


@pytest.mark.parametrize("vocab", [3, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_law(vocab: int, dtype: torch.dtype) -> None:
    law = torch.softmax(random_logits(1, vocab, scale=1.0)[0].to(dtype), -1)
    law[1] = 0
    law /= law.sum()
    counts = torch.bincount(draws_of(law, 60_000), minlength=vocab)
    assert counts[1] == 0
    kept, exact = law > 0, law.double() / law.double().sum()
    assert chisquare(counts[kept].numpy(), (exact * 60_000)[kept].numpy()).pvalue > 1e-6


def test_a_law_of_one_token_is_followed() -> None:
    law = torch.zeros(200)
    law[131] = 1
    assert set(draws_of(law, 500).tolist()) == {131}


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 127, 128, 129, 1000]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kept=st.floats(0.02, 1),
)
def test_the_first_to_arrive_is_found_without_looking_at_all(
    seed: int, vocab: int, scale: float, dtype: torch.dtype, kept: float
) -> None:
    """The CPU's race against arrival times written out, for laws that are flat, sharp or have holes."""
    law = torch.softmax(random_logits(1, vocab, seed, scale)[0].to(dtype), -1)
    holes = torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) > kept
    holes[law.argmax()] = False
    law = law.masked_fill(holes, 0)
    keys = torch.tensor([Noise(seed).key(pos) for pos in range(20)])
    times = exponentials(keys[:, None], torch.arange(vocab)) / law
    assert [draw(law, Noise(seed), pos) for pos in range(20)] == times.argmin(-1).tolist()


def test_any_noise_that_gives_exponentials_draws() -> None:
    class Planted:
        def exponential(self, pos: int, vocab: int) -> torch.Tensor:
            return torch.arange(1, vocab + 1, dtype=torch.float64)

    assert draw(torch.tensor([0.1, 0.2, 0.7]), Planted(), 5) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_law_is_drawn_from_as_it_is(dtype: torch.dtype) -> None:
    law = torch.tensor([0.125, 0.375, 0.5])
    assert all(draw(law.to(dtype), Noise(3), pos) == draw(law, Noise(3), pos) for pos in range(50))


def test_one_draw_is_a_row_of_many() -> None:
    laws, noise = torch.softmax(random_logits(8, 300), -1), Noise(4)
    rows = draw_rows(laws, torch.tensor([noise.key(pos) for pos in range(8)]))
    assert rows.tolist() == [draw(laws[pos], noise, pos) for pos in range(8)]


def test_close_laws_draw_the_same_token_with_the_same_noise() -> None:
    """The coupling that reproducible drafting lives on: 0.9 overlap, agreement well above chance."""
    law = torch.softmax(random_logits(1, 500, scale=1.5)[0], -1)
    near = torch.softmax(law.log() + 0.25 * random_logits(1, 500, seed=1, scale=1.0)[0], -1)
    overlap = float(torch.minimum(law, near).sum())
    agreement = float((draws_of(law, 5000) == draws_of(near, 5000)).float().mean())
    assert overlap / (2 - overlap) - 0.05 < agreement <= overlap + 0.02


def sibling_counts(law: Tensor, how: Literal["iid", "distinct"], count: int) -> Tensor:
    counts = torch.zeros(len(law), len(law))
    for seed in range(count):
        first, second = draw_siblings(law, Noise(seed).fork("draft"), 3, 2, how)
        counts[first, second] += 1
    return counts


@pytest.mark.parametrize("how", ["iid", "distinct"])
def test_siblings_follow_their_joint_law(how: Literal["iid", "distinct"]) -> None:
    law = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    joint = law[:, None] * law
    if how == "distinct":
        joint = joint / (1 - law)[:, None]
        joint.fill_diagonal_(0)
    counts = sibling_counts(law, how, 6000)
    kept = joint > 0
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept].numpy(), (joint[kept] / joint.sum() * 6000).numpy()).pvalue > 1e-6


def test_distinct_siblings_end_with_the_law() -> None:
    law = torch.tensor([0.5, 0.0, 0.5])
    assert sorted(draw_siblings(law, Noise(1), 0, 9, "distinct")) == [0, 2]
    assert draw_siblings(law, Noise(1), 0, 0, "distinct") == []


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(1, 100)[0]
    logs = torch.log_softmax(logits, -1)
    found = token_logprobs(logits.bfloat16().float(), 17, 3)
    assert found.token == 17
    assert found.logprob == pytest.approx(float(logs[17]), abs=0.05)
    assert [token for token, _ in found.top] == logs.topk(3).indices.tolist()
    assert found.top[0][1] >= found.top[1][1] >= found.top[2][1]
    assert token_logprobs(logits, 3, 0).top == ()
