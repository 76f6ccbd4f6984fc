"""The compiled layers are as near to the model as transformers' own modules in bfloat16, for every variant,
batch shape and hidden state, whatever the processor; and a row's bits depend on the row alone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.models import HFCausal, kernels, load, load_target
from foredraft.models.compiled import CompiledCausal
from foredraft.models.fused import FusedCausal
from foredraft.types import NO_DRAFT, Draft, chain
from tiny_models import TREE, VARIANTS, caches, fill_vectors, ragged, text_of

Layers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=sorted(VARIANTS.keys() - {"dynamic angles"}))
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[HFCausal]:
    """The same random model compiled, on its modules in bfloat16, and on these in float32."""
    kind, changes = VARIANTS[request.param]
    path = tiny_models.build(kind, tmp_path_factory.mktemp("model"), **changes)
    fill_vectors(path)
    made = [
        load_target(path, dtype=dtype, device="cpu", fused=fused)
        for dtype, fused in (("bfloat16", True), ("bfloat16", False), ("float32", False))
    ]
    assert isinstance(made[0], CompiledCausal)
    return made


def distance(one: Tensor, other: Tensor) -> float:
    """How far one lies from the other, as a share of this."""
    return float((one.float() - other).norm() / other.norm())


def agree(three: list[HFCausal], batches: list[list[Batch]], kvs: list[KVCache], layers: Layers) -> None:
    """On average over passes, logits and hidden states are about as near to float32 as those of the modules;
    batches: one a target and pass, layers: those of each pass.
    """
    found, modules = [], []
    for passed, hidden in zip(batches, layers, strict=True):
        outs = [
            target.forward(batch, kv, hidden) for target, batch, kv in zip(three, passed, kvs, strict=True)
        ]
        for one, slow, exact in zip(*((out.logits, *out.hidden) for out in outs), strict=True):
            assert one.shape == exact.shape
            if len(exact):
                found.append(distance(one, exact))
                modules.append(distance(slow, exact))
    assert mean(found) < 1.3 * mean(modules)
    assert max(found) < 0.1


def test_a_prompt_in_chunks_then_drafts(three: list[HFCausal]) -> None:
    """Chunks, one row alone, a chain and a tree; hidden states from the embedding to behind the last norm."""
    text, made = text_of(75, 1), caches(three, 100)
    passes: list[tuple[int, int, Draft | None, tuple[int, ...]]] = [
        (0, 40, None, ()),
        (40, 70, None, (0, 3)),
        (70, 74, NO_DRAFT, (1, -1)),
        (74, 75, NO_DRAFT, (0, 1, 2, 3)),
        (74, 75, chain([4, 5, 6]), (2, 2)),
        (74, 75, TREE, ()),
    ]
    batches = [
        [make_batch([Feed(text[start:stop], start, table, draft)]) for _, table in made]
        for start, stop, draft, _ in passes
    ]
    agree(three, batches, [kv for kv, _ in made], [layers for *_, layers in passes])


def test_a_ragged_batch(three: list[HFCausal]) -> None:
    """Prompts, a decoding row, a chain and a tree share one pass."""
    kvs, first, second = ragged(three, 90)
    agree(three, [first, second], kvs, [(1,), (0, 3)])


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 160, "intermediate_size": 1000, "vocab_size": 1001}])
def test_a_row_has_the_same_bits_whoever_it_is_with(sizes: dict[str, int], tmp_path: Path) -> None:
    """Alone, among up to 40 others, and whoever of the threads does it."""
    target = load_target(tiny_models.build("llama", tmp_path, **sizes), dtype="bfloat16", device="cpu")
    kv, table = target.make_kv(41 * BLOCK), BlockTable()
    others = [BlockTable() for _ in range(40)]
    for own in (table, *others):
        assert kv.pool.grow(own, 8)

    def first_of(count: int) -> Tensor:
        feeds = [
            Feed(text_of(3, seed), 0, own, NO_DRAFT) for seed, own in enumerate([table, *others][:count])
        ]
        out = target.forward(make_batch(feeds), kv, (1, -1))
        return torch.cat([out.logits[0], *(layer[2] for layer in out.hidden)])

    alone = first_of(1)
    for count in (1, 2, 3, 5, 9, 22, 40):
        assert torch.equal(first_of(count), alone)


def test_other_processors(tmp_path: Path) -> None:
    """Without the instruction for pairs, and with fewer registers, the same numbers but for rounding."""
    path = tiny_models.build("llama", tmp_path, intermediate_size=64)
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from foredraft.engine.batch import Feed, make_batch\n"
        "from foredraft.engine.pool import BlockTable\n"
        "from foredraft.models import load_target\n"
        "from foredraft.types import chain\n"
        "target = load_target(Path(sys.argv[1]), dtype='bfloat16', device='cpu')\n"
        "kv, table = target.make_kv(64), BlockTable()\n"
        "kv.pool.grow(table, 64)\n"
        "out = target.forward(make_batch([Feed([3, 4, 5, 6], 0, table, chain([7, 8, 9]))]), kv)\n"
        "print(type(target).__name__)\n"
        "torch.save(out.logits.float(), sys.argv[2])\n"
    )
    found = []
    for name, more in (("own", {}), ("haswell", {"NUMBA_CPU_NAME": "haswell"})):
        file = tmp_path / f"{name}.pt"
        command = [sys.executable, "-c", code, str(path), str(file)]
        ran = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == "CompiledCausal"
        found.append(torch.load(file))
    assert distance(*found) < 0.01


def test_a_twin_that_disagrees_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.build("llama", tmp_path)
    straight = kernels.interleaved
    monkeypatch.setattr(kernels, "interleaved", lambda gate, up: straight(up, gate))
    with caplog.at_level(logging.WARNING):
        target = load_target(path, dtype="bfloat16", device="cpu")
    assert type(target) is HFCausal
    assert "disagrees" in caplog.text


def test_what_cannot_be_laid_out_is_fused_only(tmp_path: Path) -> None:
    """Heads of four numbers are too narrow for the kernels."""
    path = tiny_models.build("llama", tmp_path, head_dim=4)
    assert type(load_target(path, dtype="bfloat16", device="cpu")) is FusedCausal


@pytest.mark.parametrize(
    ("name", "changes", "quick", "wanted"),
    [
        ("llama", {}, True, CompiledCausal),
        ("llama", {}, False, FusedCausal),
        ("llama", {"head_dim": 4}, True, FusedCausal),
        ("gpt2", {}, True, HFCausal),
    ],
)
def test_auto_is_bfloat16_where_something_is_fast_with_it(
    name: str, changes: dict[str, int], quick: bool, wanted: type, tmp_path: Path, monkeypatch: Any
) -> None:
    """On a processor for which torch has no products in bfloat16, these are the kernels, or nothing."""
    path = tiny_models.build(name, tmp_path, **changes)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    monkeypatch.setattr(load, "is_slow", lambda dtype, device: dtype != torch.float32)
    monkeypatch.setattr(kernels, "IS_QUICK", quick)
    target = load_target(path, device="cpu")
    assert type(target) is wanted
    assert target.dtype == (torch.bfloat16 if wanted is CompiledCausal else torch.float32)
