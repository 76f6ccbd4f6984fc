"""A model whose steps run in buckets: in an engine, in its trial before it is used, and in the benchmark."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu  # of benchmarks
import tape
import tiny_models
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.models import HFCausal
from foredraft.models.bucketed import BucketedCausal, bucket, can_bucket, has_fixed_steps
from foredraft.models.buckets import Passes, Work
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.propose import DraftModelProposer, NgramProposer
from foredraft.propose.eagle import EagleProposer
from foredraft.types import SamplingParams, chain
from worlds import World, plain, same


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama"))


def answers(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, list[int]]:
    for prompt, one in zip(prompts, params, strict=True):
        engine.add(prompt, one)
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("drafting", ["none", "ngram", "chain", "tree"])
def test_an_engine_gives_the_same_text(llama: Path, drafting: str) -> None:
    """Greedy and sampled requests together, joining and leaving, drafted by a recorded model too."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.choice([1, 7, 40]))] * 2 for _ in range(6)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.5]), seed=seed, max_tokens=30, ignore_eos=True, reproducible=True
        )
        for seed in range(6)
    ]
    config = EngineConfig(max_seqs=4, max_len=200, max_batch_tokens=48, kv_tokens=800)

    def engine(target: HFCausal, draft: str) -> Engine:
        if draft == "none":
            return Engine(target, config=config)
        guess: Any = NgramProposer()
        if draft in ("chain", "tree"):
            model = BucketedCausal(plain(llama), tape.record)
            tree = (3, 2, 2) if draft == "tree" else None
            guess = DraftModelProposer(model, vocab_size=97, kv_tokens=1600, tree=tree)
        return Engine(target, guess, config=config, controller=FixedBudget(6))

    wanted = answers(engine(plain(llama), "none"), prompts, params)
    fast = engine(BucketedCausal(plain(llama), tape.record), drafting)
    assert answers(fast, prompts, params) == wanted
    assert not fast.drafter._off
    assert (fast.stats.accepted > 20) == (drafting != "none")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_eagle_head_drafts_the_same_trees(llama: Path, temperature: float) -> None:
    """Level by level, its passes recorded: as many guesses, the same ones accepted."""
    torch.manual_seed(0)
    head = EagleLayer(EagleConfig(32, 48, 4, 2, 8, 97, 97, (1, 2))).eval()
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    embedding = torch.randn(97, 32)
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=30, ignore_eos=True, reproducible=True
    )
    config = EngineConfig(max_seqs=3, max_len=128, max_batch_tokens=48, kv_tokens=512)
    found, recorded = [], []

    def record(work: Work) -> Work:
        recorded.append(work)
        return tape.record(work)

    for bucketed in (False, True):
        guess = EagleProposer(head, embedding=embedding, lm_head=embedding, kv_tokens=512)
        if bucketed:
            guess._passes = Passes(guess._pass, torch.zeros(0, 32), record)
        engine = Engine(plain(llama), guess, config=config, controller=FixedBudget(7))
        prompts = [[5, 6, 7] * 15, [8, 9], [11] * 40, [12, 13, 14]]
        texts = answers(engine, prompts, [params] * 4)
        found.append((texts, engine.stats.drafted, engine.stats.accepted_at))
        assert not engine.drafter._off
    assert found[0] == found[1]
    assert found[0][1] > 100
    assert recorded


def test_which_models_have_buckets(tmp_path: Path) -> None:
    """Known ones, none whose steps would depend on their numbers, and on a GPU only."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("llama", {}),
        "angles": ("llama", {"rope_parameters": dynamic}),
        "window": ("mistral", {}),
        "other": ("gpt2", {}),
        "kin": ("gemma3_text", {}),
    }
    targets = [plain(tiny_models.build(kind, tmp_path / name, **more)) for name, (kind, more) in made.items()]
    assert [has_fixed_steps(target) for target in targets] == [True, False, False, False, False]
    assert not any(can_bucket(target) for target in targets)


def test_the_trial_before_a_model_is_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses what disagrees: wrong numbers, a replay that goes on with old ones, a device that cannot."""

    def stuck(work: Work) -> Work:
        outputs = tuple(part.clone() for part in work())
        return lambda: outputs

    def failing(work: Work) -> Work:
        raise torch.OutOfMemoryError("no memory to record in")

    assert bucket(plain(llama), tape.record) is not None
    assert bucket(plain(llama), stuck) is None
    assert bucket(plain(llama), failing) is None
    monkeypatch.setattr("foredraft.models.buckets.seen_bits", lambda span: [1] * span.rows)
    assert bucket(plain(llama), tape.record) is None


def test_a_narrowed_model(llama: Path) -> None:
    """Knows the tokens it was narrowed to, and no others."""
    ids, found = torch.tensor([3, 5, 90]), []
    for kind in (HFCausal, BucketedCausal):
        slow = plain(llama)
        slow.model.lm_head.weight = torch.nn.Parameter(slow.model.lm_head.weight.detach()[ids])
        slow.model.lm_head.out_features = 3
        slow.token_ids = ids
        target = slow if kind is HFCausal else bucket(slow)
        assert type(target) is kind
        world = World(target, [[5] * 40])
        found.append(world.step([0], [chain([3, 4])]).logits)
    same(found[1], found[0])
    assert found[1].isfinite().sum() == 9


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    """Every size of pass on both paths, what it says of drafts, and plain decoding."""
    out = tmp_path / "gpu.jsonl"
    options = "--device cpu --shape tiny --dtype float32 --repeats 1 --tokens 6 --context 60"
    gpu.main([*options.split(), "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    counts = {kind: sum(r["kind"] == kind for r in records) for kind in ("pass", "speed_up", "decode")}
    assert counts == {"pass": 72, "speed_up": 24, "decode": 4}
    assert all(record["shape"] == "tiny" for record in records)
    assert min(record.get("seconds", 1) for record in records) > 0
    assert min(record.get("speed_up", 1) for record in records) >= 1
    assert gpu.mean_emitted(0.5, 2) == 1.75
