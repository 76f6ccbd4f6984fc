"""Tree helpers against definitions that walk one node at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.tree import ancestor_mask, children, depths, is_chain, path_to, prune_best

examples = settings(max_examples=150, derandomize=True)


@st.composite
def trees(draw: Callable[[st.SearchStrategy[int]], int], max_nodes: int = 12) -> tuple[int, ...]:
    count = draw(st.integers(0, max_nodes))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(count))


def walk_up(parents: tuple[int, ...], node: int) -> list[int]:
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def test_a_worked_example() -> None:
    parents = (-1, -1, 0, 0, 2)
    assert depths(parents) == [1, 1, 2, 2, 3]
    assert children(parents) == [[0, 1], [2, 3], [], [4], [], []]
    assert path_to(parents, 4) == (0, 2, 4)
    assert path_to(parents, -1) == ()
    assert ancestor_mask(parents).int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_no_tree_at_all() -> None:
    assert depths(()) == []
    assert children(()) == [[]]
    assert ancestor_mask(()).shape == (0, 0)
    assert prune_best((), (), 5) == ([], ())
    assert is_chain(())


@examples
@given(trees())
def test_every_helper_follows_the_parents(parents: tuple[int, ...]) -> None:
    below, mask, at = children(parents), ancestor_mask(parents), depths(parents)
    assert sorted(node for nodes in below for node in nodes) == list(range(len(parents)))
    for node, parent in enumerate(parents):
        above = walk_up(parents, node)
        assert at[node] == len(above)
        assert path_to(parents, node) == tuple(above[::-1])
        assert node in below[parent + 1]
        assert mask[node].nonzero().flatten().tolist() == sorted(above)
    assert all(nodes == sorted(nodes) for nodes in below)
    assert is_chain(parents) == (parents == tuple(range(-1, len(parents) - 1)))
    assert torch.equal(mask, mask.tril())


@examples
@given(trees(), st.integers(0, 14), st.randoms(use_true_random=False))
def test_pruning_keeps_the_best_connected_nodes(
    parents: tuple[int, ...], budget: int, random: object
) -> None:
    """Joint scores fall along a path, so the best nodes are connected by themselves."""
    scores: list[float] = []
    for parent in parents:
        above = scores[parent] if parent >= 0 else 0.0
        scores.append(above - random.random())  # type: ignore[attr-defined]
    kept, new_parents = prune_best(parents, scores, budget)
    best = sorted(sorted(range(len(parents)), key=lambda node: -scores[node])[:budget])
    assert kept == best
    for place, node in enumerate(kept):
        assert new_parents[place] < place
        old_parent = parents[node]
        assert (kept[new_parents[place]] if new_parents[place] >= 0 else -1) == old_parent


@examples
@given(trees(), st.integers(0, 14), st.randoms(use_true_random=False))
def test_pruning_by_any_score_keeps_a_tree(parents: tuple[int, ...], budget: int, random: object) -> None:
    scores = [random.random() for _ in parents]  # type: ignore[attr-defined]
    kept, new_parents = prune_best(parents, scores, budget)
    assert len(kept) == len(new_parents) == min(budget, len(parents))
    assert all(parents[node] in {-1, *kept} for node in kept)
    assert all(-1 <= parent < place for place, parent in enumerate(new_parents))


def test_pruning_breaks_ties_by_the_smaller_node() -> None:
    assert prune_best((-1, -1, -1), [-1.0, -1.0, -1.0], 2) == ([0, 1], (-1, -1))
    assert prune_best((-1, -1, 1, 0), [-1.0, -0.5, -0.6, -1.2], 3) == ([0, 1, 2], (-1, -1, 1))
