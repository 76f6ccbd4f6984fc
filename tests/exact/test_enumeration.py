"""The law of verify_exact by enumeration: every draft, every way the acceptances can fall, no sampling.

The uniforms are replaced by coins that take both sides in turn and carry the probability of each; the final
draw is replaced by the law it is from. What comes out must be the target's own law to 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exact.toy import Scene, drafts_of, path_tokens, random_law, random_parents
from foredraft import verify
from foredraft.tree import children
from foredraft.types import Draft, Verdict

POS = 11


class Bet:
    """uniform * scale, waiting to be compared."""

    def __init__(self, coins: Coins, scale: float) -> None:
        self.coins, self.scale = coins, scale

    def __lt__(self, limit: float) -> bool:
        if self.scale == 0:
            return self.coins.toss(float(limit > 0))
        return self.coins.toss(min(1.0, limit / self.scale))


class Coins:
    """A stand-in for Noise that follows a script, then takes the likelier side; it notes the chances."""

    def __init__(self, script: tuple[bool, ...]) -> None:
        self.script = script
        self.sides: list[bool] = []
        self.chances: list[float] = []  # of True
        self.asked: list[tuple[int, int]] = []

    def uniform(self, pos: int, sibling: int = 0) -> Coins:
        assert (pos, sibling) not in self.asked, "one number decides two things"
        self.asked.append((pos, sibling))
        return self

    def __mul__(self, scale: float) -> Bet:
        return Bet(self, scale)

    def toss(self, chance: float) -> bool:
        place = len(self.sides)
        side = self.script[place] if place < len(self.script) else chance >= 0.5
        self.sides.append(side)
        self.chances.append(chance)
        return side

    @property
    def weight(self) -> float:
        return math.prod(c if side else 1 - c for side, c in zip(self.sides, self.chances, strict=True))


Rule = Callable[[Draft, Tensor, Coins, int], Verdict]


def outcomes(rule: Rule, draft: Draft, rows: Tensor) -> Iterator[tuple[float, Verdict, Tensor]]:
    """Yield each way it can end: probability, verdict (its next token means nothing), law of that token."""
    drawn: list[tuple[Tensor, int]] = []

    def note(law: Tensor, noise: Coins, pos: int) -> int:
        drawn.append((law, pos))
        return 0

    pending: list[tuple[bool, ...]] = [()]
    with patch.object(verify, "draw", note):
        while pending:
            coins = Coins(pending.pop())
            verdict = rule(draft, rows, coins, POS)
            law, pos = drawn[-1]
            assert pos == POS + len(verdict.path)
            yield coins.weight, verdict, law / law.sum()
            for place in range(len(coins.script), len(coins.sides)):
                if 0 < coins.chances[place] < 1:
                    pending.append((*coins.sides[:place], not coins.sides[place]))


def emitted_law(
    scene: Scene, rule: Rule, drafts: list[tuple[float, tuple[int, ...]]]
) -> dict[tuple[int, ...], float]:
    """Return the law of the next levels + 1 tokens: what the rule emits, then the target alone."""
    after: dict[tuple[int, ...], Tensor] = {}  # accepted tokens -> chance of them and of each next token
    for chance, tokens in drafts:
        for weight, verdict, law in outcomes(rule, scene.draft_of(tokens), scene.rows(tokens)):
            accepted = path_tokens(tokens, scene.parents, verdict.path[-1] if verdict.path else -1)
            after[accepted] = after.get(accepted, 0) + chance * weight * law
    length = scene.levels + 1
    total = dict.fromkeys(scene.autoregressive(length), 0.0)
    for accepted, shares in after.items():
        for token, share in enumerate(shares.tolist()):
            start = (*accepted, token)
            for rest, chance in scene.autoregressive(length - len(start), start).items():
                total[start + rest] += share * chance
    return total


def gap(scene: Scene, rule: Rule = verify.verify_exact, tokens: tuple[int, ...] | None = None) -> float:
    """Return the largest difference between the law of what is emitted and the target's own."""
    drafts = drafts_of(scene) if tokens is None else [(1.0, tokens)]
    found = emitted_law(scene, rule, drafts)
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    own = scene.autoregressive(scene.levels + 1)
    return max(abs(found[text] - own[text]) for text in own)


def scene_of(parents: tuple[int, ...], draw: str, vocab: int = 3, seed: int = 1, zeros: float = 0.0) -> Scene:
    # Without replacement there must be enough tokens to draw.
    draft_zeros = 0.0 if draw == "distinct" else zeros
    return Scene(parents, draw, random_law(vocab, seed, zeros), random_law(vocab, -seed, draft_zeros), vocab)


