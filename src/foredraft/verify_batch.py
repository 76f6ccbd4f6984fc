"""The rules of verify.py for many sequences at once, on the device: one transfer to the host for all of them.

Each function takes a padded batch of B trees with up to N nodes and says of each what its twin in verify.py
says. On a CPU the twins are faster: they look at single numbers until a guess is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from foredraft.sampling import Noise, argmax, draw_rows
from foredraft.tree import children, depths
from foredraft.types import Draft, Verdict
from foredraft.verify import refuse_coupled

Rule = Literal["greedy", "exact", "matched"]


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to verify: the arguments of the rules in verify.py.

    rows: [n + 1, vocab], target logits for "greedy", target laws for the other rules.
    """

    draft: Draft
    rows: Tensor
    noise: Noise
    pos: int


@dataclass(frozen=True, slots=True)
class Forest:
    """B trees padded to N nodes. Padding has parent -2, which is nobody's child, and token 0.

    tokens, parents: int64 [B, N]. rows: [B, N + 1, vocab]. keys: int64 [B, N + 1], the noise of the token
    after a path of that length. uniforms: float64 [B, N], what decides the acceptance of each node.
    laws: draft laws [B, N + 1, vocab], zero for a fixed draft. fixed, distinct: bool [B, 1], the draw.
    """

    tokens: Tensor
    parents: Tensor
    rows: Tensor
    keys: Tensor
    uniforms: Tensor
    laws: Tensor | None
    fixed: Tensor
    distinct: Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """path: int64 [B, N], -1 after its end. next_token: int64 [B]. recovered: bool [B]."""

    path: Tensor
    next_token: Tensor
    recovered: Tensor


def verify_batch(rules: Sequence[Rule], jobs: Sequence[Job]) -> list[Verdict]:
    """Verify each job by its rule, on the device of its rows; the verdicts are those of verify.py."""
    places: list[int] = []
    found: list[Verdicts] = []
    for rule in dict.fromkeys(rules):
        alike = [place for place, its in enumerate(rules) if its == rule]
        forest = make_forest([jobs[place] for place in alike], with_laws=rule == "exact")
        places += alike
        found.append(_RULES[rule](forest))
    verdicts = dict(zip(places, to_host(found), strict=True))
    return [verdicts[place] for place in range(len(jobs))]


def to_host(batches: Sequence[Verdicts]) -> list[Verdict]:
    """Bring all batches to the host, one after another, in one transfer."""
    columns = [torch.column_stack([b.path, b.next_token, b.recovered]) for b in batches]
    values = iter(torch.cat([part.flatten() for part in columns]).tolist() if columns else ())
    verdicts = []
    for seqs, width in (part.shape for part in columns):
        for _ in range(seqs):
            *path, token, recovered = islice(values, width)
            verdicts.append(Verdict(tuple(node for node in path if node >= 0), token, bool(recovered)))
    return verdicts


def make_forest(jobs: Sequence[Job], *, with_laws: bool) -> Forest:
    """Pad jobs to one batch. The laws of drafts are left out unless a rule needs them."""
    device, vocab = jobs[0].rows.device, jobs[0].rows.shape[-1]
    drafts = [job.draft for job in jobs]
    nodes = max(len(draft) for draft in drafts)
    laws = None
    for draft in drafts if with_laws else ():
        refuse_coupled(draft)
    if with_laws and any(draft.laws is not None for draft in drafts):
        none = torch.zeros(0, vocab, device=device)
        laws = _stack([none if d.laws is None else d.laws.to(device) for d in drafts], nodes + 1)
    missing = [nodes - len(draft) for draft in drafts]
    tokens = [[*d.tokens.tolist(), *[0] * more] for d, more in zip(drafts, missing, strict=True)]
    parents = [[*d.parents, *[-2] * more] for d, more in zip(drafts, missing, strict=True)]
    keys = [[job.noise.key(job.pos + depth) for depth in range(nodes + 1)] for job in jobs]
    uniforms = [_uniforms(job, nodes) if with_laws else [0.0] * nodes for job in jobs]
    return Forest(
        tokens=_put(tokens, device),
        parents=_put(parents, device),
        rows=_stack([job.rows for job in jobs], nodes + 1),
        keys=_put(keys, device),
        uniforms=_put(uniforms, device, torch.float64),
        laws=laws,
        fixed=_put([[draft.draw == "fixed"] for draft in drafts], device, torch.bool),
        distinct=_put([[draft.draw == "distinct"] for draft in drafts], device, torch.bool),
    )


