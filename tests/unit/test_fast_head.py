"""An EAGLE head's passes over a few rows, weights in bytes, against its packed layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import BlockTable, KVCache, LayerShape
from foredraft.models import kernels
from foredraft.models.attention import Attend
from foredraft.models.fast_head import FastEagle, in_bytes
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.types import Draft

VOCAB, DRAFTED = 97, 70
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def head(hidden: int, inner: int, dim: int) -> tuple[EagleLayer, Tensor, Tensor]:
    """A head whose guesses depend on all it reads, an embedding and a projection."""
    torch.manual_seed(0)
    made = EagleLayer(EagleConfig(hidden, inner, 4, 2, dim, VOCAB, DRAFTED, (1, 2)))
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(BF16).eval(), torch.randn(VOCAB, hidden).to(BF16), torch.randn(DRAFTED, hidden).to(BF16)


@pytest.mark.parametrize(("hidden", "inner", "dim"), [(32, 48, 8), (576, 1536, 64)])
@torch.inference_mode()
def test_few_rows_are_as_many(hidden: int, inner: int, dim: int) -> None:
    fast = FastEagle(*head(hidden, inner, dim))
    kernel, fast._few = fast._few, None
    assert kernel is not None
    kv, tables = (
        KVCache([LayerShape(2, dim, dim)], 512, dtype=BF16, turned=True),
        [BlockTable(), BlockTable()],
    )
    for table, length in zip(tables, (90, 35), strict=True):
        assert kv.pool.grow(table, 128)
        batch = make_batch([Feed(list(range(length)), 0, table, None)])
        fast.run(batch, torch.randn(length, hidden).to(BF16), Attend(batch, kv, CPU, BF16))
    tree = Draft(torch.arange(5), (-1, -1, 0, 0, 1))
    feeds = [Feed([], 90, tables[0], tree, 2), Feed([4, 9, 1], 35, tables[1], Draft(tree.tokens[:0], ()))]
    batch = make_batch(feeds)
    features = torch.randn(len(batch.token_ids), hidden).to(BF16)
    attend = Attend(batch, kv, CPU, BF16)
    wanted = fast.run(batch, features, attend)
    keys, values = kv.keys[0].clone(), kv.values[0].clone()
    fast._few = kernel
    found = fast.run(batch, features, attend)
    for one, other in zip((*found, kv.keys[0], kv.values[0]), (*wanted, keys, values), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() / other.float().norm() < 0.03


def test_weights_in_bytes_are_near() -> None:
    weight = torch.randn(kernels.TILE + 9, 40)
    weight[3] = 0
    small, scales = in_bytes(weight)
    assert small.shape == (2, 40, kernels.TILE)
    back = small.transpose(1, 2).reshape(-1, 40)[: len(weight)] * scales[:, None]
    assert ((back - weight).abs() <= scales[:, None] / 2 + 1e-6).all()
