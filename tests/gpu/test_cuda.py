"""On a CUDA device: every kind of draft gives the text of plain decoding, recorded steps the numbers of plain
ones, and nothing leaves the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gpu  # of benchmarks
import tiny_models
from foredraft import LLM, SamplingParams
from foredraft.demo import demo_prompts
from foredraft.engine import Engine, EngineConfig
from foredraft.models import HFCausal, load_target
from foredraft.models.bucketed import BucketedCausal
from foredraft.types import chain
from worlds import World, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = 48


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[HFCausal]:
    """The same random model on transformers' modules and on recorded steps, float32."""
    path = tiny_models.build(request.param, tmp_path_factory.mktemp("model"))
    pair = [load_target(path, dtype="float32", device="cuda", fused=fused) for fused in (False, True)]
    assert [type(target) for target in pair] == [HFCausal, BucketedCausal]
    return pair


@pytest.mark.parametrize("seed", range(3))
def test_recorded_steps_give_the_numbers_of_plain_ones(twins: list[HFCausal], seed: int) -> None:
    compare(twins, seed, 25)


def test_the_host_waits_for_no_recorded_step(twins: list[HFCausal]) -> None:
    """Once recorded, from the batch to logits and hidden states."""
    world = World(twins[1], [[5] * 40, [6] * 31])
    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            world.step([0, 1], [chain([4, 5]), chain([6])], (1, -1))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_host_waits_once_a_step(twins: list[HFCausal], temperature: float) -> None:
    """For the verdicts."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
    engine = Engine(twins[1], config=EngineConfig(max_seqs=2, max_len=128, kv_tokens=256))
    for _ in range(2):
        engine.add([3, 4, 5], params)
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1


def test_graphs_go_with_their_cache(twins: list[HFCausal]) -> None:
    """A second engine records anew, also after the first one's memory is gone."""
    for _ in range(3):
        world = World(twins[1], [[5] * 40])
        assert world.step([0], [chain([4])]).logits.isfinite().all()
        del world


def test_the_benchmark_runs(tmp_path: Path) -> None:
    gpu.main(["--shape", "tiny", "--repeats", "1", "--tokens", "6", "--out", str(tmp_path / "gpu.jsonl")])
    assert (tmp_path / "gpu.jsonl").stat().st_size > 0


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", dtype="float32", device="cuda", kv_gb=1)


@pytest.mark.real
@pytest.mark.parametrize("draft", ["ngram", "suffix", "medusa", "eagle", "auto"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=LENGTH),
        SamplingParams(temperature=0.8, seed=1, max_tokens=LENGTH, reproducible=True, repetition_penalty=1.1),
    ],
    ids=["greedy", "sampled"],
)
def test_drafts_change_nothing(draft: str, params: SamplingParams, plain: LLM) -> None:
    drafted = LLM("smollm2-135m", draft, dtype="float32", device="cuda", kv_gb=1, budget=6)
    prompts = [prompt.text for prompt in demo_prompts()]
    wanted, found = plain.generate(prompts, params), drafted.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert not drafted.engine.drafter._off  # no draft failed
    assert drafted.engine.stats.accepted > 0
