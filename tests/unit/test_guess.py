"""Drafts of sampled requests: where the target will likely draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.engine.sequence import Sequence
from foredraft.models import kernels
from foredraft.noise import Noise, exponentials
from foredraft.propose.guess import drawn, foreseen, future, luck
from foredraft.sampling import draw, to_laws
from foredraft.types import Draft, SamplingParams
from foredraft.verify import verify_exact
from foredraft.verify_batch import Job, verify_batch

VOCAB = 500


def sequence(params: SamplingParams, seed: int = 3) -> Sequence:
    return Sequence("r", params, [1, 2, 3], 3, 99, Noise(seed), None, 0.0)


def near_logits(rows: int) -> tuple[Tensor, Tensor]:
    """What a target says, and what a draft makes of it."""
    generator = torch.Generator().manual_seed(0)
    target = 2.5 * torch.randn(rows, VOCAB, generator=generator)
    return target, target + 0.7 * torch.randn(rows, VOCAB, generator=generator)


def test_the_noise_is_that_of_the_target_nearly() -> None:
    ids = torch.randperm(2**18, generator=torch.Generator().manual_seed(1))[:50_000]
    for pos in range(4):
        key, found = Noise(7).key(pos), np.empty(len(ids), np.float32)
        kernels.gumbels(key, ids.numpy(), found)
        exact = -exponentials(key, ids).log()
        assert (torch.from_numpy(found) - exact).abs().max() < 2e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_more_draws_are_foreseen_than_by_likelihood(temperature: float, truncation: dict[str, float]) -> None:
    """The target's own draw among the best three, over 1,000 places."""
    params = SamplingParams(temperature=temperature, **truncation)  # type: ignore[arg-type]
    target, guess = near_logits(1000)
    laws, ids = to_laws(target, params), torch.arange(VOCAB)
    hits = {"foreseen": 0, "likely": 0}
    for place in range(len(target)):
        seq = sequence(params, seed=place)
        token = draw(laws[place], seq.noise, len(seq.tokens) + 1)
        scores = foreseen(seq, guess[place, None], [1], ids)[0]
        hits["foreseen"] += token in scores.topk(3).indices
        hits["likely"] += token in guess[place].topk(3).indices
    assert hits["foreseen"] > 1.1 * hits["likely"]


def test_each_row_has_its_depth_and_greedy_requests_no_noise() -> None:
    _, logits = near_logits(3)
    ids = torch.arange(VOCAB) * 7
    seq = sequence(SamplingParams(temperature=1.2))
    together = foreseen(seq, logits, range(3), ids)
    for depth in range(3):
        assert torch.equal(together[depth], foreseen(seq, logits[depth, None], [depth], ids)[0])
    assert future(seq, [2]) == [seq.noise.key(5)]
    greedy = sequence(SamplingParams(temperature=0))
    assert foreseen(greedy, logits, range(3), ids) is logits
    assert luck(greedy.params) == 0


def test_what_is_drawn_shares_no_number_with_the_target() -> None:
    """Noise of its own, and the target's own only where all is verified by matching."""
    logits = near_logits(1)[0][0]
    for reproducible in (False, True):
        seq = sequence(SamplingParams(seed=3, reproducible=reproducible))
        for depth in range(20):
            law, token = drawn(seq, logits, depth)
            noise = seq.noise if reproducible else seq.noise.fork("draft")
            assert token == draw(law, noise, len(seq.tokens) + depth)
    ids = [drawn(sequence(SamplingParams(seed=3)), logits, depth)[1] for depth in range(20)]
    assert ids != [draw(to_laws(logits, SamplingParams()), Noise(3), 3 + depth) for depth in range(20)]


def test_a_coupled_draft_is_never_verified_by_rejection() -> None:
    draft = Draft(torch.tensor([1]), (-1,), draw="coupled")
    laws = torch.full((2, 4), 0.25)
    with pytest.raises(ValueError, match="verify_matched only"):
        verify_exact(draft, laws, Noise(0), 0)
    with pytest.raises(ValueError, match="verify_matched only"):
        verify_batch(["exact"], [Job(draft, laws, Noise(0), 0)])
