"""Steps in buckets give the slow twin's numbers, run as they are or recorded and replayed; padding leaves no
trace.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpu  # of benchmarks
import tape
import tiny_models
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import BLOCK, BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.models.attention import visible
from foredraft.models.bucketed import BucketedCausal, bucket, can_bucket, has_fixed_steps
from foredraft.models.buckets import Bucket, Inputs, Passes, Work, packed, recorder, seen_bits
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.propose import DraftModelProposer, NgramProposer
from foredraft.propose.eagle import EagleProposer
from foredraft.types import NO_DRAFT, Draft, SamplingParams, chain
from worlds import World, compare, same, some_draft

KINDS = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}}


def plain(path: Path) -> HFCausal:
    return load_target(path, dtype="float32", device="cpu", fused=False)


@pytest.fixture(scope="module", params=sorted(KINDS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(request.param, tmp_path_factory.mktemp("model"), **KINDS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("seed", range(2))
def test_growing_texts_with_chains_and_trees(path: Path, seed: int) -> None:
    """Run as it is and recorded, the slow twin decides."""
    compare([plain(path), BucketedCausal(plain(path)), BucketedCausal(plain(path), tape.record)], seed, 12)


def test_nodes_fed_in_an_earlier_pass(llama: Path) -> None:
    """As a draft model feeds its own trees, level by level: each node sees its ancestors among them."""
    tree = Draft(torch.tensor([4, 5, 6, 7, 8, 9]), (-1, -1, 0, 1, 2, 0))
    first = Draft(tree.tokens[:3], tree.parents[:3])
    outs = []
    for target in (plain(llama), BucketedCausal(plain(llama), tape.record)):
        world = World(target, [[5] * 31, [6] * 40, [7, 8]])
        world.step([0, 1, 2], [first, NO_DRAFT, first])
        feeds = []
        for text, table, cached in zip(world.texts, world.tables, (3, 0, 1), strict=True):
            assert world.kv.pool.grow(table, len(text) + len(tree))
            feeds.append(Feed([], len(text), table, tree, cached))
        feeds[1] = Feed([9], 40, world.tables[1], tree)
        outs.append(target.forward(make_batch(feeds), world.kv).logits)
    same(outs[1], outs[0])


def test_what_does_not_fit_a_bucket_runs_as_it_comes(llama: Path) -> None:
    """A prompt, a step of too many rows, one of too many sequences; few rows of a prompt do fit."""
    rng = random.Random(1)
    texts = [[rng.randrange(97) for _ in range(20)] for _ in range(40)]
    for lengths in ([50], [33, 1], [1] * 33, [32], [5, 1]):
        outs = []
        for target in (plain(llama), BucketedCausal(plain(llama), tape.record)):
            world = World(target, [text[:12] for text in texts[: len(lengths)]])
            feeds = []
            for length, table in zip(lengths, world.tables, strict=True):
                assert world.kv.pool.grow(table, 11 + length)
                feeds.append(Feed([7 + i % 90 for i in range(length)], 11, table, NO_DRAFT))
            batch = make_batch(feeds)
            assert (Bucket.of(batch) is None) == (max(lengths) > 32 or len(lengths) > 32)
            outs.append(target.forward(batch, world.kv, (1,)))
        same(outs[1].logits, outs[0].logits)
        torch.testing.assert_close(outs[1].hidden[0], outs[0].hidden[0], atol=1e-4, rtol=1e-4)


def step_of(world: World) -> Batch:
    """Three sequences of one, three and four rows: a bucket of four by four."""
    drafts = [NO_DRAFT, chain([4, 5]), Draft(torch.tensor([1, 2, 3]), (-1, -1, 0))]
    feeds = []
    for text, table, draft in zip(world.texts, world.tables, drafts, strict=False):
        assert world.kv.pool.grow(table, len(text) + len(draft))
        feeds.append(Feed(text[-1:], len(text) - 1, table, draft))
    return make_batch(feeds)


def test_padding_writes_to_no_slot_of_a_sequence_and_reads_none(llama: Path) -> None:
    """Every slot that the step does not own is poison: it neither changes nor shows."""
    texts = [[5] * 40, [6] * 31, [7] * 70, [8] * 50]  # the last one does not take part
    targets = plain(llama), BucketedCausal(plain(llama), tape.record)
    worlds = [World(target, texts) for target in targets]
    batch = step_of(worlds[0])
    wanted = targets[0].forward(batch, worlds[0].kv)
    for _ in range(2):  # recorded, then replayed
        batch, kv = step_of(worlds[1]), worlds[1].kv
        own = {block for span in batch.spans for block in span.table.blocks}
        written = {int(slot) for s in batch.spans for slot in s.table.slot_ids(s.first_slot, s.length)}
        others = [b * BLOCK + i for b in range(kv.pool.size + 1) if b not in own for i in range(BLOCK)]
        stores = [*kv.keys, *kv.values]
        for store in stores:
            store[others] = torch.nan
        before = [store.clone() for store in stores]
        same(targets[1].forward(batch, kv).logits, wanted.logits)
        padding = set(range(kv.padding * BLOCK, (kv.padding + 1) * BLOCK))
        kept = sorted(set(range(len(stores[0]))) - written - padding)
        for old, new in zip(before, stores, strict=True):
            torch.testing.assert_close(new[kept], old[kept], rtol=0, atol=0, equal_nan=True)


def test_what_is_handed_out_stays_as_it_is(llama: Path) -> None:
    """Outputs of a recorded pass are overwritten by the next one; what the caller got is not."""
    target = BucketedCausal(plain(llama), tape.record)
    world = World(target, [[5] * 40, [6] * 31, [7] * 70])
    first = target.forward(step_of(world), world.kv, (0, -1))
    kept = [part.clone() for part in (first.logits, *first.hidden)]
    for text in world.texts:
        text[-1] = 11
    second = target.forward(step_of(world), world.kv, (0, -1))
    assert not torch.equal(first.logits, second.logits)
    assert all(torch.equal(*pair) for pair in zip((first.logits, *first.hidden), kept, strict=True))


def test_a_bucket_is_recorded_once_a_cache_and_forgotten_with_it(llama: Path) -> None:
    recorded = []

    def counted(work: Any) -> Any:
        recorded.append(work)
        return tape.record(work)

    target = BucketedCausal(plain(llama), counted)
    world = World(target, [[5] * 40, [6] * 31, [7] * 70])
    recorded.clear()
    for layers, count in (((), 1), ((), 1), ((1,), 2), ((), 2)):
        target.forward(step_of(world), world.kv, layers)
        assert len(recorded) == count
    other = World(target, [[5] * 40, [6] * 31, [7] * 70])
    recorded.clear()
    target.forward(step_of(other), other.kv)
    assert len(recorded) == 1
    assert len(target._passes._known) == 2
    del other, world
    gc.collect()
    assert len(target._passes._known) == 0


def test_all_steps_of_a_bucket_are_the_same_operations(llama: Path) -> None:
    """Whatever their numbers, and the host waits for none of them."""
    target = BucketedCausal(plain(llama))
    worlds = [World(target, texts) for texts in ([[5] * 40, [6] * 31, [7] * 70], [[1] * 66, [2], [3] * 3])]
    seen = []
    for world in worlds:
        batch = step_of(world)
        with tape.Tape() as tape_of_step:
            target.forward(batch, world.kv, (1,))
        assert not tape_of_step.reads
        seen.append(tape_of_step.names)
    assert seen[0] == seen[1]


def test_bits_say_what_masks_say() -> None:
    """Of trees whose first nodes were fed before, too."""
    rng, table = random.Random(2), BlockTable([3, 1, 2, 0], run=False)
    for _ in range(200):
        draft, cached = some_draft(rng), 0
        pending, kv_len = rng.randrange(1, 33), rng.randrange(60)
        if len(draft) > 1 and rng.random() < 0.5:
            pending, cached = 0, rng.randrange(1, len(draft))
        feed = Feed([1] * pending, kv_len, table, draft, cached)
        span = make_batch([feed]).spans[0]
        seen = torch.ones(span.rows, span.length, dtype=torch.bool)
        for row, bits in enumerate(seen_bits(span)):
            seen[row, kv_len:] = torch.tensor([bool(bits >> j & 1) for j in range(span.length - kv_len)])
        assert torch.equal(seen, visible(span, torch.zeros(0), None))


def test_the_numbers_of_a_bucket() -> None:
    """Worked out by hand: padding rows, padding blocks, a padding sequence."""
    tables = [BlockTable([4, 2]), BlockTable([1]), BlockTable([0])]
    tree = Draft(torch.tensor([7, 8]), (-1, -1))
    batch = make_batch(
        [Feed([9], 33, tables[0], tree), Feed([5], 2, tables[1], NO_DRAFT), Feed([6], 0, tables[2], None)]
    )
    shape = Bucket(seqs=4, rows=4, blocks=2)
    assert Bucket.of(batch) == shape
    inputs = Inputs(shape, torch.zeros(0, 2))
    inputs.fill(batch, 6, torch.arange(10.0).view(5, 2))
    pad = [192 + i for i in range(16)]
    assert inputs.tokens.tolist() == [9, 7, 8, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [33, 34, 34, 0, 2, *[0] * 11]
    assert inputs.slots.tolist() == [65, 66, 67, pad[3], 34, *pad[5:8], 0, *pad[9:]]
    assert inputs.seen.tolist() == [0b1, 0b11, 0b101, 1, *[1] * 12]
    assert inputs.blocks.tolist() == [4, 2, 1, 1, 0, 0, 6, 6]
    assert inputs.base.tolist() == [33, 2, 0, 0]
    assert inputs.real.tolist() == [0, 1, 2, 4, 8, *[0] * 11]
    assert inputs.features[[0, 1, 2, 4, 8]].flatten().tolist() == list(range(10))
    assert inputs.wanted.tolist() == [0, 1, 2, 4, *[0] * 12]
    assert len(packed(batch, shape, 6)) == 6 * 16 + 8 + 4


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


def test_a_cpu_records_nothing() -> None:
    def work() -> tuple[Tensor, ...]:
        return ()

    assert recorder(torch.device("cpu"))(work) is work


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