@settings(max_examples=100, derandomize=True)
@given(
    shape=st.sampled_from([(0, 4), (1, 7), (2, 5), (2, 7), (3, 4), (3, 5), (4, 3), (5, 3)]),
    seed=st.integers(1, 10**6),
    draw=st.sampled_from(["iid", "distinct"]),
    zeros=st.sampled_from([0.0, 0.3]),
)
def test_drawn_trees_leave_the_law(shape: tuple[int, int], seed: int, draw: str, zeros: float) -> None:
    count, vocab = shape
    parents = random_parents(count, torch.Generator().manual_seed(seed), 3)
    assert gap(scene_of(parents, draw, vocab, seed, zeros)) < 1e-9


@settings(max_examples=100, derandomize=True)
@given(
    count=st.integers(0, 12),
    vocab=st.integers(3, 7),
    seed=st.integers(1, 10**6),
    zeros=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_fixed_trees_leave_the_law(count: int, vocab: int, seed: int, zeros: float) -> None:
    """Any tokens will do: siblings that repeat, tokens of probability 0, laws with one token."""
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(count, generator, 5)
    tokens = tuple(torch.randint(vocab, (count,), generator=generator).tolist())
    scene = scene_of(parents, "fixed", vocab, seed, zeros)
    assume(vocab ** (scene.levels + 1) <= 3000)
    assert gap(scene, tokens=tokens) < 1e-9


@pytest.mark.parametrize("draw", ["iid", "distinct"])
def test_equal_laws_accept_everything_first(draw: str) -> None:
    law = random_law(4, 3, 0.0)
    scene = Scene((-1, 0, 1), draw, law, law, 4)
    for _, tokens in drafts_of(scene):
        found = list(outcomes(verify.verify_exact, scene.draft_of(tokens), scene.rows(tokens)))
        assert [verdict.path for _, verdict, _ in found] == [(0, 1, 2)]
        assert not found[0][1].recovered


def test_the_guess_is_accepted_as_often_as_the_laws_overlap() -> None:
    scene = scene_of((-1,), "iid", vocab=4)
    accepted = sum(
        chance * weight
        for chance, tokens in drafts_of(scene)
        for weight, verdict, _ in outcomes(verify.verify_exact, scene.draft_of(tokens), scene.rows(tokens))
        if verdict.path
    )
    assert accepted == pytest.approx(float(torch.minimum(scene.target(()), scene.draft(())).sum()), abs=1e-12)


# Negative controls: mistakes that other engines have made must show up as a gap.

TWO_SIBLINGS = (-1, -1)


def mistake(name: str, replacement: object) -> AbstractContextManager[object]:
    return patch.object(verify, name, replacement)


@pytest.mark.parametrize("draw", ["iid", "distinct"])
def test_control_residual_not_taken(draw: str) -> None:
    with mistake("_residual", lambda target, guess: target):
        assert gap(scene_of((-1,), draw)) > 0.01


def test_control_fixed_guess_not_removed() -> None:
    with mistake("_without", lambda law, token: law):
        assert gap(scene_of((-1,), "fixed"), tokens=(1,)) > 0.01


@pytest.mark.parametrize("draw", ["iid", "distinct"])
def test_control_residual_not_normalised(draw: str) -> None:
    with mistake("_residual", lambda target, guess: (target - guess).clamp(min=0)):
        assert gap(scene_of(TWO_SIBLINGS, draw, vocab=5)) > 0.001


def test_control_siblings_out_of_order() -> None:
    with mistake("children", lambda parents: [below[::-1] for below in children(parents)]):
        assert gap(scene_of(TWO_SIBLINGS, "distinct", vocab=5)) > 0.001


def test_control_draft_law_kept_whole_without_replacement() -> None:
    with mistake("_without", lambda law, token: law):
        assert gap(scene_of(TWO_SIBLINGS, "distinct", vocab=5)) > 0.001


def test_control_bonus_from_the_wrong_row() -> None:
    def bonus_from_the_root(draft: Draft, rows: Tensor, noise: Coins, pos: int) -> Verdict:
        verdict = verify.verify_exact(draft, rows, noise, pos)
        if not verdict.recovered:
            verify.draw(rows[0], noise, pos + len(verdict.path))
        return verdict

    assert gap(scene_of((-1, 0), "iid"), bonus_from_the_root) > 0.01


def test_control_greedy_guess_verified_as_drawn() -> None:
    """The most likely guess is sent, but verified by the ratio of a drawn one."""
    scene = scene_of((-1,), "iid")
    assert gap(scene, tokens=(int(scene.draft(()).argmax()),)) > 0.01


def test_typical_is_lossy() -> None:
    def typical(draft: Draft, rows: Tensor, noise: Coins, pos: int) -> Verdict:
        return verify.verify_typical(draft, rows, noise, pos, epsilon=0.3, delta=0.3)

    scene = scene_of((-1,), "fixed", vocab=4)
    assert gap(scene, typical, tokens=(int(scene.target(()).argmax()),)) > 0.01
