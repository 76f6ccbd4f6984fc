"""An EAGLE head's compiled passes: against its own layers in float32, and trees grown at once against trees
grown level by level.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BlockTable
from foredraft.models import kernels, load_target
from foredraft.models.attention import Attend
from foredraft.models.compiled_head import CompiledEagle, Waiting
from foredraft.models.fast_head import FastEagle
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.propose.eagle import EagleProposer
from foredraft.types import Draft, SamplingParams

VOCAB, DRAFTED, LAYERS = 97, 70, (1, 2)
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def head(hidden: int = 32, inner: int = 48, dim: int = 8) -> tuple[EagleLayer, Tensor, Tensor]:
    """A head whose guesses depend on all it reads, an embedding and a projection."""
    torch.manual_seed(0)
    made = EagleLayer(EagleConfig(hidden, inner, 4, 2, dim, VOCAB, DRAFTED, LAYERS))
    made.set_vocabulary(torch.randperm(VOCAB)[:DRAFTED])
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.2 * hidden**-0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(BF16).eval(), torch.randn(VOCAB, hidden).to(BF16), torch.randn(DRAFTED, hidden).to(BF16)


def read(small: Tensor, scales: Tensor) -> Tensor:
    """What weights in bytes say, float32 [tiles * WIDTH, inputs]."""
    whole = small.transpose(1, 2).reshape(len(scales), -1).float() - 64
    return whole * scales[:, None]


@pytest.mark.parametrize(("hidden", "inner", "dim"), [(32, 48, 8), (576, 1536, 64)])
@torch.inference_mode()
def test_a_level_is_that_of_the_layers(hidden: int, inner: int, dim: int) -> None:
    """Prompts, then new tokens beside nodes of a tree."""
    made, embedding, projection = head(hidden, inner, dim)
    compiled = CompiledEagle(made, embedding, projection)
    for layer in made.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.copy_(read(*kernels.in_bytes(layer.weight))[: len(layer.weight)])
    projection = read(*kernels.in_bytes(projection))[:DRAFTED]
    exact = FastEagle(made.float(), embedding.float(), projection)
    kvs = [KVCache([LayerShape(2, dim, dim)], 512, dtype=d, turned=d == BF16) for d in (BF16, torch.float32)]
    tables = [BlockTable(), BlockTable()]
    for kv in kvs[:1]:
        for table in tables:
            assert kv.pool.grow(table, 128)
    tree = Draft(torch.arange(5), (-1, -1, 0, 0, 1))
    none = Draft(tree.tokens[:0], ())
    passes = [
        [Feed(list(range(30)), 0, tables[0], none), Feed(list(range(9)), 0, tables[1], none)],
        [Feed([5, 7], 30, tables[0], tree), Feed([4, 9, 1], 9, tables[1], none)],
        [Feed([], 32, tables[0], replace(tree, tokens=torch.arange(5) + 2), 2)],
    ]
    for feeds in passes:
        batch = make_batch(feeds)
        features = torch.randn(len(batch.token_ids), hidden).to(BF16)
        outs = [
            fast.run(batch, x, Attend(batch, kv, CPU, x.dtype))
            for fast, kv, x in ((compiled, kvs[0], features), (exact, kvs[1], features.float()))
        ]
        for one, other in zip(*outs, strict=True):
            assert one.shape == other.shape
            assert (one.float() - other).norm() / other.norm() < 0.03


@torch.inference_mode()
def test_what_is_only_fed_is_written_to_the_cache() -> None:
    """Features of a long prompt at once, and in pieces."""
    made, embedding, projection = head()
    compiled = CompiledEagle(made, embedding, projection)
    kv, tables = KVCache([LayerShape(2, 8, 8)], 512, dtype=BF16, turned=True), [BlockTable(), BlockTable()]
    for table in tables:
        assert kv.pool.grow(table, 100)
    features, tokens = torch.randn(100, made.fc.in_features).to(BF16), [token % VOCAB for token in range(100)]
    assert compiled.grow([Waiting(tokens, features, 0, tables[0])], kv)[0].tokens == []
    for first, last in ((0, 7), (7, 64), (64, 100)):
        compiled.grow([Waiting(tokens[first:last], features[first:last], first, tables[1])], kv)
    slots = [table.slot_ids(0, 100) for table in tables]
    keys, values = kv.read_blocks(0, slice(0, 16))
    for store in (keys, values):
        assert torch.equal(store[slots[0]], store[slots[1]])
        assert store[slots[0]].any(-1).all()


def test_weights_in_bytes_are_near() -> None:
    weight = torch.randn(kernels.WIDTH + 9, 40)
    weight[3] = 0
    small, scales = kernels.in_bytes(weight)
    assert small.shape == (2, 20, kernels.WIDTH, 2)
    assert small.max() < 128
    off = (read(small, scales)[: len(weight)] - weight).abs()
    assert (off <= scales[: len(weight), None] / 2 + 1e-6).all()


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_tree_grown_at_once_is_that_grown_by_levels(
    budget: int, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests together, of which one asks for a processor and so is always grown by levels."""
    target = load_target(tiny_models.build("llama", tmp_path), dtype="bfloat16", device="cpu")
    made, embedding, projection = head()
    found = []
    for by_levels in (False, True):
        proposer = EagleProposer(made, embedding=embedding, lm_head=projection, kv_tokens=2048)
        assert isinstance(proposer._fast, CompiledEagle)
        if by_levels:
            monkeypatch.setattr(EagleProposer, "_has_own_law", lambda *_: True)
        drafts: list[Any] = []
        propose = proposer.propose

        def noted(*args: Any, propose: Any = propose, drafts: list[Any] = drafts) -> list[Draft]:
            made = propose(*args)
            drafts.extend((draft.tokens.tolist(), draft.parents) for draft in made)
            return list(made)

        monkeypatch.setattr(proposer, "propose", noted)
        config = EngineConfig(max_seqs=3, max_len=128, max_batch_tokens=64, kv_tokens=2048)
        engine = Engine(target, proposer, config=config, controller=FixedBudget(budget))
        params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, seed=1)
        for number, length in enumerate((3, 40, 70)):
            prompt = [token * (number + 3) % VOCAB for token in range(length)]
            own = replace(params, frequency_penalty=0.5) if number == 1 else params
            engine.add(prompt, own, str(number))
        while engine.has_work:
            engine.step()
        found.append(drafts)
    assert found[0] == found[1]
    assert max(len(tokens) for tokens, _ in found[0]) == min(budget, 40)
