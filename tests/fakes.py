"""Fake targets with known laws, and proposers that guess at random: fast enough for thousands of runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft.engine.batch import Batch, Span
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.protocols import ForwardOut
from foredraft.engine.sequence import Sequence
from foredraft.types import NO_DRAFT, Draft, Needs, Verdict


class ContextTarget:
    """A target whose logits depend on the whole text before a row, read back from the KV cache.

    Tokens are written to the cache as keys, so a slot that is lost, stale or moved wrongly changes the
    logits. `order` limits how many of the last tokens count (None: all), so that laws can be enumerated.
    """

    def __init__(
        self,
        vocab_size: int = 7,
        *,
        seed: int = 0,
        order: int | None = None,
        eos_ids: Seq[int] = (),
        max_len: int = 4096,
        sharpness: float = 1.5,
    ) -> None:
        self.vocab_size, self.order, self.max_len = vocab_size, order, max_len
        self.eos_ids = frozenset(eos_ids)
        self.device = torch.device("cpu")
        self.seed, self.sharpness = seed, sharpness
        self.forwards = 0
        self._memo: dict[tuple[int, ...], Tensor] = {}

    def make_kv(self, tokens: int) -> KVCache:
        """One layer that stores the token id of each slot."""
        return KVCache([LayerShape(1, 1, 1)], tokens, dtype=torch.float32)

    def logits(self, text: Seq[int]) -> Tensor:
        """The logits after `text`, [vocab]."""
        key = tuple(text if self.order is None else text[-self.order :])
        if key not in self._memo:
            generator = torch.Generator().manual_seed(hash((self.seed, key)) % 2**63)
            self._memo[key] = torch.randn(self.vocab_size, generator=generator) * self.sharpness
        return self._memo[key]

    def law(self, text: Seq[int]) -> Tensor:
        """The law after `text` at temperature 1, [vocab]."""
        return torch.softmax(self.logits(text).double(), -1)

    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """Write every row's token to its slot, then read each wanted row's text back from the slots."""
        self.forwards += 1
        store = kv.keys[0]
        for span in batch.spans:
            slots = span.table.slot_ids(span.first_slot, span.length)
            store[slots, 0, 0] = batch.token_ids[span.start : span.stop].float()
        wanted = set(batch.logit_rows.tolist())
        rows = [
            self.logits(store[_seen_slots(span, row), 0, 0].long().tolist())
            for span in batch.spans
            for row in range(span.start, span.stop)
            if row in wanted
        ]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        hidden = tuple(batch.token_ids.float()[:, None] + layer for layer in hidden_layers)
        return ForwardOut(logits, hidden)


def _seen_slots(span: Span, row: int) -> Tensor:
    """The slots of a row's text in order: the cache, the pending tokens, then the path to its node."""
    place = row - span.start
    if place < span.pending:
        return span.table.slot_ids(0, span.kv_len + place + 1)
    node = place - span.pending + span.cached_nodes
    path = []
    while node >= 0:
        path.append(span.kv_len + span.pending + node)
        node = span.parents[node]
    slots = span.table.slot_ids(0, span.length)
    return slots[list(range(span.kv_len + span.pending)) + path[::-1]]


class RandomProposer:
    """Guesses random trees, sometimes right, with any draw; a stand-in for every method."""

    def __init__(
        self, target: ContextTarget, *, draw: str = "fixed", seed: int = 0, chain: bool = False
    ) -> None:
        self.needs = Needs(draw=draw)  # type: ignore[arg-type]
        self.target, self.chain = target, chain
        self.generator = torch.Generator().manual_seed(seed)
        self.known: set[str] = set()

    def _integer(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self.known |= {seq.request_id for seq in seqs}
        return [self._one(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _one(self, seq: Sequence, budget: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        texts = [list(seq.tokens)]
        for node in range(min(budget, self._integer(budget + 1))):
            parent = node - 1 if self.chain else self._integer(node + 1) - 1
            if len(texts[parent + 1]) - len(seq.tokens) >= seq.levels_left:
                break
            right = int(self.target.logits(texts[parent + 1]).argmax())
            siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            token = right if right not in siblings else self._integer(self.target.vocab_size)
            tokens.append(token)
            parents.append(parent)
            texts.append([*texts[parent + 1], token])
        return Draft(torch.tensor(tokens), tuple(parents)) if tokens else NO_DRAFT

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        assert len(seqs) == len(verdicts) == len(hidden)

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)
