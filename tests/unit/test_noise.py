"""Is the noise random? Chi-square and Kolmogorov-Smirnov with fixed seeds; a good source fails one seed in a
million.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from scipy.stats import chi2, chisquare, kstest
from torch import Tensor

from foredraft import noise as module
from foredraft.noise import Noise, exponentials

COUNT = 200_000
VOCAB = 49_152


def uniforms(exponentials: Tensor) -> Tensor:
    return (-exponentials).exp()


def streams(count: int, key: Callable[[int], int]) -> Tensor:
    """The exponentials of 8 tokens under many keys, [count, 8]."""
    return exponentials(torch.tensor([key(i) for i in range(count)])[:, None], torch.arange(8))


SOURCES: dict[str, Callable[[], Tensor]] = {
    "tokens": lambda: uniforms(Noise(1).exponential(7, COUNT)),
    "chunks": lambda: uniforms(Noise(1).exponential_at(7, -1 - torch.arange(COUNT))),
    "positions": lambda: uniforms(streams(COUNT // 8, lambda i: Noise(1).key(i)).flatten()),
    "siblings": lambda: uniforms(streams(COUNT // 8, lambda i: Noise(1).key(5, i)).flatten()),
    "seeds": lambda: uniforms(streams(COUNT // 8, lambda i: Noise(i).key(5)).flatten()),
    "high seeds": lambda: uniforms(streams(COUNT // 8, lambda i: Noise(i << 43).key(5)).flatten()),
    "streams": lambda: uniforms(streams(COUNT // 8, lambda i: Noise(1).fork(str(i)).key(5)).flatten()),
    "acceptance by position": lambda: torch.tensor([Noise(1).uniform(i) for i in range(COUNT // 4)]).double(),
    "acceptance by sibling": lambda: torch.tensor(
        [Noise(1).uniform(3, i) for i in range(COUNT // 4)]
    ).double(),
    "acceptance by seed": lambda: torch.tensor([Noise(i).uniform(3) for i in range(COUNT // 4)]).double(),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_is_uniform_and_each_number_new(name: str) -> None:
    values = SOURCES[name]()
    assert kstest(values.numpy(), "uniform").pvalue > 1e-6
    cells = (values * 1024).long().clamp(max=1023)
    assert chisquare(torch.bincount(cells, minlength=1024).numpy()).pvalue > 1e-6
    pairs = cells[:-1] // 32 * 32 + cells[1:] // 32  # each number and the next
    assert chisquare(torch.bincount(pairs, minlength=1024).numpy()).pvalue > 1e-6


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "positions": lambda: (Noise(1).exponential(7, COUNT), Noise(1).exponential(8, COUNT)),
    "siblings": lambda: (Noise(1).exponential(7, COUNT), Noise(1).exponential(7, COUNT, sibling=1)),
    "seeds": lambda: (Noise(1).exponential(7, COUNT), Noise(2).exponential(7, COUNT)),
    "streams": lambda: (Noise(1).exponential(7, COUNT), Noise(1).fork("draft").exponential(7, COUNT)),
    "position and sibling swapped": lambda: (
        Noise(1).exponential(3, COUNT, sibling=7),
        Noise(1).exponential(7, COUNT, sibling=3),
    ),
    "seed and position swapped": lambda: (Noise(3).exponential(7, COUNT), Noise(7).exponential(3, COUNT)),
    "acceptance and drawing": lambda: (
        -torch.tensor([Noise(1).uniform(i) for i in range(COUNT // 4)]).double().clamp(min=1e-9).log(),
        torch.cat([Noise(1).exponential(i, 1) for i in range(COUNT // 4)]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_neighbouring_sources_are_independent(name: str) -> None:
    one, other = (uniforms(values) for values in PAIRS[name]())
    cells = (one * 32).long().clamp(max=31) * 32 + (other * 32).long().clamp(max=31)
    assert chisquare(torch.bincount(cells, minlength=1024).numpy()).pvalue > 1e-6
    assert not torch.isin(one[:1000], other).any()  # not the same numbers at other places either


def test_every_bit_is_fair() -> None:
    """All 52 free bits of the uniform, down to the last (the 53rd is always set)."""
    words = (uniforms(Noise(3).exponential(0, COUNT)) * 2.0**52).long()
    for bit in range(8, 52):  # exp(log(u)) has lost the very last ones
        ones = float(((words >> bit) & 1).sum())
        assert chi2.sf((ones - COUNT / 2) ** 2 / (COUNT / 4), 1) > 1e-6
    raw = module._mix_tensor(torch.arange(COUNT) * module._signed(module.STEP))
    for bit in range(64):
        ones = float(((raw >> bit) & 1).sum())
        assert chi2.sf((ones - COUNT / 2) ** 2 / (COUNT / 4), 1) > 1e-6


def test_exponentials_are_fine_grained_and_finite() -> None:
    """24-bit uniforms would repeat within a few thousand numbers and end at 16.6."""
    values = torch.cat([Noise(seed).exponential(0, 2**20) for seed in range(8)])
    assert torch.isfinite(values).all()
    assert (values > 0).all()
    assert len(values.unique()) == len(values)
    for rare in (1e-5, 1e-4):
        expected = len(values) * rare
        assert chi2.sf((float((values < rare).sum()) - expected) ** 2 / expected, 1) > 1e-6
        tail = -torch.log(torch.tensor(rare, dtype=torch.float64))
        assert chi2.sf((float((values > tail).sum()) - expected) ** 2 / expected, 1) > 1e-6


def test_the_largest_and_smallest_words_stay_inside() -> None:
    extremes = torch.tensor([-(2**63), 2**63 - 1, 0, -1])
    with patch.object(module, "_mix_tensor", lambda words: extremes.clone()):
        values = exponentials(0, torch.arange(4))
    assert torch.isfinite(values).all()
    assert (values > 0).all()


def test_some_tokens_are_a_part_of_all() -> None:
    whole = Noise(9).exponential(31, VOCAB, sibling=2)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 3, 50, 1001):
        tokens = torch.randperm(VOCAB, generator=generator)[:count]
        assert torch.equal(Noise(9).exponential_at(31, tokens, sibling=2), whole[tokens])
    keys = torch.tensor([Noise(9).key(31, 2), Noise(8).key(0)])
    assert torch.equal(exponentials(keys[:, None], torch.arange(VOCAB))[0], whole)


def test_numbers_and_tensors_mix_alike() -> None:
    words = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    mixed = module._mix_tensor(torch.tensor([module._signed(word) for word in words]))
    assert mixed.tolist() == [module._signed(module._mix(word)) for word in words]


def test_noise_never_changes() -> None:
    """Seeds must give the same texts in every release."""
    noise = Noise(42)
    assert noise.uniform(3, 1) == 0.047944172083533076
    assert noise.fork("draft").key(3) == 112742750745712849
    assert noise.exponential(3, 2).tolist() == pytest.approx(
        [0.09626242643718293, 0.7005978019023767], rel=1e-15
    )
