"""The kernels against torch in float32, and against themselves: a row's bits depend on the row alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.models import kernels, threads
from foredraft.models import rows as laid_out
from foredraft.models.attention import Attend, Head
from foredraft.types import NO_DRAFT, Draft, chain

TREE = (-1, -1, 0, 0, 1, 2, 4, 5)
VOCAB, SLOTS = 50, 2048


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def draft_of(parents: tuple[int, ...]) -> Draft:
    return Draft(torch.arange(len(parents)), parents) if parents else NO_DRAFT


def held(kv: KVCache) -> tuple[Tensor, Tensor]:
    """Keys and values of all slots, [slots, kv_heads, dim]."""
    return kv.read_blocks(0, slice(0, SLOTS // BLOCK))


class Texts:
    """A cache of one layer, filled with noise, and sequences in it whose blocks are no run."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, share: int) -> None:
        self.lengths, self.share = lengths, share
        shape = LayerShape(kv_heads, dim, dim)
        self.kv = KVCache([shape], SLOTS, dtype=torch.bfloat16, turned=True)
        self.kv.keys[0].copy_(bf16(*self.kv.keys[0].shape, seed=1))
        self.kv.values[0].copy_(bf16(*self.kv.values[0].shape, seed=2))
        order = torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = []
        for length in lengths:
            count = -(-(length + 16) // BLOCK)
            self.tables.append(BlockTable(order[:count], run=False))
            order = order[count:]

    def feeds(self, parents: list[tuple[int, ...]]) -> list[Feed]:
        return [
            Feed([0], length, table, draft_of(some))
            for length, table, some in zip(self.lengths, self.tables, parents, strict=True)
        ]

    def attend(self, feeds: list[Feed], head: Head = Head()) -> tuple[Tensor, ...]:  # noqa: B008
        """Attend from random rows; return them [rows, heads, dim] and what came out."""
        batch = make_batch(feeds)
        shape = self.kv.shapes[0]
        kv_heads, dim = shape.heads, shape.value_dim
        rows = len(batch.token_ids)
        query = bf16(rows, kv_heads * self.share, dim, seed=4)
        key, value = bf16(rows, kv_heads, dim, seed=5), bf16(rows, kv_heads, dim, seed=6)
        attend = Attend(batch, self.kv, torch.device("cpu"), torch.bfloat16)
        assert attend.rows is not None
        found = attend(0, *(part.transpose(0, 1) for part in (query, key, value)), head)
        return query, key, value, found


def wanted(texts: Texts, feeds: list[Feed], query: Tensor, head: Head) -> Tensor:
    """What each row makes of the slots it sees, written out in float32."""
    found, row = [], 0
    for feed in feeds:
        assert feed.draft is not None
        parents = feed.draft.parents
        for node in range(-1, len(parents)):
            path, above = [], node
            while above >= 0:
                path.append(feed.kv_len + 1 + above)
                above = parents[above]
            seen = [*range(feed.kv_len + 1), *reversed(path)]
            seen = seen[-head.window :] if head.window else seen
            slots = feed.table.slot_ids(0, feed.kv_len + 1 + len(parents))[seen]
            keys, values = (store[slots].float() for store in held(texts.kv))
            for number, one in enumerate(query[row].float()):
                kv_head = number // texts.share
                scale = head.scale or one.shape[0] ** -0.5
                law = torch.softmax(keys[:, kv_head] @ one * scale, 0)
                found.append(law @ values[:, kv_head])
            row += 1
    return torch.stack(found).view(query.shape)


@pytest.mark.parametrize(("kv_heads", "share", "dim"), [(3, 3, 64), (1, 4, 128), (4, 1, 32), (2, 2, 40)])
@pytest.mark.parametrize("head", [Head(), Head(scale=0.2, window=40)], ids=["full", "window"])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_attention(
    kv_heads: int, share: int, dim: int, head: Head, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laid_out, "_ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    texts = Texts([700, 3, 45, 511], kv_heads, dim, share)  # more than the keys held at a time
    for feeds in (texts.feeds([TREE, (), (-1, 0, 1), TREE[:4]]), texts.feeds([TREE, (), (), ()])[:1]):
        query, _, _, found = texts.attend(feeds, head)
        torch.testing.assert_close(found.float(), wanted(texts, feeds, query, head), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("length", [1, 7, 31, 32, 225, 513, 600])
def test_a_row_has_the_same_bits_alone_in_a_chain_and_in_a_tree(length: int) -> None:
    """A text of five tokens more, decoded one by one, at once, and as a branch among other branches."""
    texts = Texts([length, 99], 3, 64, 3)
    alone, query, key, value = [], bf16(6, 9, 64), bf16(6, 3, 64, seed=7), bf16(6, 3, 64, seed=8)

    def rows_of(feeds: list[Feed], which: list[int]) -> Tensor:
        """Feed rows; row i is token which[i] of the text, or noise where that is -1."""
        batch = make_batch(feeds)
        own = [torch.stack([part[i] if i >= 0 else bf16(*part[0].shape) for i in which]) for part in every]
        attend = Attend(batch, texts.kv, torch.device("cpu"), torch.bfloat16)
        return attend(0, *(part.transpose(0, 1) for part in own), Head())

    every = (query, key, value)
    table, other = texts.tables
    for token in range(6):
        alone.append(rows_of([Feed([0], length + token, table, NO_DRAFT)], [token])[0])
    for one, following in pairwise(alone):
        assert not torch.equal(one, following)
    at_once = rows_of([Feed([0], length, table, chain([0] * 5))], list(range(6)))
    assert torch.equal(at_once, torch.stack(alone))
    tree = Draft(torch.zeros(9, dtype=torch.int64), (-1, -1, 1, 0, 2, 4, 4, 6, 0))  # 1, 2, 4, 6, 7 are it
    mixed = [Feed([0], 99, other, draft_of(TREE)), Feed([0], length, table, tree)]
    found = rows_of(mixed, [-1] * 9 + [0, -1, 1, 2, -1, 3, -1, 4, 5, -1])
    branch = [9 + place for place in (0, 2, 3, 5, 7, 8)]
    assert torch.equal(found[branch], torch.stack(alone))


def product(x: Tensor, weight: Tensor, outputs: int, how: int) -> Tensor:
    """Rows [rows, inputs] times a weight, with what becomes of the sums."""
    tiles, board = kernels.laid_out(weight).contiguous(), np.zeros(16, np.int64)
    bias, out = torch.zeros(len(tiles) * kernels.WIDTH), x.new_zeros(len(x), outputs)
    told = (board.ctypes.data, 0, x.data_ptr(), *x.shape, tiles.data_ptr(), 0, bias.data_ptr())
    threads.share(
        kernels.product, (*told, outputs, out.data_ptr(), how), kernels.own_bytes(0, *x.shape), alone=True
    )
    return out


@pytest.mark.parametrize("rows", [1, 5, 8, 33, 150])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 2), (50, 576), (1, 1000)])
def test_products(rows: int, outputs: int, inputs: int) -> None:
    x, weight = bf16(rows, inputs), bf16(outputs, inputs, seed=1)
    wanted, found = x.float() @ weight.float().T, product(x, weight, outputs, kernels.PUT)
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.01)
    assert torch.equal(product(x[-1:].contiguous(), weight, outputs, kernels.PUT), found[-1:])


def test_gates_far_from_zero() -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 3.0]).bfloat16()
    x = torch.stack([gates, torch.ones_like(gates)], 1)  # a gate, and up
    weight = kernels.interleaved(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).bfloat16()
    for how, wanted in (
        (kernels.PUT_SILU, torch.nn.functional.silu(gates.float())),
        (kernels.PUT_GELU, torch.nn.functional.gelu(gates.float(), approximate="tanh")),
    ):
        found = product(x, weight, 1, how).float()[:, 0]
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0.01)
