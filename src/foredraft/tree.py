"""Draft trees as `parents`: parents[node] is a smaller node, or -1 for the root. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor


def is_chain(parents: Sequence[int]) -> bool:
    """True when every node continues the one before it (also when there is none)."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node, 1 just below the root. The largest is the draft's `levels`."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return the nodes below the root (entry 0) and below each node (entry node + 1), in order.

    children((-1, 0, 0)) == [[0], [1, 2], [], []]
    """
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        found[parent + 1].append(node)
    return found


def path_to(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the nodes from the root side down to `node`, itself included; () for the root, -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return bool [n, n]: mask[node, other] is True when `other` is `node` or lies above it."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def prune_best(
    parents: Sequence[int], scores: Sequence[float], budget: int
) -> tuple[list[int], tuple[int, ...]]:
    """Keep the `budget` best nodes that hang together, best first from the root (arXiv 2406.16858, 4.2).

    scores[node]: joint confidence of the path to the node, such as its log-probability. Ties go to the
    smaller node. Returns the kept nodes in their old order, and their parents renumbered. Only for "fixed"
    drafts: choosing among drawn siblings by what was drawn would bias the law.
    """
    below = children(parents)
    frontier = [(-scores[node], node) for node in below[0]]
    heapq.heapify(frontier)
    kept: list[int] = []
    while frontier and len(kept) < budget:
        _, node = heapq.heappop(frontier)
        kept.append(node)
        for child in below[node + 1]:
            heapq.heappush(frontier, (-scores[child], child))
    kept.sort()
    new = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return kept, tuple(new[parents[node]] for node in kept)
