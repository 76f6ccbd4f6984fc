"""Steps of several sequences on one target after another, for tests that compare two."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.tree import is_chain
from foredraft.types import NO_DRAFT, Draft, chain

LAYERS: list[tuple[int, ...]] = [(), (0, 2), (-1,), (1, 3)]


def plain(path: Path) -> HFCausal:
    return load_target(path, dtype="float32", device="cpu", fused=False)


class World:
    """One model with one cache, texts in it whose blocks lie scattered, and what a step made of them."""

    def __init__(self, target: HFCausal, texts: list[list[int]]) -> None:
        self.target, self.texts = target, texts
        self.kv, self.tables = target.make_kv(256 * len(texts)), [BlockTable() for _ in texts]
        for start in range(0, max(len(text) for text in texts), BLOCK):
            for table, text in zip(self.tables, texts, strict=True):
                assert self.kv.pool.grow(table, min(start + BLOCK, len(text)))
        for table, text in zip(self.tables, texts, strict=True):
            if len(text) > 1:
                target.forward(make_batch([Feed(text[:-1], 0, table, None)]), self.kv)

    def step(self, seqs: list[int], drafts: list[Draft], layers: tuple[int, ...] = ()) -> Any:
        feeds = []
        for seq, draft in zip(seqs, drafts, strict=True):
            text, table = self.texts[seq], self.tables[seq]
            assert self.kv.pool.grow(table, len(text) + len(draft))
            feeds.append(Feed(text[-1:], len(text) - 1, table, draft))
        return self.target.forward(make_batch(feeds), self.kv, layers)


def some_draft(rng: random.Random) -> Draft:
    size = rng.choice([0, 0, 1, 3, 6, 12, 31])
    if size == 0:
        return NO_DRAFT
    tokens = [rng.randrange(97) for _ in range(size)]
    if rng.random() < 0.5:
        return chain(tokens)
    return Draft(torch.tensor(tokens), tuple(rng.randrange(-1, node) for node in range(size)))


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def some_texts(rng: random.Random) -> list[list[int]]:
    """Five, of lengths around the ends of blocks."""
    return [[rng.randrange(97) for _ in range(rng.choice([1, 2, 29, 31, 32, 33, 64, 90]))] for _ in range(5)]


def compare(targets: list[HFCausal], seed: int, steps: int) -> None:
    """Growing texts with chains and trees, in batches of any size, with any hidden states; the first target
    decides.
    """
    rng = random.Random(seed)
    texts = some_texts(rng)
    worlds = [World(target, [list(text) for text in texts]) for target in targets]
    for _ in range(steps):
        seqs = sorted(rng.sample(range(5), rng.randrange(1, 6)))
        drafts, layers = [some_draft(rng) for _ in seqs], rng.choice(LAYERS)
        wanted, *found = [world.step(seqs, drafts, layers) for world in worlds]
        for out in found:
            same(out.logits, wanted.logits)
            for mine, theirs in zip(out.hidden, wanted.hidden, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        for seq, draft in zip(seqs, drafts, strict=True):
            accepted = draft.tokens.tolist()[: rng.randrange(3)] if is_chain(draft.parents) else []
            for world in worlds:
                world.texts[seq] += [*accepted, 5]
