"""The batched rules against their twins, and what a padded batch looks like."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact.toy import DRAWS, POS, one_hot, random_job
from foredraft.sampling import Noise, add_bias, to_laws
from foredraft.types import NO_DRAFT, Draft, Draw, SamplingParams, Verdict, chain
from foredraft.verify import verify_exact, verify_greedy, verify_matched
from foredraft.verify_batch import (
    Job,
    batch_exact,
    batch_greedy,
    batch_matched,
    make_forest,
    verify_batch,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
examples = settings(max_examples=150, derandomize=True)


def on(device: str, job: Job) -> Job:
    laws = None if job.draft.laws is None else job.draft.laws.to(device)
    draft = Draft(job.draft.tokens, job.draft.parents, laws, job.draft.draw)
    return Job(draft, job.rows.to(device), job.noise, job.pos)


@pytest.mark.parametrize("device", DEVICES)
@examples
@given(
    seed=st.integers(0, 10**6),
    draws=st.lists(st.sampled_from(DRAWS), min_size=1, max_size=5),
    vocab=st.sampled_from([3, 4, 7, 64, 150]),
    sharp=st.sampled_from([0.0, 1.0, 4.0, 60.0]),
)
def test_the_batch_agrees_with_its_twins(
    device: str, seed: int, draws: list[Draw], vocab: int, sharp: float
) -> None:
    """The twins run on the CPU throughout."""
    jobs = [random_job(seed + place, how, vocab, sharp=sharp) for place, how in enumerate(draws)]
    there = [on(device, job) for job in jobs]
    greedy = [verify_greedy(job.draft, job.rows) for job in jobs]
    exact = [verify_exact(job.draft, job.rows, job.noise, job.pos) for job in jobs]
    assert verify_batch(["exact"] * len(there), there) == exact
    matched = [verify_matched(job.draft, job.rows, job.noise, job.pos) for job in jobs]
    assert verify_batch(["matched"] * len(there), there) == matched
    assert verify_batch(["greedy"] * len(there), there) == greedy


@examples
@given(seed=st.integers(0, 10**6), draw_as=st.sampled_from(DRAWS))
def test_the_batch_agrees_when_draft_and_target_are_one(seed: int, draw_as: Draw) -> None:
    """The residual is all zero, or rounding."""
    job = random_job(seed, draw_as, 5)
    laws = None if draw_as == "fixed" else job.rows
    job = Job(Draft(job.draft.tokens, job.draft.parents, laws, draw_as), job.rows, job.noise, job.pos)
    assert verify_batch(["exact"], [job]) == [verify_exact(job.draft, job.rows, job.noise, job.pos)]


def test_an_empty_batch_and_empty_drafts() -> None:
    job = Job(NO_DRAFT, torch.tensor([[0.0, 1.0, 0.0]]), Noise(1), 0)
    assert verify_batch([], []) == []
    for rule in ("greedy", "exact", "matched"):
        assert verify_batch([rule, rule], [job, job]) == [Verdict((), 1, recovered=False)] * 2


def test_a_forest_is_padded_with_what_matches_nothing() -> None:
    """And paths end with -1, as the batch says before anyone reads it on the host."""
    rows = one_hot(1, 2, 3)
    jobs = [
        Job(chain([1, 2]), rows, Noise(1), POS),
        Job(chain([1], rows[:2], "iid"), rows[:2], Noise(2), POS),
    ]
    forest = make_forest(jobs, with_laws=True)
    assert forest.tokens.tolist() == [[1, 2], [1, 0]]
    assert forest.parents.tolist() == [[-1, 0], [-1, -2]]
    assert forest.rows.tolist() == torch.stack([rows, torch.cat([rows[:2], torch.zeros(1, 4)])]).tolist()
    assert forest.keys.tolist() == [[job.noise.key(POS + depth) for depth in range(3)] for job in jobs]
    assert forest.uniforms.tolist() == [
        [Noise(1).uniform(POS), Noise(1).uniform(POS + 1)],
        [Noise(2).uniform(POS), 0],
    ]
    assert forest.laws is not None
    assert forest.laws.tolist() == torch.stack([torch.zeros(3, 4), forest.rows[1]]).tolist()
    assert (forest.fixed.tolist(), forest.distinct.tolist()) == ([[True], [False]], [[False], [False]])
    assert make_forest(jobs, with_laws=False).laws is None
    for rule in (batch_greedy, batch_exact, batch_matched):
        assert rule(forest).path.tolist() == [[0, 1], [0, -1]]
        assert rule(
            make_forest([jobs[1], Job(chain([0, 0]), rows, Noise(3), POS)], with_laws=True)
        ).path.tolist() == [[0, -1], [-1, -1]]


@pytest.mark.parametrize("draw_as", DRAWS)
def test_a_batch_stays_on_the_device_of_its_rows(draw_as: Draw) -> None:
    """On a device that holds no numbers, so that a tensor made elsewhere is an error."""
    jobs = [on("meta", random_job(seed, draw_as, 70)) for seed in range(4)]
    forest = make_forest(jobs, with_laws=True)
    parts = [getattr(forest, name) for name in forest.__slots__]
    assert {part.device.type for part in parts if part is not None} == {"meta"}
    for rule in (batch_greedy, batch_exact, batch_matched):
        assert rule(forest).path.shape == forest.tokens.shape


@pytest.mark.parametrize("first", [0, 1])
def test_rows_are_compared_as_they_are_whatever_their_neighbours(first: int) -> None:
    """A penalised row is float32, a plain one what the model said; here bfloat16 would make a tie of it."""
    near = torch.tensor([[1.0, 1.0 + 2.0**-12, 0.0]])
    jobs = [Job(NO_DRAFT, rows, Noise(1), POS) for rows in (near, near.bfloat16())]
    verdicts = verify_batch(["greedy", "greedy"], [jobs[first], jobs[1 - first]])
    assert verdicts[first] == verify_greedy(NO_DRAFT, near) == Verdict((), 1, recovered=False)
    assert verdicts[1 - first] == Verdict((), 0, recovered=False)


class Far(torch.Tensor):
    """Stands for a tensor on a device, as all that is computed from it; notes for what a host would wait."""

    waits: ClassVar[list[str]] = []
    reads: ClassVar[set[str]] = {"tolist", "item", "numpy", "cpu", "nonzero", "repeat_interleave"}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in cls.reads or name in ("__bool__", "__int__", "__float__", "__index__", "__array__"):
            cls.waits.append(name)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_step_reads_the_device_once() -> None:
    """From logits to verdicts, whatever rules and temperatures meet in it."""
    jobs, rules = [], []
    Far.waits.clear()
    for seed, draw_as in enumerate(DRAWS * 3):
        job = random_job(seed, draw_as, 70)
        params = SamplingParams(temperature=(0, 1, 0.7)[seed // 3])
        logits = job.rows.log().as_subclass(Far)
        rows = add_bias(logits, params) if params.greedy else to_laws(logits, params)
        jobs.append(Job(job.draft, rows, job.noise, job.pos))
        rules.append(("greedy", "exact", "matched")[seed // 3])
    verdicts = verify_batch(rules, jobs)
    assert Far.waits == ["tolist"]
    near = [Job(job.draft, job.rows.as_subclass(torch.Tensor), job.noise, job.pos) for job in jobs]
    twins = [verify_greedy(job.draft, job.rows) for job in near[:3]]
    twins += [verify_exact(job.draft, job.rows, job.noise, job.pos) for job in near[3:6]]
    twins += [verify_matched(job.draft, job.rows, job.noise, job.pos) for job in near[6:]]
    assert verdicts == twins
