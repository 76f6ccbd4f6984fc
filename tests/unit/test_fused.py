"""The fused path gives the slow twin's numbers, for every variant, batch shape and hidden state."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import tiny_models
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.models.fused import FusedCausal
from foredraft.models.packed import can_pack, pack, pack_together
from foredraft.types import NO_DRAFT, Draft, chain
from tiny_models import TREE, VARIANTS, caches, fill_vectors, ragged, text_of

BFLOAT16 = can_pack(torch.bfloat16, torch.device("cpu"))


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[HFCausal]:
    """The same random model on both paths, float32."""
    kind, changes = VARIANTS[request.param]
    path = tiny_models.build(kind, tmp_path_factory.mktemp("model"), **changes)
    fill_vectors(path)
    pair = [load_target(path, dtype="float32", device="cpu", fused=fused) for fused in (True, False)]
    assert [isinstance(target, FusedCausal) for target in pair] == [True, False]
    return pair


def agree(targets: list[HFCausal], batches: list[Batch], kvs: list[KVCache], layers: tuple[int, ...]) -> None:
    """Both give the same logits and hidden states."""
    one, other = (
        target.forward(batch, kv, layers) for target, batch, kv in zip(targets, batches, kvs, strict=True)
    )
    torch.testing.assert_close(one.logits, other.logits, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(one.hidden, other.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_prompt_in_chunks_then_drafts(twins: list[HFCausal]) -> None:
    """Chunks, one row alone, a chain and a tree; hidden states from the embedding to behind the last norm."""
    text, made = text_of(75, 1), caches(twins, 100)
    kvs = [kv for kv, _ in made]
    passes: list[tuple[int, int, Draft | None, tuple[int, ...]]] = [
        (0, 40, None, ()),
        (40, 70, None, (0, 3)),
        (70, 74, NO_DRAFT, (1, -1)),
        (74, 75, NO_DRAFT, (0, 1, 2, 3)),
        (74, 75, chain([4, 5, 6]), (2,)),
        (74, 75, TREE, ()),
    ]
    for start, stop, draft, layers in passes:
        batches = [make_batch([Feed(text[start:stop], start, table, draft)]) for _, table in made]
        agree(twins, batches, kvs, layers)


def test_a_ragged_batch(twins: list[HFCausal]) -> None:
    """Prompts, a decoding row, a chain and a tree share one pass."""
    kvs, first, second = ragged(twins, 50)
    agree(twins, first, kvs, (1,))
    agree(twins, second, kvs, (0, 3))


def test_a_twin_that_disagrees_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.build("llama", tmp_path)
    monkeypatch.setattr("foredraft.models.fused.swiglu", lambda gate_up: gate_up.chunk(2, dim=-1)[1])
    with caplog.at_level(logging.WARNING):
        target = load_target(path, dtype="float32")
    assert type(target) is HFCausal
    assert "disagrees" in caplog.text
    kv, table = caches([target], 32)[0]
    assert target.forward(make_batch([Feed([5, 6], 0, table, NO_DRAFT)]), kv).logits.isfinite().all()


def test_other_architectures_keep_their_modules(tmp_path: Path) -> None:
    assert type(load_target(tiny_models.build("gpt2", tmp_path), dtype="float32")) is HFCausal


@pytest.mark.skipif(not BFLOAT16, reason="this CPU packs no bfloat16")
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (48, 1536), (40, 4864)])
def test_a_packed_row_does_not_depend_on_its_neighbours(outputs: int, inputs: int) -> None:
    """Bit for bit, from one row to more than a draft has."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, inputs, generator=generator).bfloat16() for rows in (outputs, 40))
    linear = pack(weight)
    together = linear(x)
    assert torch.equal(torch.cat([linear(row) for row in x.split(1)]), together)
    assert torch.equal(linear(x[0]), together[0])
    for rows in (2, 3, 5, 8, 17):
        assert torch.equal(linear(x[:rows]), together[:rows])
    assert linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_packed_together_are_the_layers_side_by_side(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, width, bias=bias, dtype=dtype) for width in (8, 12)]
    x = torch.randn(5, 16, dtype=dtype)
    with torch.inference_mode():
        wanted = torch.cat([layer(x) for layer in layers], dim=-1)
        torch.testing.assert_close(pack_together(layers)(x), wanted, atol=2e-2, rtol=2e-2)


def test_capped_logits_and_other_activations_keep_their_modules(tmp_path: Path) -> None:
    for place, changes in enumerate(({"final_logit_softcapping": 30.0}, {"hidden_activation": "gelu"})):
        path = tiny_models.build("gemma3_text", tmp_path / str(place), **changes)
        assert type(load_target(path, dtype="float32", device="cpu")) is HFCausal


@pytest.mark.skipif(not BFLOAT16, reason="this CPU packs no bfloat16")
@pytest.mark.parametrize(("kind", "kv_heads"), [("llama", 1), ("llama", 2), ("llama", 4), ("gemma3_text", 1)])
def test_a_token_has_the_same_bits_alone_and_in_a_draft(kind: str, kv_heads: int, tmp_path: Path) -> None:
    """In bfloat16, also where the draft reaches into another block of the cache, beside another request, and
    behind a long prompt.
    """
    path = tiny_models.build(kind, tmp_path, num_key_value_heads=kv_heads, intermediate_size=1536)
    target = load_target(path, dtype="bfloat16", device="cpu")
    text, other = text_of(70, 4), text_of(90, 5)
    kv, tables = target.make_kv(512), [BlockTable(), BlockTable()]
    for table in tables:
        assert kv.pool.grow(table, 96)
    target.forward(make_batch([Feed(other[:80], 0, tables[1], None)]), kv)
    prompt = target.forward(make_batch([Feed(text[:58], 0, tables[0], chain(text[58:62]))]), kv).logits
    plain = target.forward(make_batch([Feed(text[:58], 0, tables[0], NO_DRAFT)]), kv).logits
    assert torch.equal(plain, prompt[:1])
    alone = [
        target.forward(make_batch([Feed(text[pos : pos + 1], pos, tables[0], NO_DRAFT)]), kv).logits
        for pos in range(58, 70)
    ]
    feeds = [Feed(text[58:59], 58, tables[0], chain(text[59:70]))]
    drafted = target.forward(make_batch(feeds), kv).logits
    assert torch.equal(drafted, torch.cat(alone))
    assert torch.equal(drafted[:4], prompt[1:])
    feeds.append(Feed(other[80:81], 80, tables[1], chain(other[81:84])))
    assert torch.equal(target.forward(make_batch(feeds), kv).logits[:12], drafted)
    tree = Draft(torch.tensor([9, *text[59:62], 8, text[62]]), (-1, -1, 1, 2, 1, 3))  # the text is 1, 2, 3, 5
    branches = target.forward(make_batch([Feed(text[58:59], 58, tables[0], tree), *feeds[1:]]), kv).logits
    assert torch.equal(branches[[0, 2, 3, 4, 6]], drafted[:5])
