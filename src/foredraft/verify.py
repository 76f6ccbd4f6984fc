"""Which guesses the target keeps, and what it says next: pure functions from laws and noise to a Verdict.

`pos` is the position in the text of the first token after the root. A node at depth d (1 just below the root)
stands at pos + d - 1; the token after a path of length k stands at pos + k. Rows: 0 after the root, node + 1
after node. All rules but `verify_typical` leave the target's law as it is, whatever the draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.sampling import Noise, argmax, draw
from foredraft.tree import children, path_to
from foredraft.types import Draft, Verdict


def verify_greedy(draft: Draft, target_logits: Tensor) -> Verdict:
    """Follow the argmax of target_logits [n + 1, vocab] (penalized and biased, never a law)."""
    best = argmax(target_logits).tolist()
    return _follow(draft, lambda row, depth: best[row])


def verify_matched(draft: Draft, target_laws: Tensor, noise: Noise, pos: int) -> Verdict:
    """Draw from target_laws [n + 1, vocab] as without a draft, and follow the child that was drawn.

    Emits what plain decoding emits with the same noise, so it is exact for any draft, drawn in any way.
    """
    return _follow(draft, lambda row, depth: draw(target_laws[row], noise, pos + depth))


def _follow(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    """Walk down while a child has the token that `choose(row, accepted so far)` says."""
    tokens, below = draft.tokens.tolist(), children(draft.parents)
    path: list[int] = []
    row = 0
    while True:
        token = choose(row, len(path))
        node = next((node for node in below[row] if tokens[node] == token), None)
        if node is None:
            return Verdict(tuple(path), token, recovered=bool(below[row]))
        path.append(node)
        row = node + 1


def verify_exact(draft: Draft, target_laws: Tensor, noise: Noise, pos: int) -> Verdict:
    """Accept a node with probability min(1, target / draft), else try its next sibling on what is left.

    target_laws: [n + 1, vocab]. Chains: arXiv 2211.17192, section 2.3, and arXiv 2302.01318, theorem 1.
    Siblings drawn i.i.d.: arXiv 2305.09781, section 4.3; without replacement: arXiv 2402.14160, section 3.
    Exact for all three draws (tests/exact), if the draft was drawn with other noise (a fork). Raises
    ValueError for a coupled draft, which knows the noise with which what is left would be drawn.
    """
    refuse_coupled(draft)
    below = children(draft.parents)
    path: list[int] = []
    row = 0
    while True:
        node, left = _try_siblings(draft, below[row], target_laws[row], noise, pos + len(path))
        if node is None:
            return Verdict(tuple(path), draw(left, noise, pos + len(path)), recovered=bool(below[row]))
        path.append(node)
        row = node + 1


def refuse_coupled(draft: Draft) -> None:
    """Raise ValueError for a draft that rejection would not be exact for."""
    if draft.draw == "coupled":
        raise ValueError("a coupled draft knows the noise used here: it is exact under verify_matched only")


def _try_siblings(
    draft: Draft, siblings: list[int], target: Tensor, noise: Noise, pos: int
) -> tuple[int | None, Tensor]:
    """Return the accepted sibling, or None and the law [vocab] that the token at `pos` then has."""
    if not siblings:
        return None, target
    guess: Tensor | None = None  # the draft law that the next sibling was drawn from; None: deterministic
    if draft.draw != "fixed":
        assert draft.laws is not None
        guess = draft.laws[draft.parents[siblings[0]] + 1]
    for sibling, node in enumerate(siblings):
        token = int(draft.tokens[node])
        guessed = 1.0 if guess is None else float(guess[token])
        # Strict, so that a token the target never says is never accepted, not even at uniform 0.
        if noise.uniform(pos, sibling) * guessed < float(target[token]):
            return node, target
        target = _without(target, token) if guess is None else _residual(target, guess)
        if draft.draw == "distinct" and guess is not None:
            guess = _without(guess, token)
    return None, target


def _residual(target: Tensor, guess: Tensor) -> Tensor:
    """Return what the target has above the draft, normalised (float64 [vocab]).

    All zero means that the laws are equal to rounding, and then the target itself is right.
    """
    above = (target.double() - guess).clamp_(min=0)
    total = above.sum()
    return above / total if total > 0 else target


def _without(law: Tensor, token: int) -> Tensor:
    """Return the law given that it is not `token`, float64 [vocab]; the law itself if it is nothing else."""
    rest = law.to(torch.float64, copy=True)
    rest[token] = 0
    total = rest.sum()
    return rest / total if total > 0 else law


def verify_typical(
    draft: Draft, target_laws: Tensor, noise: Noise, pos: int, *, epsilon: float, delta: float
) -> Verdict:
    """LOSSY: the output does not have the target's law. Accept what the target finds typical enough.

    A node counts if its parent does and its probability in target_laws [n + 1, vocab] exceeds min(epsilon,
    delta * exp(-entropy of its row)) (Medusa, arXiv 2401.10774, section 2.3.1). The longest such path wins,
    of several the most likely one. What follows it is drawn from the target. Entropy is in nats.
    """
    tokens, parents = draft.tokens.tolist(), draft.parents
    thresholds: dict[int, float] = {}
    ranks = {-1: (0, 0.0)}  # of each accepted node: its depth, then its path's log-probability
    for node, parent in enumerate(parents):
        if parent not in ranks:
            continue
        law = target_laws[parent + 1]
        if parent not in thresholds:
            entropy = float(torch.special.entr(law).sum())
            thresholds[parent] = min(epsilon, delta * math.exp(-entropy))
        chance = float(law[tokens[node]])
        if chance > thresholds[parent]:
            depth, score = ranks[parent]
            ranks[node] = (depth + 1, score + math.log(chance))
    last = max(ranks, key=ranks.__getitem__)
    path = path_to(parents, last)
    next_token = draw(target_laws[last + 1], noise, pos + len(path))
    return Verdict(path, next_token, recovered=last in parents)
