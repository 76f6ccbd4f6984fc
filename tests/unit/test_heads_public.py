"""Public heads of each kind, on disk as their own programs write them: what they guess is what a plain pass
over the whole text makes of their tensors, and no text changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.models.attention import Attend
from foredraft.models.checkpoint import read_head, target_facts, write_head
from foredraft.models.compiled_head import CompiledEagle
from foredraft.models.fast_head import FastEagle
from foredraft.models.formats.files import TargetFacts
from foredraft.models.heads import MedusaHeads, PlainEagle
from foredraft.propose.eagle import EagleProposer
from foredraft.propose.heads import (
    EagleDraft,
    MedusaDraft,
    load_eagle,
    load_head,
    load_medusa,
    save_eagle,
    save_medusa,
)
from foredraft.propose.medusa import MedusaProposer
from foredraft.train.collect import Answer
from foredraft.train.data import stack
from foredraft.train.medusa import MedusaLoss, rank_hits
from foredraft.types import Draft, SamplingParams
from tiny_heads import CONFIG, HIDDEN, VOCAB, eagle_tensors, medusa_tensors, write

CPU, F32 = torch.device("cpu"), torch.float32
LAYERS, KV = 4, 64 * 64
IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # outputs, so hidden states 1, 2, 3
ONE = {  # what the EAGLE project writes, of a config that says no more than a model's
    **{key: value for key, value in CONFIG.items() if key not in ("eagle_config", "draft_vocab_size")},
    "architectures": ["LlamaForCausalLM"],
}
Tensors = dict[str, Tensor]


def eagle_on_disk(path: Path, kind: str) -> Path:
    """Write a head of a kind: eagle3, residual, speculators, eagle1 or eagle1-bias."""
    tensors = {
        name: value if value.dtype == torch.int64 or value.dim() < 2 else value * 0.3
        for name, value in eagle_tensors(dtype=F32).items()
    }
    if kind.startswith("eagle1"):
        one = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        for name in ("norm", "lm_head", "layers.0.hidden_norm", "layers.0.input_layernorm"):
            del one[f"{name}.weight"]
        for name in "qkv":
            cut = one[f"layers.0.self_attn.{name}_proj.weight"][:, :HIDDEN]
            one[f"layers.0.self_attn.{name}_proj.weight"] = cut.contiguous()
        one["fc.weight"] = one["fc.weight"][:, : 2 * HIDDEN].contiguous()
        del one["d2t"], one["t2d"]
        if kind == "eagle1-bias":
            one["fc.bias"] = torch.linspace(-1, 1, HIDDEN)
        return write(path, ONE, one)
    config = CONFIG | {"eagle_config": IDS} | ({} if kind == "eagle3" else {"norm_before_residual": True})
    made = write(path, config, tensors)
    if kind == "speculators":
        write_head(path / "other", read_head(made), "speculators")
        return path / "other"
    return made


EAGLES = ["eagle3", "residual", "speculators", "eagle1", "eagle1-bias"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    path = tmp_path_factory.mktemp("llama")
    return target_facts(tiny_models.build("llama", path, num_hidden_layers=LAYERS, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def target(facts: TargetFacts) -> HFCausal:
    return load_target(facts.path, dtype="float32")


@pytest.fixture(scope="module")
def reference(facts: TargetFacts) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(facts.path, dtype=F32).eval()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def rotated(x: Tensor, position: int) -> Tensor:
    """x: [heads, dim], of which dimension i and i + dim / 2 are a complex number."""
    half = x.shape[-1] // 2
    angles = position * 10000.0 ** -(torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], -1)


def by_hand(path: Path, model: Any, states: Tensor, tokens: list[int]) -> Tensor:
    """Logits [tokens, draft vocab] after each token, the first of which have target states [rows, width] of
    the position before, and the later ones the head's own.
    """
    (file,) = path.glob("*.safetensors")
    own = {name.removeprefix("layers.0.").removeprefix("midlayer."): t for name, t in load_file(file).items()}
    one, residual = "hidden_norm.weight" not in own, path.name in ("residual", "other")
    keys, values, logits = [], [], []
    out = torch.zeros(0)
    for row, token in enumerate(tokens):
        embed = model.get_input_embeddings().weight[token]
        feature = (states[row] if one else own["fc.weight"] @ states[row]) if row < len(states) else out
        if one:
            x = own["fc.weight"] @ torch.cat([embed, feature]) + own.get("fc.bias", torch.zeros(HIDDEN))
            read = x
        else:
            normed = rms(feature, own["hidden_norm.weight"])
            read = torch.cat([rms(embed, own["input_layernorm.weight"]), normed])
            x = normed if residual else feature
        query, key, value = ((own[f"self_attn.{n}_proj.weight"] @ read).view(-1, 8) for n in "qkv")
        keys.append(rotated(key, row))
        values.append(value)
        k, v = (torch.stack(part).repeat_interleave(2, 1) for part in (keys, values))
        law = torch.softmax(torch.einsum("hd,thd->ht", rotated(query, row), k) * 8**-0.5, -1)
        x = x + own["self_attn.o_proj.weight"] @ torch.einsum("ht,thd->hd", law, v).flatten()
        y = rms(x, own["post_attention_layernorm.weight"])
        gated = F.silu(own["mlp.gate_proj.weight"] @ y) * (own["mlp.up_proj.weight"] @ y)
        out = x + own["mlp.down_proj.weight"] @ gated
        head = model.get_output_embeddings().weight if one else own["lm_head.weight"]
        logits.append(head @ (out if one else rms(out, own["norm.weight"])))
    return torch.stack(logits)


def states_of(model: Any, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """The hidden states of transformers' own module, side by side, [tokens, width]."""
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0] for layer in layers], -1)