def _put(values: list[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to a device; the host does not wait, neither for the copy nor for what runs there."""
    there = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def _stack(parts: Sequence[Tensor], rows: int) -> Tensor:
    """Pad [n, vocab] tensors with zero rows to [B, rows, vocab], of the widest of their types: processors
    give float32 beside what a model said in bfloat16.
    """
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    stacked = parts[0].new_zeros(len(parts), rows, parts[0].shape[-1], dtype=dtype)
    for seq, part in enumerate(parts):
        stacked[seq, : len(part)] = part
    return stacked


def _uniforms(job: Job, nodes: int) -> list[float]:
    """Return what decides the acceptance of each node; 0 for the padding, which is never asked."""
    parents = job.draft.parents
    found = [0.0] * nodes
    at = depths(parents)
    for siblings in children(parents):
        for sibling, node in enumerate(siblings):
            found[node] = job.noise.uniform(job.pos + at[node] - 1, sibling)
    return found


def batch_greedy(forest: Forest) -> Verdicts:
    """Twin of verify_greedy; forest.rows are logits."""
    best = argmax(forest.rows)  # [B, N + 1]
    return _follow(forest, lambda row, depth: best.gather(1, row).squeeze(1))


def batch_matched(forest: Forest) -> Verdicts:
    """Twin of verify_matched."""
    every = torch.arange(len(forest.rows), device=forest.rows.device)
    return _follow(
        forest, lambda row, depth: draw_rows(forest.rows[every, row.squeeze(1)], forest.keys[:, depth])
    )


def _follow(forest: Forest, choose: Callable[[Tensor, int], Tensor]) -> Verdicts:
    """Walk all trees down at once; choose(row [B, 1], accepted so far) says the token of each sequence."""
    tokens, parents = forest.tokens, forest.parents
    path = torch.full_like(parents, -1)
    node = parents.new_full((len(parents), 1), -1)
    walking = torch.ones_like(node, dtype=torch.bool)
    next_token = choose(node + 1, 0)
    for depth in range(parents.shape[1]):
        fits = (parents == node) & (tokens == next_token.unsqueeze(1)) & walking
        walking = fits.any(-1, keepdim=True)
        first = fits.int().argmax(-1, keepdim=True)
        path[:, depth] = torch.where(walking, first, -1).squeeze(1)
        node = torch.where(walking, first, node)
        next_token = torch.where(walking.squeeze(1), choose(node + 1, depth + 1), next_token)
    return Verdicts(path, next_token, (parents == node).any(-1))


def batch_exact(forest: Forest) -> Verdicts:
    """Twin of verify_exact: one pass over the nodes, since siblings come in order and children later.

    A sequence asks node n when n continues the node where it stands; that alone decides acceptance order.
    """
    batch, nodes = forest.parents.shape
    path = torch.full_like(forest.parents, -1)
    at = forest.parents.new_full((batch, 1), -1)  # the node where each sequence stands
    length = torch.zeros_like(at)
    target = forest.rows[:, 0].double()  # [B, vocab], what the next token has after the rejections so far
    guess = None if forest.laws is None else forest.laws[:, 0].double()
    for node in range(nodes):
        token = forest.tokens[:, node, None]
        asked = forest.parents[:, node, None] == at
        one_hot = torch.zeros_like(target).scatter_(1, token, 1.0)
        drawn_from = one_hot if guess is None else torch.where(forest.fixed, one_hot, guess)
        chance = forest.uniforms[:, node, None] * drawn_from.gather(1, token)
        accepted = asked & (chance < target.gather(1, token))
        rejected = asked & ~accepted
        path.scatter_(1, length, torch.where(accepted, node, path.gather(1, length)))
        at = torch.where(accepted, node, at)
        length = length + accepted
        left = _normalised((target - drawn_from).clamp_(min=0), target)
        target = torch.where(accepted, forest.rows[:, node + 1], torch.where(rejected, left, target))
        if guess is not None:
            assert forest.laws is not None
            rest = _normalised(guess * (1 - one_hot), guess)
            guess = torch.where(rejected & forest.distinct, rest, guess)
            guess = torch.where(accepted, forest.laws[:, node + 1], guess)
    next_token = draw_rows(target, forest.keys.gather(1, length).squeeze(1))
    return Verdicts(path, next_token, (forest.parents == at).any(-1))


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return weights [B, vocab] as laws, and the rows of `otherwise` where there is no weight."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


_RULES = {"greedy": batch_greedy, "exact": batch_exact, "matched": batch_matched}
