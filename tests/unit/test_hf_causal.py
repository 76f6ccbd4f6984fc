"""Logits through our attention and cache equal the model's own forward, for every architecture and batch
shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.errors import CheckpointError, ConfigError, ModelError
from foredraft.models import HFCausal, load_target
from foredraft.types import NO_DRAFT, Draft

TREE = Draft(tokens=torch.tensor([5, 6, 7, 8, 9, 10, 11]), parents=(-1, -1, 0, 0, 1, 2, 5))
PATHS = [[], [5], [6], [5, 7], [5, 8], [6, 9], [5, 7, 10], [5, 7, 10, 11]]


@pytest.fixture(scope="module", params=sorted(tiny_models.ARCHITECTURES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFCausal, Any]:
    """The same random model twice: as a target, and as transformers runs it."""
    path = tiny_models.build(request.param, tmp_path_factory.mktemp(request.param))
    own = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return load_target(path, dtype="float32", device="cpu"), own


def expected(own: Any, text: list[int]) -> torch.Tensor:
    """The model's own logits after each token of `text`, [tokens, vocab]."""
    with torch.inference_mode():
        return own(torch.tensor([text])).logits[0]


def text_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def scattered(kv: KVCache, seed: int, lengths: list[int]) -> list[BlockTable]:
    """Tables whose blocks lie in no order."""
    order = torch.randperm(kv.pool.size, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = []
    for length in lengths:
        count = kv.pool.needed(length)
        tables.append(BlockTable([order.pop() for _ in range(count)], run=count == 1))
    return tables


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


def test_prompt_in_chunks_then_a_tree(pair: tuple[HFCausal, Any]) -> None:
    target, own = pair
    kv, table, text = target.make_kv(256), BlockTable(), text_of(75, 1)
    assert kv.pool.grow(table, 100)
    for start, stop in ((0, 40), (40, 70)):
        target.forward(make_batch([Feed(text[start:stop], start, table, None)]), kv)
    got = target.forward(make_batch([Feed(text[70:], 70, table, TREE)]), kv).logits
    close(got, torch.stack([expected(own, text + path)[-1] for path in PATHS]))


def test_ragged_batch_of_prompts_decoders_and_trees(pair: tuple[HFCausal, Any]) -> None:
    """Long and short prompts, plain decoding, a chain and a tree share one pass, in scattered blocks."""
    target, own = pair
    texts = [text_of(n, n) for n in (50, 1, 20, 33, 40)]
    cached = [0, 0, 19, 32, 39]
    chain = Draft(tokens=torch.tensor([4, 3, 4]), parents=(-1, 0, 1))
    drafts = [NO_DRAFT, TREE, NO_DRAFT, chain, TREE]
    kv = target.make_kv(1024)
    tables = scattered(kv, 3, [len(text) + BLOCK for text in texts])
    fed = [Feed(t[:n], 0, table, None) for t, n, table in zip(texts, cached, tables, strict=True) if n]
    target.forward(make_batch(fed), kv)
    batch = make_batch(
        [Feed(t[n:], n, table, d) for t, n, table, d in zip(texts, cached, tables, drafts, strict=True)]
    )
    got = target.forward(batch, kv).logits
    for seq, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
        paths = [[], [4], [4, 3], [4, 3, 4]] if draft is chain else PATHS[: len(draft) + 1]
        rows = batch.logits_of[seq]
        close(got[rows.start : rows.stop], torch.stack([expected(own, text + p)[-1] for p in paths]))


def test_a_tree_fed_level_by_level(pair: tuple[HFCausal, Any]) -> None:
    target, own = pair
    kv, table, text = target.make_kv(128), BlockTable(), text_of(12, 5)
    assert kv.pool.grow(table, 40)
    got = [target.forward(make_batch([Feed(text, 0, table, NO_DRAFT)]), kv).logits]
    for old, new in ((0, 2), (2, 5), (5, 6), (6, 7)):
        part = Draft(tokens=TREE.tokens[:new], parents=TREE.parents[:new])
        got.append(target.forward(make_batch([Feed([], 12, table, part, old)]), kv).logits)
    close(torch.cat(got), torch.stack([expected(own, text + path)[-1] for path in PATHS]))


def test_accepted_path_moves_together(pair: tuple[HFCausal, Any]) -> None:
    """After nodes 0, 2 and 5 are kept, decoding goes on as if their text had been fed plainly."""
    target, own = pair
    kv, text = target.make_kv(256), text_of(30, 6)
    (table,) = scattered(kv, 1, [60])
    target.forward(make_batch([Feed(text, 0, table, TREE)]), kv)
    kv.move(table.slot_ids(30, 60)[[0, 2, 5]], table.slot_ids(30, 33))
    got = target.forward(make_batch([Feed([12], 33, table, NO_DRAFT)]), kv).logits
    close(got[0], expected(own, [*text, 5, 7, 10, 12])[-1])


def test_hidden_states_are_the_models_own(pair: tuple[HFCausal, Any]) -> None:
    target, own = pair
    kv, table, text = target.make_kv(64), BlockTable(), text_of(10, 7)
    assert kv.pool.grow(table, 10)
    out = target.forward(make_batch([Feed(text, 0, table, NO_DRAFT)]), kv, (0, 2, 3))
    with torch.inference_mode():
        wanted = own(torch.tensor([text]), output_hidden_states=True).hidden_states
    for got, layer in zip(out.hidden, (0, 2, 3), strict=True):
        close(got, wanted[layer][0])


def test_bfloat16_is_near(tmp_path: Path) -> None:
    """Packed linears compute what plain ones do, to the precision of bfloat16."""
    path = tiny_models.build("llama", tmp_path)
    target = load_target(path, dtype="bfloat16", device="cpu")
    own = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    kv, table, text = target.make_kv(64), BlockTable(), text_of(20, 8)
    assert kv.pool.grow(table, 20)
    got = target.forward(make_batch([Feed(text, 0, table, NO_DRAFT)]), kv).logits[0]
    wanted = expected(own, text)[-1]
    assert (got.float() - wanted.float()).norm() < 0.05 * wanted.float().norm()


@pytest.mark.parametrize(
    ("kind", "reason", "sizes"),
    [
        ("mamba", "linear_attention", {"hidden_size": 16, "num_hidden_layers": 2}),
        ("t5", "encoder-decoder", {"d_model": 16, "num_layers": 1, "num_heads": 2}),
        ("bloom", "1 of 1 layers do not attend through", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
        (
            "gpt_oss",
            "s_aux",
            {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_local_experts": 2,
                "num_experts_per_tok": 2,
            },
        ),
    ],
)
def test_models_that_cannot_run_exactly_are_refused(
    kind: str, reason: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(kind, vocab_size=20, pad_token_id=0, eos_token_id=1, **sizes)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_target(tmp_path)


def test_a_model_that_does_not_heed_its_positions_is_refused(tmp_path: Path) -> None:
    """BART's decoder counts positions by itself, from 0 in every pass."""
    sizes = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "encoder_layers": 2,
    }
    config = transformers.AutoConfig.for_model("bart", vocab_size=97, is_encoder_decoder=False, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BartForCausalLM gives other logits here than by its own forward"):
        load_target(tmp_path)


def test_windows_that_only_a_mask_tells_are_refused(tmp_path: Path) -> None:
    sizes = {name: value for name, value in tiny_models.SIZES.items() if name != "max_position_embeddings"}
    config = transformers.AutoConfig.for_model(
        "phimoe", **sizes, max_position_embeddings=256, num_local_experts=2, sliding_window=32
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="windows of 32 tokens that only its mask tells"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    file = tiny_models.build("llama", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, first {name}"):
        load_target(tmp_path)


def test_code_in_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "weird.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(
        '{"model_type": "weird", "auto_map": {"AutoConfig": "weird.Config"}}'
    )
    with pytest.raises(ModelError, match="no model that transformers knows"):
        load_target(tmp_path)


def test_texts_end_where_angles_begin_to_depend_on_the_longest(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 12.0]}
    path = tiny_models.build("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    assert load_target(path, dtype="float32").max_len == 32


def test_options_are_checked(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path)
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_target(path, dtype="int4")
    with pytest.raises(ConfigError, match="device='tpu9'"):
        load_target(path, device="tpu9")
    with pytest.raises(ModelError, match="no model that transformers knows"):
        load_target(tmp_path / "missing")