def drafts_of(target: HFCausal, proposer: Any, budget: int, steps: int) -> tuple[list[int], Draft]:
    """The tokens after some greedy steps, and the draft made of them."""
    config = EngineConfig(max_seqs=1, max_len=128, kv_tokens=KV)
    engine = Engine(target, proposer, config=config, controller=FixedBudget(budget))
    prompt = torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), "0")
    for _ in range(steps):
        engine.step()
    seen: list[tuple[list[int], Draft]] = []
    propose: Callable[..., list[Draft]] = proposer.propose

    def watched(seqs: Any, budgets: Any) -> list[Draft]:
        found = propose(seqs, budgets)
        seen.append((list(seqs[0].tokens), found[0]))
        return found

    proposer.propose = watched
    engine.step()
    assert not engine.drafter._off
    return seen[-1]


def children(draft: Draft, node: int) -> list[int]:
    return [child for child, parent in enumerate(draft.parents) if parent == node]


@pytest.mark.parametrize("kind", EAGLES)
@torch.no_grad()
def test_an_eagle_head_guesses_what_its_tensors_say(
    kind: str, tmp_path: Path, facts: TargetFacts, target: HFCausal, reference: Any
) -> None:
    """Level by level, in the order of the law of each node that goes on."""
    path = eagle_on_disk(tmp_path / kind, kind)
    draft_of = load_head(path, facts, F32, CPU)
    assert isinstance(draft_of, EagleDraft)
    proposer: Any = draft_of.proposer(KV)
    assert isinstance(proposer._fast, FastEagle if kind == "eagle3" else PlainEagle)
    tokens, draft = drafts_of(target, proposer, 24, 4)
    layers = (LAYERS,) if kind.startswith("eagle1") else (1, 2, 3)
    states = states_of(reference, tokens[:-1], layers)
    ids = proposer.target_ids
    judged, ways = 0, [(-1, list[int]())]
    while ways:
        node, below = ways.pop()
        found = [int(draft.tokens[child]) for child in children(draft, node)]
        law = by_hand(path, reference, states, tokens[1:] + below)[-1]
        assert found == ids[law.topk(len(found)).indices].tolist()
        judged += len(found) > 0
        ways += [(child, [*below, int(draft.tokens[child])]) for child in children(draft, node)]
    assert judged > 2


