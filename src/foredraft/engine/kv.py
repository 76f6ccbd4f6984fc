"""The KV cache: keys and values of every layer, by slot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from math import prod
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.errors import CapacityError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one attention layer: KV heads, and the width of a key and of a value."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one position takes in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVCache:
    """Keys [slots, heads, key_dim] and values [slots, heads, value_dim] of every layer.

    Block `padding`, the last, is in no pool: what padding rows write goes there. turned: keys are [blocks,
    heads, key_dim / 2, BLOCK, 2] instead and values [blocks, heads, BLOCK / 2, value_dim, 2], so that a query
    meets all keys of a block at once and values are mixed by pairs (models/kernels).
    """

    def __init__(
        self,
        layers: Seq[LayerShape],
        tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        turned: bool = False,
    ) -> None:
        self.turned, self.shapes = turned, tuple(layers)
        blocks = BlockPool.needed(tokens)
        size = sum(layer.bytes_per_token(dtype) for layer in layers) * blocks * BLOCK
        self._alike: list[tuple[Tensor, Tensor]] = []  # keys and values of all layers of one shape
        held = {}
        try:
            for shape in dict.fromkeys(layers):
                places = (self.shapes.count(shape), blocks + 1)
                keys, values = (_empty((*places, *rest), dtype, device) for rest in _layouts(shape, turned))
                self._alike.append((keys, values))
                held[shape] = zip(keys, values, strict=True)
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapacityError(
                f"a KV cache of {tokens} tokens needs {size / 2**30:.2f} GiB on {device}, "
                "which could not be had: lower max_seqs or max_len"
            ) from error
        pairs = [next(held[shape]) for shape in layers]
        if not turned:
            pairs = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in pairs]
        self.keys, self.values = [keys for keys, _ in pairs], [values for _, values in pairs]
        self.pool, self.padding = BlockPool(blocks), blocks
        self.device = torch.device(device)

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """Where keys and values of each layer are: int64 [layers, 2]."""
        pairs = zip(self.keys, self.values, strict=True)
        return np.array([[part.data_ptr() for part in pair] for pair in pairs], np.int64)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target` (int64 [n] each) in every layer."""
        if self.turned:  # on a CPU, where torch takes several times as long for that many dimensions
            for keys, values in self._bits:
                held = [
                    (keys[_key_at(slot)].copy(), values[_value_at(slot)].copy()) for slot in source.tolist()
                ]
                for slot, (key, value) in zip(target.tolist(), held, strict=True):
                    keys[_key_at(slot)], values[_value_at(slot)] = key, value
            return
        source, target = source.to(self.device), target.to(self.device)
        for pair in self._alike:
            for store in pair:
                by_slot = store.flatten(1, 2)
                by_slot[:, target] = by_slot[:, source]

    @cached_property
    def _bits(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """What turned layers of one shape hold, as integers: pairs of keys, and values."""
        one, two = {2: (torch.int16, torch.int32), 4: (torch.int32, torch.int64)}[self.keys[0].itemsize]
        return [
            (keys.view(two).squeeze(-1).numpy(), values.view(one).numpy()) for keys, values in self._alike
        ]

    def write(self, layer: int, slots: slice | Tensor, key: Tensor, value: Tensor) -> None:
        """Write key [n, heads, key_dim] and value [n, heads, value_dim] to slots, int64 [n] or, if keys are
        not turned, a slice.
        """
        if not self.turned:
            self.keys[layer][slots], self.values[layer][slots] = key, value
            return
        assert isinstance(slots, Tensor)
        block, place = slots // BLOCK, slots % BLOCK
        self.keys[layer][block, :, :, place] = key.reshape(*key.shape[:-1], -1, 2)
        self.values[layer][block, :, place // 2, :, place % 2] = value

    def read_blocks(self, layer: int, blocks: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [positions, heads, key_dim] and values [positions, heads, value_dim] of whole blocks, a
        slice or int64 [n]: views where they are a slice of slots.
        """
        keys, values = self.keys[layer], self.values[layer]
        if not self.turned:
            return blocks_of(keys, blocks), blocks_of(values, blocks)
        return (
            keys[blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1),
            values[blocks].permute(0, 2, 4, 1, 3).flatten(0, 2),
        )


def _layouts(shape: LayerShape, turned: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how one block of keys and one of values are laid out."""
    if turned:
        return (shape.heads, shape.key_dim // 2, BLOCK, 2), (shape.heads, BLOCK // 2, shape.value_dim, 2)
    return (BLOCK, shape.heads, shape.key_dim), (BLOCK, shape.heads, shape.value_dim)


def _key_at(slot: int) -> tuple[Any, ...]:
    """Where a slot is in turned keys of several layers."""
    return (slice(None), slot // BLOCK, slice(None), slice(None), slot % BLOCK)


def _value_at(slot: int) -> tuple[Any, ...]:
    """Where a slot is in turned values of several layers."""
    return (slice(None), slot // BLOCK, slice(None), slot % BLOCK // 2, slice(None), slot % 2)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # Zeros, because slots that hold nothing yet are read, masked, beside others: NaN would show through.
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch.zeros, this takes pages that the system zeroes when they are first used, and small ones:
    # numpy asks for large ones, of which each layer's first position would take one.
    pages = mmap(-1, max(prod(shape) * dtype.itemsize, 1))
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).view(shape)


def blocks_of(store: Tensor, blocks: slice | Tensor) -> Tensor:
    """Return whole blocks of a store [slots, heads, dim] of a KVCache, [positions, heads, dim]."""
    by_block = store.view(-1, BLOCK, *store.shape[1:])
    found = by_block[blocks] if isinstance(blocks, slice) else by_block.index_select(0, blocks)
    return found.flatten(0, 1)
