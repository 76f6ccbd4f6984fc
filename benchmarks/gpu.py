"""What a target pass takes on a GPU, recorded as CUDA graphs and not, and what drafts would make of it.

    python benchmarks/gpu.py --shape 1b --out gpu.jsonl

Weights are random and made on the device, so what a draft would guess right cannot be measured: its verdicts
are scripted. T(seqs, rows) is measured for 1 to 32 sequences of 1 to 32 rows behind a context, and a chain of
free guesses, each right with a given chance, gains mean_emitted * T(seqs, 1) / T(seqs, rows) at its best
length. Plain decoding by the engine is measured as it is. `--device cpu --shape tiny` tries the script.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BlockTable
from foredraft.models import HFCausal
from foredraft.models.bucketed import BucketedCausal
from foredraft.models.hf_causal import IMPLEMENTATION, attention
from foredraft.types import NO_DRAFT, SamplingParams, chain

SIZES = (1, 2, 4, 8, 16, 32)  # of sequences, and of rows
RATES = (0.6, 0.8)
REQUESTS = (1, 8)  # that the engine decodes at once
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "vocab_size")
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
}
Cell = tuple[int, int]  # sequences, rows of each


class Plain(BucketedCausal):
    """The same weights, every pass as it comes."""

    forward = HFCausal.forward

    def __init__(self, other: BucketedCausal) -> None:
        vars(self).update(vars(other))


def main(argv: Seq[str] | None = None) -> None:
    """Measure and print; --out keeps every figure, one JSON object a line."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=SHAPES, default="1b")
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    cli.add_argument("--context", type=int, default=500, help="tokens before the step (default 500)")
    cli.add_argument("--repeats", type=int, default=5, help="of a pass, the fastest counts (default 5)")
    cli.add_argument("--tokens", type=int, default=64, help="decoded a request (default 64)")
    cli.add_argument("--out", type=Path)
    args = cli.parse_args(argv)
    target = random_target(args.shape, args.device, getattr(torch, args.dtype))
    arms: dict[str, HFCausal] = {"graphs": target, "plain": Plain(target)}
    seconds = pass_seconds(arms, args.context, args.repeats)
    records = [
        {"kind": "pass", "arm": arm, "seqs": seqs, "rows": rows, "seconds": took}
        for arm, cells in seconds.items()
        for (seqs, rows), took in cells.items()
    ]
    records += [{"kind": "speed_up", "arm": arm, **gain} for arm in arms for gain in gains(seconds[arm])]
    records += [
        {"kind": "decode", "arm": arm, "seqs": seqs, "tokens_per_s": decoded(arms[arm], seqs, args.tokens)}
        for seqs in REQUESTS
        for arm in arms
    ]
    where = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else args.device
    facts = {"shape": args.shape, "device": where, "dtype": args.dtype, "context": args.context}
    facts["torch"] = str(torch.__version__)
    show(facts, records)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**facts, **record}) + "\n" for record in records]
        args.out.write_text("".join(lines), encoding="utf-8")


def random_target(shape: str, device: str, dtype: torch.dtype) -> BucketedCausal:
    """Return a Llama of random weights, made where it runs."""
    import transformers

    transformers.AttentionInterface.register(IMPLEMENTATION, attention)
    sizes = dict(zip(NAMES, SHAPES[shape], strict=True))
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=shape == "1b"
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
    return BucketedCausal(HFCausal(model.eval(), f"random {shape}"))


def pass_seconds(arms: dict[str, HFCausal], context: int, repeats: int) -> dict[str, dict[Cell, float]]:
    """T of each arm: sequences that each feed a root and a chain behind `context` tokens. The cache is empty,
    which takes as long to read.
    """
    target = next(iter(arms.values()))
    room = context + max(SIZES)
    kv, tables = target.make_kv(max(SIZES) * (room + 32)), [BlockTable() for _ in range(max(SIZES))]
    for table in tables:
        kv.pool.grow(table, room)
    cells = [(seqs, rows) for seqs in SIZES for rows in SIZES]
    found: dict[str, dict[Cell, float]] = {arm: {} for arm in arms}
    for cell in track(cells, "passes", console=Console(stderr=True), transient=True):
        seqs, rows = cell
        draft = chain(range(1, rows)) if rows > 1 else NO_DRAFT
        batch = make_batch([Feed([0], context - 1, table, draft) for table in tables[:seqs]])
        for repeat in range(repeats + 1):
            for arm, one in arms.items():
                took = timed(one, batch, kv)
                if repeat > 0:  # the first records
                    found[arm][cell] = min(took, found[arm].get(cell, took))
    return found


def timed(target: HFCausal, batch: Batch, kv: KVCache) -> float:
    """Seconds of one pass, from the host's first word to the device's last."""
    wait(target.device)
    start = time.perf_counter()
    target.forward(batch, kv)
    wait(target.device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gains(seconds: dict[Cell, float]) -> list[dict[str, Any]]:
    """What chains whose guesses are right at given rates gain at each number of sequences."""
    found = []
    for rate in RATES:
        for seqs in SIZES:
            speed_ups = {
                rows: mean_emitted(rate, rows - 1) * seconds[seqs, 1] / seconds[seqs, rows] for rows in SIZES
            }
            best = max(speed_ups, key=speed_ups.__getitem__)
            found.append({"accept_rate": rate, "seqs": seqs, "rows": best, "speed_up": speed_ups[best]})
    return found


def mean_emitted(rate: float, nodes: int) -> float:
    """Tokens a step of a chain, of which each guess is right with chance `rate` if all before it were."""
    return float(sum(rate**depth for depth in range(nodes + 1)))


def decoded(target: HFCausal, seqs: int, tokens: int) -> float:
    """Tokens a second of plain decoding, a warm-up before; the engine runs `seqs` requests at once."""
    config = EngineConfig(max_seqs=seqs, max_len=256, max_batch_tokens=512, kv_tokens=256 * seqs)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine, took = Engine(target, config=config), 0.0
    for _ in range(2):
        for seq in range(seqs):
            engine.add([1 + seq, 2, 3, 4], params)
        engine.step()  # reads the prompts
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        took = time.perf_counter() - start
    return seqs * (tokens - 1) / took


def show(facts: dict[str, Any], records: Seq[dict[str, Any]]) -> None:
    """Print the tables."""
    console = Console(width=110)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for arm in ("graphs", "plain"):
        title = f"ms a pass, {arm}"
        table = Table("sequences", *(f"{rows} rows" for rows in SIZES), title=title)
        for seqs in SIZES:
            took = [r["seconds"] for r in records if (r["kind"], r["arm"], r["seqs"]) == ("pass", arm, seqs)]
            table.add_row(str(seqs), *(f"{1e3 * cell:.2f}" for cell in took))
        console.print(table)
    table = Table("path", "accept rate", *(f"{seqs} sequences" for seqs in SIZES))
    table.title = "speed-up that free guesses would give (at so many rows)"
    for arm in ("graphs", "plain"):
        for rate in RATES:
            cells = [
                f"{r['speed_up']:.2f} ({r['rows']})"
                for r in records
                if r["kind"] == "speed_up" and (r["arm"], r["accept_rate"]) == (arm, rate)
            ]
            table.add_row(arm, str(rate), *cells)
    console.print(table)
    table = Table("path", "sequences", "tokens/s", title="plain decoding, measured")
    for r in records:
        if r["kind"] == "decode":
            table.add_row(r["arm"], str(r["seqs"]), f"{r['tokens_per_s']:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