@pytest.mark.parametrize("kind", EAGLES)
@torch.inference_mode()
def test_an_eagle_heads_numbers(kind: str, tmp_path: Path, facts: TargetFacts, reference: Any) -> None:
    """Logits of a text in two pieces and a branch behind it, also those of the fast twin if there is one."""
    path = eagle_on_disk(tmp_path / kind, kind)
    head = load_eagle(read_head(path), facts, F32)
    embedding = reference.get_input_embeddings().weight.detach()
    rows = head.lm_head.weight if head.lm_head is not None else reference.get_output_embeddings().weight
    text, branch = torch.randint(VOCAB, (9,)).tolist(), [5, 70]
    states = torch.randn(9, HIDDEN * len(head.config.hidden_layers))
    wanted = by_hand(path, reference, states, text + branch)
    for twin in (PlainEagle, FastEagle) if head.config.plain else (PlainEagle,):
        passes: Any = twin(head, embedding, rows.detach())
        kv, table = KVCache([LayerShape(2, 8, 8)], 64, dtype=F32), BlockTable()
        assert kv.pool.grow(table, 32)
        none, found, out = Draft(torch.zeros(0, dtype=torch.int64), ()), [], torch.zeros(0)
        # Token 9 is another way, which the branch must not see.
        two, three = Draft(torch.tensor([9, 5]), (-1, -1)), Draft(torch.tensor([9, *branch]), (-1, -1, 1))
        for feed, read in (
            (Feed(text[:6], 0, table, none), states[:6]),
            (Feed(text[6:], 6, table, none), states[6:]),
            (Feed([], 9, table, two), None),
            (Feed([], 9, table, three, 2), None),
        ):
            batch = make_batch([feed])
            own = out[-1:].expand(len(batch.token_ids), -1)
            features = own if read is None else passes.fuse(read)
            out, logits = passes.run(batch, features, Attend(batch, kv, CPU, F32))
            found.append(logits[-1])
        off = torch.stack(found) - wanted[[5, 8, 9, 10]]
        assert off.norm() / wanted.norm() < 1e-5


def answers(target: HFCausal, proposer: Any, params: SamplingParams) -> dict[str, list[int]]:
    config = EngineConfig(max_seqs=3, max_len=128, max_batch_tokens=24, kv_tokens=KV)
    engine = Engine(target, proposer, config=config, controller=FixedBudget(20) if proposer else None)
    for number, length in enumerate((3, 40, 35, 9)):
        prompt = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        engine.add(prompt, params, str(number))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert not engine.drafter._off
    assert engine.stats.accepted > 0 or proposer is None  # random heads are right by chance
    return found


@pytest.fixture(scope="module", params=[0, 1.2])
def asked(request: Any, target: HFCausal) -> tuple[SamplingParams, dict[str, list[int]]]:
    """Parameters, and what the target alone answers."""
    params = SamplingParams(
        temperature=request.param, seed=3, max_tokens=24, reproducible=True, ignore_eos=True
    )
    return params, answers(target, None, params)


@pytest.mark.parametrize("kind", ["residual", "eagle1-bias", "medusa"])
def test_no_text_changes(
    asked: tuple[SamplingParams, dict[str, list[int]]],
    kind: str,
    tmp_path: Path,
    facts: TargetFacts,
    target: HFCausal,
) -> None:
    params, wanted = asked
    path = medusa_on_disk(tmp_path) if kind == "medusa" else eagle_on_disk(tmp_path / kind, kind)
    assert answers(target, load_head(path, facts, F32, CPU).proposer(KV), params) == wanted


@pytest.mark.parametrize("kind", ["eagle3", "residual", "eagle1"])
def test_the_compiled_pass_is_for_what_it_knows(kind: str, tmp_path: Path, facts: TargetFacts) -> None:
    """In bfloat16 the others draft by their modules, over a cache whose keys are turned."""
    target = load_target(facts.path, dtype="bfloat16", device="cpu")
    proposer = load_head(eagle_on_disk(tmp_path / kind, kind), facts, torch.bfloat16, CPU).proposer(KV)
    assert isinstance(proposer, EagleProposer)
    assert isinstance(proposer._fast, CompiledEagle if kind == "eagle3" else PlainEagle)
    _, draft = drafts_of(target, proposer, 12, 3)
    assert len(draft) == 12


