"""Medusa: heads that guess the next tokens side by side (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile
from math import log

import torch
from torch import Tensor

from foredraft.engine.sequence import Sequence
from foredraft.models.fast_head import FastMedusa
from foredraft.models.heads import MedusaHeads
from foredraft.propose.guess import draw_of, foreseen
from foredraft.types import NO_DRAFT, Draft, Needs, Verdict

RANKS = 8  # likeliest tokens of a head that are looked at

Ranks = tuple[int, ...]


class MedusaProposer:
    """Drafts a tree from the last hidden state: level d holds guesses of head d, whatever stands above them.

    The tree is grown anew at every step from the heads' own probabilities, or with `tree` it is fixed: paths
    of ranks, best first, as calibrate() finds them. lm_head: [draft vocab, hidden], rows of the target's, or
    None for heads with projections of their own; target_ids: int64 [draft vocab], which tokens.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        last_layer: int,
        lm_head: Tensor | None,
        target_ids: Tensor,
        tree: tuple[Ranks, ...] | None = None,
    ) -> None:
        self.target_ids, self.tree = target_ids, tree
        # From hidden states [rows, hidden] to float32 [rows, heads, draft vocab].
        self._logits: Callable[[Tensor], Tensor] = heads.logits
        if not heads.own:
            assert lm_head is not None
            self._logits = FastMedusa(heads, lm_head)
        self.needs = Needs(hidden_layers=(last_layer,))
        self._hidden: dict[str, tuple[int, Tensor]] = {}  # of a request: a position, and its hidden state

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one tree a sequence; the heads run once for all of them."""
        drafts = dict.fromkeys(seqs, NO_DRAFT)
        sizes = {
            seq: budget
            for seq, budget in zip(seqs, budgets, strict=True)
            if min(budget, seq.levels_left) > 0 and self._at(seq) == len(seq.tokens) - 2
        }
        if sizes:
            hidden = torch.stack([self._hidden[seq.request_id][1] for seq in sizes])
            logits = self._logits(hidden)
            for rows, seq in zip(logits, sizes, strict=True):
                rows.copy_(foreseen(seq, rows, range(len(rows)), self.target_ids))
            logs = torch.log_softmax(logits, -1)
            best, ids = logs.topk(min(RANKS, logs.shape[-1]), -1)  # [seqs, heads, ranks]
            tokens = self.target_ids[ids]
            for place, (seq, size) in enumerate(sizes.items()):
                scores = best[place, : seq.levels_left].tolist()
                paths = grow(scores, size) if self.tree is None else _fitting(self.tree, size, len(scores))
                drafts[seq] = replace(tree_of(paths, tokens[place].tolist()), draw=draw_of(seq.params))
        return list(drafts.values())

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Keep the hidden state from which the newest token came."""
        for seq, (last,) in zip(seqs, hidden, strict=True):
            self._hidden[seq.request_id] = (seq.kv_len - 1, last[-1].clone())  # not the whole step's

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._hidden.pop(request_id, None)

    def _at(self, seq: Sequence) -> int:
        """The position of the state that is kept for a request, -2 if none is: that of no token's."""
        return self._hidden[seq.request_id][0] if seq.request_id in self._hidden else -2


def grow(scores: Seq[Seq[float]], size: int) -> list[Ranks]:
    """Return the `size` likeliest paths of ranks, best first; scores: log-probabilities [heads][ranks],
    falling.

    A path's chance is the product along it, so a parent comes before its children.
    """
    heap: list[tuple[float, Ranks]] = [(-scores[0][0], (0,))] if scores else []
    paths: list[Ranks] = []
    while heap and len(paths) < size:
        score, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(scores[depth - 1]):
            next_score = score + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(heap, (next_score, (*path[:-1], rank + 1)))
        if depth < len(scores):
            heapq.heappush(heap, (score - scores[depth][0], (*path, 0)))
    return paths


def calibrate(hits: Seq[Seq[float]], size: int) -> tuple[Ranks, ...]:
    """Return the fixed tree with the most expected accepted nodes (arXiv 2401.10774, section 2.3.3).

    hits[head][rank]: how often the head's token of that rank was the target's, measured.
    """
    logs = [[log(hit) for hit in sorted(row, reverse=True) if hit > 0] for row in hits]
    return tuple(grow(list(takewhile(bool, logs)), size))


def tree_of(paths: Seq[Ranks], tokens: Seq[Seq[int]]) -> Draft:
    """Return the draft of some paths, parents before children; tokens: [heads][ranks]."""
    if not paths:
        return NO_DRAFT
    node_of = {path: node for node, path in enumerate(paths)}
    ids = torch.tensor([tokens[len(path) - 1][path[-1]] for path in paths])
    return Draft(ids, tuple(node_of[path[:-1]] if len(path) > 1 else -1 for path in paths))


def _fitting(tree: Seq[Ranks], size: int, depth: int) -> list[Ranks]:
    return [path for path in tree if len(path) <= depth][:size]
