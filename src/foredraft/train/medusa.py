"""The loss of Medusa heads (Cai et al., arXiv 2401.10774, section 2.2.1), against the target's laws."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foredraft.models.heads import MedusaHeads
from foredraft.train.data import Batch, mean

DECAY = 0.8  # of a head's weight in the loss, per head


class MedusaLoss(nn.Module):
    """Cross-entropy of head i from each place against the target's law i + 1 places on.

    lm_head: [draft vocab, hidden], rows of the target's, which make its laws whatever heads project with.
    """

    def __init__(self, heads: MedusaHeads, lm_head: Tensor) -> None:
        super().__init__()
        self.heads, self.lm_head = heads, lm_head

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and of each head the share of places where its likeliest token is the target's."""
        answer, row = batch.places()
        left = batch.rows[answer] - 1 - row
        last = batch.states[answer, row, -self.lm_head.shape[1] :].float()
        with torch.no_grad():
            laws = torch.softmax(batch.logits(answer, row, self.lm_head), -1)
        guesses = self.heads(last)
        loss, right = last.new_zeros(()), []
        for head in range(guesses.shape[1]):
            judged = (left > head).nonzero().flatten()
            logits = self.heads.project(guesses[judged, head], head, self.lm_head).float()
            law = laws[judged + head + 1]
            loss = loss - DECAY**head * mean((law * torch.log_softmax(logits, -1)).sum(-1))
            right.append(mean((logits.argmax(-1) == law.argmax(-1)).float()))
        return loss, torch.stack(right)


@torch.no_grad()
def rank_hits(loss: MedusaLoss, batch: Batch, ranks: int) -> list[list[float]]:
    """Return how often the token of each rank of each head is the answer's own, [heads][ranks]."""
    answer, row = batch.places()
    last = batch.states[answer, row, -loss.lm_head.shape[1] :].float()
    wanted = batch.logits(answer, row, loss.lm_head).argmax(-1, keepdim=True)
    guesses, hits = loss.heads(last), []
    for head in range(guesses.shape[1]):
        judged = (batch.rows[answer] - 1 - row > head).nonzero().flatten()
        logits = loss.heads.project(guesses[judged, head], head, loss.lm_head)
        best = logits.topk(min(ranks, len(loss.lm_head)), -1).indices
        hits.append((best == wanted[judged + head + 1]).float().mean(0).tolist())
    return hits