def medusa_on_disk(path: Path, rows: int = VOCAB) -> Path:
    """Heads as Medusa writes them, with projections of their own of `rows` tokens."""
    tensors = {
        name: value[:rows] if name.count(".") == 2 else value * 0.2
        for name, value in medusa_tensors().items()
    }
    if rows < VOCAB:
        tensors["token_map"] = torch.randperm(VOCAB)[:rows].sort().values
    return write(path, {"medusa_num_heads": 3, "medusa_num_layers": 2}, tensors)


@pytest.mark.parametrize("rows", [VOCAB, 60])
@torch.no_grad()
def test_medusa_heads_with_projections_guess_what_their_tensors_say(
    rows: int, tmp_path: Path, facts: TargetFacts, target: HFCausal, reference: Any
) -> None:
    path = medusa_on_disk(tmp_path, rows)
    draft_of, own = load_head(path, facts, F32, CPU), load_file(path / "model.safetensors")
    assert isinstance(draft_of, MedusaDraft)
    assert draft_of.lm_head is None
    proposer: Any = draft_of.proposer(KV)
    assert isinstance(proposer, MedusaProposer)
    tokens, draft = drafts_of(target, proposer, 24, 4)
    state = states_of(reference, tokens[:-1], (LAYERS,))[-1]
    ids = own.get("token_map", torch.arange(VOCAB))
    level, laws = [-1], []
    for head in range(3):
        x = state
        for layer in range(2):
            name = f"{head}.{layer}.linear"
            x = x + F.silu(own[f"{name}.weight"] @ x + own[f"{name}.bias"])
        laws.append(own[f"{head}.2.weight"] @ x)
        below = [children(draft, node) for node in level]
        for some in below:  # the likeliest, of every node alike
            likeliest = ids[laws[-1].topk(len(some)).indices].tolist()
            assert [int(draft.tokens[child]) for child in some] == likeliest
        level = [child for some in below for child in some]
    assert len(draft) == 24
    assert torch.stack(laws).allclose(proposer._logits(state[None])[0], atol=1e-4)


def test_medusa_heads_with_projections_learn_by_them() -> None:
    """Equal to the target's they give what shared ones give; else the loss and the tree are their own."""
    torch.manual_seed(0)
    shared, own, lm_head = MedusaHeads(16, 2), MedusaHeads(16, 2, own_vocab=40), torch.randn(40, 16)
    ids = torch.randint(40, (12,)).tolist()
    batch = stack([Answer("0", 0.0, tuple(ids[:3]), tuple(ids[3:]), 0)], torch.randn(11, 16))
    for parameter in own.parameters():
        if len(parameter) == 40:
            parameter.data = lm_head.clone()
    wanted, found = MedusaLoss(shared, lm_head), MedusaLoss(own, lm_head)
    assert torch.equal(wanted(batch, 1)[0], found(batch, 1)[0])
    assert rank_hits(wanted, batch, 8) == rank_hits(found, batch, 8)
    for parameter in own.parameters():
        if len(parameter) == 40:
            parameter.data = parameter.flip(0)
    loss = found(batch, 1)[0]
    assert loss > wanted(batch, 1)[0]
    loss.backward()
    assert all(parameter.grad is not None for parameter in own.parameters())


def test_saved_and_loaded_again_no_bit_changes(tmp_path: Path, facts: TargetFacts) -> None:
    head = load_eagle(read_head(eagle_on_disk(tmp_path / "residual", "residual")), facts, torch.bfloat16)
    save_eagle(tmp_path / "a", head, facts, max_len=256)
    again = load_eagle(read_head(tmp_path / "a"), facts, torch.bfloat16)
    assert again.config == head.config
    heads = load_medusa(read_head(medusa_on_disk(tmp_path / "medusa")), facts, torch.bfloat16)
    save_medusa(tmp_path / "b", heads, torch.arange(VOCAB), [(0,)], facts)
    same = load_medusa(read_head(tmp_path / "b"), facts, torch.bfloat16)
    pairs = ((head, again), (heads, same))
    for one, other in pairs:
        state = other.state_dict()
        assert one.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
