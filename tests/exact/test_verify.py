"""Rules without chance: greedy, matching, typical acceptance, edge cases, and the batch against its twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exact.toy import random_law, random_parents, rows_of
from foredraft.sampling import Noise, draw
from foredraft.tree import children
from foredraft.types import NO_DRAFT, Draft, Draw, Verdict, chain
from foredraft.verify import verify_exact, verify_greedy, verify_matched, verify_typical
from foredraft.verify_batch import (
    Job,
    batch_exact,
    batch_greedy,
    batch_matched,
    make_forest,
    verify_batch,
)

POS = 5
DRAWS: list[Draw] = ["fixed", "iid", "distinct"]
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
examples = settings(max_examples=150, deadline=None, derandomize=True)


def random_job(seed: int, draw_as: Draw, vocab: int, *, sharp: float = 1.0, agree: float = 0.5) -> Job:
    """Return a tree of up to 12 nodes. `agree`: how often a node holds the target's likeliest token."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(13, (1,), generator=generator))
    parents = random_parents(count, generator, 4)
    logits = torch.randn(count + 1, vocab, generator=generator) * sharp
    likely = torch.rand(count, generator=generator) < agree
    random = torch.randint(vocab, (count,), generator=generator)
    tokens = torch.where(likely, logits.argmax(-1)[[parent + 1 for parent in parents]], random)
    near = logits + torch.randn(count + 1, vocab, generator=generator)
    laws = None if draw_as == "fixed" else torch.softmax(near, -1)
    return Job(Draft(tokens, parents, laws, draw_as), torch.softmax(logits, -1), Noise(seed), POS + seed % 7)


def emitted(draft: Draft, verdict: Verdict) -> list[int]:
    return [*draft.tokens[list(verdict.path)].tolist(), verdict.next_token]


def assert_is_path(draft: Draft, path: tuple[int, ...]) -> None:
    assert [draft.parents[node] for node in path] == [-1, *path][:-1]


@examples
@given(seed=st.integers(0, 10**6), vocab=st.integers(3, 7), zeros=st.sampled_from([0.0, 0.5]))
def test_matching_emits_what_plain_drawing_emits(seed: int, vocab: int, zeros: float) -> None:
    job, law, noise = random_job(seed, "fixed", vocab), random_law(vocab, seed, zeros), Noise(seed)
    tokens = job.draft.tokens.tolist()
    rows = rows_of(law, tokens, job.draft.parents)
    verdict = verify_matched(job.draft, rows, noise, POS)
    plain: list[int] = []
    for place in range(len(verdict.path) + 1):
        plain.append(draw(law(tuple(plain)), noise, POS + place))
    assert emitted(job.draft, verdict) == plain
    assert_is_path(job.draft, verdict.path)
    last = verdict.path[-1] if verdict.path else -1
    siblings = children(job.draft.parents)[last + 1]
    assert verdict.recovered == bool(siblings)
    assert plain[-1] not in [tokens[node] for node in siblings]


@examples
@given(seed=st.integers(0, 10**6), vocab=st.integers(3, 7))
def test_greedy_emits_what_plain_argmax_emits(seed: int, vocab: int) -> None:
    job, law = random_job(seed, "fixed", vocab), random_law(vocab, seed)
    rows = rows_of(law, job.draft.tokens.tolist(), job.draft.parents)
    verdict = verify_greedy(job.draft, rows)
    plain: list[int] = []
    for _ in range(len(verdict.path) + 1):
        plain.append(int(law(tuple(plain)).argmax()))
    assert emitted(job.draft, verdict) == plain
    assert_is_path(job.draft, verdict.path)


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
    exact = [verify_exact(job.draft, job.rows, job.noise, job.pos) for job in jobs]
    assert verify_batch("exact", there) == exact
    matched = [verify_matched(job.draft, job.rows, job.noise, job.pos) for job in jobs]
    assert verify_batch("matched", there) == matched
    assert verify_batch("greedy", there) == [verify_greedy(job.draft, job.rows) for job in jobs]


@examples
@given(seed=st.integers(0, 10**6), draw_as=st.sampled_from(DRAWS))
def test_the_batch_agrees_when_draft_and_target_are_one(seed: int, draw_as: Draw) -> None:
    """The residual is all zero, or rounding."""
    job = random_job(seed, draw_as, 5)
    laws = None if draw_as == "fixed" else job.rows
    job = Job(Draft(job.draft.tokens, job.draft.parents, laws, draw_as), job.rows, job.noise, job.pos)
    assert verify_batch("exact", [job]) == [verify_exact(job.draft, job.rows, job.noise, job.pos)]


def test_an_empty_batch_and_empty_drafts() -> None:
    job = Job(NO_DRAFT, torch.tensor([[0.0, 1.0, 0.0]]), Noise(1), 0)
    assert verify_batch("exact", []) == []
    for rule in ("greedy", "exact", "matched"):
        assert verify_batch(rule, [job, job]) == [Verdict((), 1, recovered=False)] * 2


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


