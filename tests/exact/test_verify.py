"""Rules without chance: greedy, matching, typical acceptance, and what rounding must not change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact.toy import DRAWS, POS, one_hot, random_job, random_law, rows_of
from foredraft.sampling import Noise, draw
from foredraft.tree import children
from foredraft.types import Draft, Draw, Verdict, chain
from foredraft.verify import verify_exact, verify_greedy, verify_matched, verify_typical
from foredraft.verify_batch import Job, verify_batch

examples = settings(max_examples=150, derandomize=True)


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


@pytest.mark.parametrize(("off", "path"), [(-1e-12, (1,)), (1e-12, ())])
def test_what_a_rejection_leaves_is_kept_in_double_precision(off: float, path: tuple[int, ...]) -> None:
    rows = torch.tensor([[0.1, 0.3, 0.6]]).expand(3, -1)
    limit = float(rows[0, 1].double() / rows[0, 1:].double().sum())

    class Near(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return (0.9, limit + off)[sibling]

    draft = Draft(torch.tensor([0, 1]), (-1, -1))
    assert verify_exact(draft, rows, Near(1), POS).path == path
    assert verify_batch(["exact"], [Job(draft, rows, Near(1), POS)])[0].path == path


@pytest.mark.parametrize("draw_as", ["fixed", "iid"])
def test_acceptance_is_decided_in_double_precision(draw_as: Draw) -> None:
    """A uniform just under the limit rounds up to it in float32."""

    class Under(Noise):
        def uniform(self, pos: int, sibling: int = 0) -> float:
            return 0.5 - 2.0**-53

    rows = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    draft = chain([0], None if draw_as == "fixed" else one_hot(0, 0, vocab=2), draw_as)
    assert verify_exact(draft, rows, Under(1), POS) == Verdict((0,), 1, False)
    assert verify_batch(["exact"], [Job(draft, rows, Under(1), POS)]) == [Verdict((0,), 1, False)]


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
    assert verify_batch(["exact"], [Job(chain([1]), rows, Rejecting(3), POS)]) == [Verdict((), 1, True)]


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
