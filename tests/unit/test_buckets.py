"""Steps in buckets give the slow twin's numbers, run as they are or recorded and replayed; padding leaves no
trace.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tape
import tiny_models
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.models.attention import visible
from foredraft.models.bucketed import BucketedCausal
from foredraft.models.buckets import Bucket, Inputs, packed, recorder, seen_bits
from foredraft.types import NO_DRAFT, Draft, chain
from worlds import World, compare, plain, same, some_draft

KINDS = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}}


@pytest.fixture(scope="module", params=sorted(KINDS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(request.param, tmp_path_factory.mktemp("model"), **KINDS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("seed", range(2))
def test_growing_texts_with_chains_and_trees(path: Path, seed: int) -> None:
    """Run as it is and recorded, the slow twin decides."""
    compare([plain(path), BucketedCausal(plain(path)), BucketedCausal(plain(path), tape.record)], seed, 12)


def test_nodes_fed_in_an_earlier_pass(llama: Path) -> None:
    """As a draft model feeds its own trees, level by level: each node sees its ancestors among them."""
    tree = Draft(torch.tensor([4, 5, 6, 7, 8, 9]), (-1, -1, 0, 1, 2, 0))
    first = Draft(tree.tokens[:3], tree.parents[:3])
    outs = []
    for target in (plain(llama), BucketedCausal(plain(llama), tape.record)):
        world = World(target, [[5] * 31, [6] * 40, [7, 8]])
        world.step([0, 1, 2], [first, NO_DRAFT, first])
        feeds = []
        for text, table, cached in zip(world.texts, world.tables, (3, 0, 1), strict=True):
            assert world.kv.pool.grow(table, len(text) + len(tree))
            feeds.append(Feed([], len(text), table, tree, cached))
        feeds[1] = Feed([9], 40, world.tables[1], tree)
        outs.append(target.forward(make_batch(feeds), world.kv).logits)
    same(outs[1], outs[0])


def test_what_does_not_fit_a_bucket_runs_as_it_comes(llama: Path) -> None:
    """A prompt, a step of too many rows, one of too many sequences; few rows of a prompt do fit."""
    rng = random.Random(1)
    texts = [[rng.randrange(97) for _ in range(20)] for _ in range(40)]
    for lengths in ([50], [33, 1], [1] * 33, [32], [5, 1]):
        outs = []
        for target in (plain(llama), BucketedCausal(plain(llama), tape.record)):
            world = World(target, [text[:12] for text in texts[: len(lengths)]])
            feeds = []
            for length, table in zip(lengths, world.tables, strict=True):
                assert world.kv.pool.grow(table, 11 + length)
                feeds.append(Feed([7 + i % 90 for i in range(length)], 11, table, NO_DRAFT))
            batch = make_batch(feeds)
            assert (Bucket.of(batch) is None) == (max(lengths) > 32 or len(lengths) > 32)
            outs.append(target.forward(batch, world.kv, (1,)))
        same(outs[1].logits, outs[0].logits)
        torch.testing.assert_close(outs[1].hidden[0], outs[0].hidden[0], atol=1e-4, rtol=1e-4)


def step_of(world: World) -> Batch:
    """Three sequences of one, three and four rows: a bucket of four by four."""
    drafts = [NO_DRAFT, chain([4, 5]), Draft(torch.tensor([1, 2, 3]), (-1, -1, 0))]
    feeds = []
    for text, table, draft in zip(world.texts, world.tables, drafts, strict=False):
        assert world.kv.pool.grow(table, len(text) + len(draft))
        feeds.append(Feed(text[-1:], len(text) - 1, table, draft))
    return make_batch(feeds)


def test_padding_writes_to_no_slot_of_a_sequence_and_reads_none(llama: Path) -> None:
    """Every slot that the step does not own is poison: it neither changes nor shows."""
    texts = [[5] * 40, [6] * 31, [7] * 70, [8] * 50]  # the last one does not take part
    targets = plain(llama), BucketedCausal(plain(llama), tape.record)
    worlds = [World(target, texts) for target in targets]
    batch = step_of(worlds[0])
    wanted = targets[0].forward(batch, worlds[0].kv)
    for _ in range(2):  # recorded, then replayed
        batch, kv = step_of(worlds[1]), worlds[1].kv
        own = {block for span in batch.spans for block in span.table.blocks}
        written = {int(slot) for s in batch.spans for slot in s.table.slot_ids(s.first_slot, s.length)}
        others = [b * BLOCK + i for b in range(kv.pool.size + 1) if b not in own for i in range(BLOCK)]
        stores = [*kv.keys, *kv.values]
        for store in stores:
            store[others] = torch.nan
        before = [store.clone() for store in stores]
        same(targets[1].forward(batch, kv).logits, wanted.logits)
        padding = set(range(kv.padding * BLOCK, (kv.padding + 1) * BLOCK))
        kept = sorted(set(range(len(stores[0]))) - written - padding)
        for old, new in zip(before, stores, strict=True):
            torch.testing.assert_close(new[kept], old[kept], rtol=0, atol=0, equal_nan=True)


def test_what_is_handed_out_stays_as_it_is(llama: Path) -> None:
    """Outputs of a recorded pass are overwritten by the next one; what the caller got is not."""
    target = BucketedCausal(plain(llama), tape.record)
    world = World(target, [[5] * 40, [6] * 31, [7] * 70])
    first = target.forward(step_of(world), world.kv, (0, -1))
    kept = [part.clone() for part in (first.logits, *first.hidden)]
    for text in world.texts:
        text[-1] = 11
    second = target.forward(step_of(world), world.kv, (0, -1))
    assert not torch.equal(first.logits, second.logits)
    assert all(torch.equal(*pair) for pair in zip((first.logits, *first.hidden), kept, strict=True))


def test_a_bucket_is_recorded_once_a_cache_and_forgotten_with_it(llama: Path) -> None:
    recorded = []

    def counted(work: Any) -> Any:
        recorded.append(work)
        return tape.record(work)

    target = BucketedCausal(plain(llama), counted)
    world = World(target, [[5] * 40, [6] * 31, [7] * 70])
    recorded.clear()
    for layers, count in (((), 1), ((), 1), ((1,), 2), ((), 2)):
        target.forward(step_of(world), world.kv, layers)
        assert len(recorded) == count
    other = World(target, [[5] * 40, [6] * 31, [7] * 70])
    recorded.clear()
    target.forward(step_of(other), other.kv)
    assert len(recorded) == 1
    assert len(target._passes._known) == 2
    del other, world
    gc.collect()
    assert len(target._passes._known) == 0


def test_all_steps_of_a_bucket_are_the_same_operations(llama: Path) -> None:
    """Whatever their numbers, and the host waits for none of them."""
    target = BucketedCausal(plain(llama))
    worlds = [World(target, texts) for texts in ([[5] * 40, [6] * 31, [7] * 70], [[1] * 66, [2], [3] * 3])]
    seen = []
    for world in worlds:
        batch = step_of(world)
        with tape.Tape() as tape_of_step:
            target.forward(batch, world.kv, (1,))
        assert not tape_of_step.reads
        seen.append(tape_of_step.names)
    assert seen[0] == seen[1]


def test_bits_say_what_masks_say() -> None:
    """Of trees whose first nodes were fed before, too."""
    rng, table = random.Random(2), BlockTable([3, 1, 2, 0], run=False)
    for _ in range(200):
        draft, cached = some_draft(rng), 0
        pending, kv_len = rng.randrange(1, 33), rng.randrange(60)
        if len(draft) > 1 and rng.random() < 0.5:
            pending, cached = 0, rng.randrange(1, len(draft))
        feed = Feed([1] * pending, kv_len, table, draft, cached)
        span = make_batch([feed]).spans[0]
        seen = torch.ones(span.rows, span.length, dtype=torch.bool)
        for row, bits in enumerate(seen_bits(span)):
            seen[row, kv_len:] = torch.tensor([bool(bits >> j & 1) for j in range(span.length - kv_len)])
        assert torch.equal(seen, visible(span, torch.zeros(0), None))


def test_the_numbers_of_a_bucket() -> None:
    """Worked out by hand: padding rows, padding blocks, a padding sequence."""
    tables = [BlockTable([4, 2]), BlockTable([1]), BlockTable([0])]
    tree = Draft(torch.tensor([7, 8]), (-1, -1))
    batch = make_batch(
        [Feed([9], 33, tables[0], tree), Feed([5], 2, tables[1], NO_DRAFT), Feed([6], 0, tables[2], None)]
    )
    shape = Bucket(seqs=4, rows=4, blocks=2)
    assert Bucket.of(batch) == shape
    inputs = Inputs(shape, torch.zeros(0, 2))
    inputs.fill(batch, 6, torch.arange(10.0).view(5, 2))
    pad = [192 + i for i in range(16)]
    assert inputs.tokens.tolist() == [9, 7, 8, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [33, 34, 34, 0, 2, *[0] * 11]
    assert inputs.slots.tolist() == [65, 66, 67, pad[3], 34, *pad[5:8], 0, *pad[9:]]
    assert inputs.seen.tolist() == [0b1, 0b11, 0b101, 1, *[1] * 12]
    assert inputs.blocks.tolist() == [4, 2, 1, 1, 0, 0, 6, 6]
    assert inputs.base.tolist() == [33, 2, 0, 0]
    assert inputs.real.tolist() == [0, 1, 2, 4, 8, *[0] * 11]
    assert inputs.features[[0, 1, 2, 4, 8]].flatten().tolist() == list(range(10))
    assert inputs.wanted.tolist() == [0, 1, 2, 4, *[0] * 12]
    assert len(packed(batch, shape, 6)) == 6 * 16 + 8 + 4


def test_a_cpu_records_nothing() -> None:
    def work() -> tuple[Tensor, ...]:
        return ()

    assert recorder(torch.device("cpu"))(work) is work
