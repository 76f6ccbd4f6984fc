"""Blocks are never lost, never owned twice, and stay in runs where there is room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BLOCK, BlockPool, BlockTable
from foredraft.errors import CapacityError


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8 * BLOCK)), max_size=60))
@settings(max_examples=200)
def test_pool_keeps_its_books(moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(12)
    tables = [BlockTable() for _ in range(5)]
    for seq, length in moves:
        before = list(tables[seq].blocks)
        if length >= tables[seq].capacity:
            grown = pool.grow(tables[seq], length)
            assert grown == (tables[seq].capacity >= length)
            assert tables[seq].blocks[: len(before)] == before
        else:
            pool.shrink(tables[seq], length)
            assert tables[seq].blocks == before[: pool.needed(length)]
        owned = [block for table in tables for block in table.blocks]
        assert len(owned) == len(set(owned)) == pool.size - pool.free
        for table in tables:
            run = all(b == a + 1 for a, b in zip(table.blocks, table.blocks[1:], strict=False))
            assert table.run == run
            assert table.slot_ids(0, table.capacity).tolist() == [
                block * BLOCK + place for block in table.blocks for place in range(BLOCK)
            ]


def test_growing_beside_a_neighbour_stays_one_run() -> None:
    pool = BlockPool(64)
    first, second = BlockTable(), BlockTable()
    for length in range(BLOCK, 16 * BLOCK, BLOCK):
        assert pool.grow(first, length)
        assert pool.grow(second, length)
    assert first.run
    assert second.run
    assert first.slots(5, 70) == slice(5, 70)


@pytest.mark.parametrize("turned", [False, True])
def test_move_reads_before_it_writes(turned: bool) -> None:
    kv = KVCache([LayerShape(2, 6, 4)] * 2, 3 * BLOCK, dtype=torch.float32, turned=turned)
    key, value = torch.randn(2, 5, 2, 6), torch.randn(2, 5, 2, 4)
    places = torch.tensor([1, BLOCK + 3, 4, 2 * BLOCK, 5])
    for layer in range(2):
        kv.write(layer, places, key[layer], value[layer])
    kv.move(places[[0, 1, 3]], places[[4, 0, 1]])
    for layer in range(2):
        for blocks in (slice(0, 3), torch.arange(3)):
            keys, values = (store[places] for store in kv.read_blocks(layer, blocks))
            assert torch.equal(keys, key[layer, [1, 3, 2, 3, 0]])
            assert torch.equal(values, value[layer, [1, 3, 2, 3, 0]])


def test_too_large_a_cache_is_one_clear_error() -> None:
    with pytest.raises(CapacityError, match="GiB on cpu, which could not be had"):
        KVCache([LayerShape(64, 256, 256)] * 64, 10**12, dtype=torch.float32)
