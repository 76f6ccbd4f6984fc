"""Who has which slots of the KV cache: one pool, shared by all sequences and addressed by position.

A sequence owns blocks of BLOCK slots; position `pos` lives in slot `blocks[pos // BLOCK] * BLOCK + pos %
BLOCK`. Rolling back is forgetting: positions from `kv_len` on are simply overwritten. The allocator keeps a
sequence's blocks in one run where it can, because a run is read as a view, without a copy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 32


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order of position."""

    blocks: list[int] = field(default_factory=list)
    run: bool = True  # blocks are consecutive
    known: int = 0  # how many blocks, from the first on, others can find by what they hold

    @property
    def capacity(self) -> int:
        """How many positions have a slot."""
        return len(self.blocks) * BLOCK

    def slots(self, start: int, stop: int) -> slice | Tensor:
        """Return the slots of positions start … stop - 1: a slice where they are one run, else int64 [stop -
        start].
        """
        assert 0 <= start <= stop <= self.capacity
        if self.run:
            first = self.blocks[0] * BLOCK if self.blocks else 0
            return slice(first + start, first + stop)
        return self.slot_ids(start, stop)

    def slot_ids(self, start: int, stop: int) -> Tensor:
        """Return the slots of positions start … stop - 1, int64 [stop - start]."""
        pos = torch.arange(start, stop)
        return torch.tensor(self.blocks, dtype=torch.int64)[pos // BLOCK] * BLOCK + pos % BLOCK


def extend_keys(keys: list[bytes], tokens: Seq[int]) -> None:
    """Append the keys of the full blocks of `tokens` that `keys` lacks; a key names a block and all before
    it.
    """
    for start in range(len(keys) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        block = array("q", tokens[start : start + BLOCK]).tobytes()
        before = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(before + block, digest_size=16).digest())


class BlockPool:
    """Who uses which block, and what text the blocks hold. Plain bookkeeping, no tensors.

    A block that nobody uses keeps its text until it is needed, so that a request which begins like an earlier
    one finds that part done. Only full blocks are shared, and nobody writes into a full block.
    """

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}  # unused blocks that hold known text, longest unused first
        self._empty = set(range(blocks))  # unused blocks that hold none
        self.free = blocks

    @property
    def size(self) -> int:
        """All blocks, free or not."""
        return len(self._users)

    @property
    def tokens(self) -> int:
        """All slots, free or not."""
        return self.size * BLOCK

    @staticmethod
    def needed(length: int) -> int:
        """How many blocks hold `length` positions."""
        return -(-length // BLOCK)

    def grow(self, table: BlockTable, length: int) -> bool:
        """Give `table` slots for positions 0 … length - 1; False, and nothing taken, if the pool is short."""
        missing = self.needed(length) - len(table.blocks)
        if missing > self.free:
            return False
        for _ in range(missing):
            block = self._next(table)
            self._kept.pop(block, None)
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]
            self._use(table, block)
        return True

    def shrink(self, table: BlockTable, length: int) -> None:
        """Give back the blocks that positions 0 … length - 1 do not need."""
        spare = table.blocks[self.needed(length) :]
        if not spare:
            return
        for block in reversed(spare):  # the end of a text is forgotten before its beginning
            self._users[block] -= 1
            if self._users[block] == 0:
                self.free += 1
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._empty.add(block)
        del table.blocks[-len(spare) :]
        table.known = min(table.known, len(table.blocks))
        table.run = all(b == a + 1 for a, b in zip(table.blocks, table.blocks[1:], strict=False))

    def find(self, keys: Seq[bytes]) -> list[int]:
        """Return the blocks that hold the longest known beginning of a text."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def unused(self, blocks: Seq[int]) -> int:
        """How many of these blocks are free."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, table: BlockTable, blocks: Seq[int]) -> None:
        """Begin an empty table with known blocks."""
        assert not table.blocks
        for block in blocks:
            self._kept.pop(block, None)
            self._use(table, block)
        table.known = len(blocks)

    def remember(self, table: BlockTable, keys: Seq[bytes]) -> None:
        """Note what the first blocks of a table, which are full, hold: the keys of their text."""
        for block, key in zip(table.blocks[table.known :], keys[table.known :], strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key
        table.known = max(table.known, len(keys))

    def _use(self, table: BlockTable, block: int) -> None:
        self.free -= self._users[block] == 0
        self._empty.discard(block)
        self._users[block] += 1
        table.run = table.run and (not table.blocks or block == table.blocks[-1] + 1)
        table.blocks.append(block)

    def _next(self, table: BlockTable) -> int:
        """The block after the last one; else the middle of the longest run of empty blocks; else the oldest
        text.

        The middle leaves room for the neighbour on the left to grow in one run.
        """
        if table.blocks:
            after = table.blocks[-1] + 1
            if after in self._empty:
                return after
        start, length = self._longest_run()
        if length == 0:
            return next(iter(self._kept))
        return start if start == 0 else start + length // 2

    def _longest_run(self) -> tuple[int, int]:
        best, best_length, length, before = 0, 0, 0, -2
        for block in sorted(self._empty):
            length = length + 1 if block == before + 1 else 1
            before = block
            if length > best_length:
                best, best_length = block - length + 1, length
        return best, best_length