@pytest.mark.parametrize(("off", "path"), [(-1e-12, (1,)), (1e-12, ())])
def test_what_a_rejection_leaves_is_kept_in_double_precision(off: float, path: tuple[int, ...]) -> None:
    rows = torch.tensor([[0.1, 0.3, 0.6]]).expand(3, -1)
    limit = float(rows[0, 1].double() / rows[0, 1:].double().sum())

    class Near(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return (0.9, limit + off)[sibling]

    draft = Draft(torch.tensor([0, 1]), (-1, -1))
    assert verify_exact(draft, rows, Near(1), POS).path == path
    assert verify_batch("exact", [Job(draft, rows, Near(1), POS)])[0].path == path


@pytest.mark.parametrize("draw_as", ["fixed", "iid"])
def test_acceptance_is_decided_in_double_precision(draw_as: Draw) -> None:
    """A uniform just under the limit rounds up to it in float32."""

    class Under(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return 0.5 - 2.0**-53

    rows = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    draft = chain([0], None if draw_as == "fixed" else one_hot(0, 0, vocab=2), draw_as)
    assert verify_exact(draft, rows, Under(1), POS) == Verdict((0,), 1, False)
    assert verify_batch("exact", [Job(draft, rows, Under(1), POS)]) == [Verdict((0,), 1, False)]


def one_hot(*tokens: int, vocab: int = 4) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


@pytest.mark.parametrize("draw_as", DRAWS)
def test_one_hot_laws_are_followed(draw_as: Draw) -> None:
    rows = one_hot(2, 1, 3)
    laws = None if draw_as == "fixed" else rows
    for seed in range(20):
        assert verify_exact(chain([2, 1], laws, draw_as), rows, Noise(seed), POS) == Verdict((0, 1), 3, False)
    wrong = None if draw_as == "fixed" else one_hot(0, 0, 0)
    for seed in range(20):
        assert verify_exact(chain([0, 0], wrong, draw_as), rows, Noise(seed), POS) == Verdict((), 2, True)


def test_a_token_the_target_never_says_is_never_accepted_even_at_uniform_zero() -> None:
    class Zero(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return 0.0

    rows = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    laws = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.0, 0.0]])
    for draft in (chain([0]), chain([0], laws, "iid")):
        verdict = verify_exact(draft, rows, Zero(1), POS)
        assert verdict.path == ()
        assert verdict.next_token != 0


def test_an_all_zero_residual_is_the_target_itself() -> None:
    """Only rounding can reject here: the draft has a little more than the target has."""

    class Rejecting(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return 1 - 2.0**-53

    rows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    laws = torch.tensor([[0.5 + 2**-20, 0.5 + 2**-20, 0.0], [0.0, 0.0, 0.0]])
    verdict = verify_exact(chain([0], laws, "iid"), rows, Rejecting(3), POS)
    assert verdict.path == ()
    assert verdict.recovered
    assert verdict.next_token == draw(rows[0], Noise(3), POS)


def test_a_sure_token_may_fall_short_of_one_by_rounding() -> None:
    """If chance then rejects it, it is still all that the target says."""

    class Rejecting(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return 1 - 2.0**-53

    rows = torch.tensor([[0.0, 1 - 2.0**-24, 0.0], [1.0, 0.0, 0.0]])
    assert verify_exact(chain([1]), rows, Rejecting(3), POS) == Verdict((), 1, True)
    assert verify_batch("exact", [Job(chain([1]), rows, Rejecting(3), POS)]) == [Verdict((), 1, True)]


def test_each_number_is_read_at_the_position_it_decides() -> None:
    asked: list[tuple[str, int, int]] = []

    class Listening(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            asked.append(("accept", pos, sibling))
            return super().uniform(pos, sibling)

        def key(self, pos: int, sibling: int = 0) -> int:
            asked.append(("draw", pos, sibling))
            return super().key(pos, sibling)

    rows = one_hot(1, 2, 3, 0)
    tree = Draft(torch.tensor([0, 1, 2]), (-1, -1, 1))
    assert verify_exact(tree, rows[[0, 1, 1, 2]], Listening(1), POS) == Verdict((1, 2), 3, False)
    assert asked == [("accept", POS, 0), ("accept", POS, 1), ("accept", POS + 1, 0), ("draw", POS + 2, 0)]


@examples
@given(
    seed=st.integers(0, 10**6),
    epsilon=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    delta=st.sampled_from([0.09, 0.5, 1.0]),
)
def test_typical_takes_the_longest_path_of_typical_nodes(seed: int, epsilon: float, delta: float) -> None:
    job = random_job(seed, "fixed", 5)
    tokens, parents, rows = job.draft.tokens.tolist(), job.draft.parents, job.rows.double()
    verdict = verify_typical(job.draft, job.rows, job.noise, POS, epsilon=epsilon, delta=delta)

    def chance(node: int) -> float:
        return float(rows[parents[node] + 1, tokens[node]])

    def typical(node: int) -> bool:
        law = rows[parents[node] + 1]
        entropy = -float((law * law.log()).sum())
        return chance(node) > min(epsilon, delta * math.exp(-entropy))

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), node]

    assert_is_path(job.draft, verdict.path)
    accepted = [p for p in map(path, range(-1, len(tokens))) if all(map(typical, p))]
    assert list(verdict.path) in accepted
    longest = max(map(len, accepted))
    assert len(verdict.path) == longest
    best = max(math.prod(map(chance, p)) for p in accepted if len(p) == longest)
    assert math.prod(map(chance, verdict.path)) == pytest.approx(best)
    last = verdict.path[-1] if verdict.path else -1
    assert verdict.next_token == draw(job.rows[last + 1], job.noise, POS + longest)
    assert verdict.recovered == bool(children(parents)[last + 1])


def test_typical_with_no_threshold_accepts_all_that_is_possible() -> None:
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]])
    draft = chain([0, 1])
    assert verify_typical(draft, rows, Noise(1), POS, epsilon=0.0, delta=1.0).path == (0,)
