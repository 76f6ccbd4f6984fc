"""The roofline of a step: what a target pass must read, what it takes, and what drafting makes of it.

    GOMP_SPINCOUNT=10000 python benchmarks/steps.py --model smollm2-135m

Prints the bytes that a pass over one row reads, the time that takes at the measured speed of memory (the
floor), T(n) for n rows on both paths, and for one drafted answer the time outside draft and target and the
efficiency: measured speed-up over the speed-up that mean_emitted and T(n) allow. Sizes alternate; the fastest
of a few runs counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foredraft import LLM, Completion, SamplingParams, zoo
from foredraft.control.cost import on_line
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.types import NO_DRAFT, SpecStats, chain

ROWS = (1, 2, 4, 8, 16, 32)
COPYABLE = (
    "Repeat this list three times: oak, ash, elm, fir, yew, box, bay, fig, plum, pear, lime, rowan, larch."
)


def main() -> None:
    """Measure and print; --out keeps the figures as one JSON object."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--context", type=int, default=200)
    cli.add_argument("--repeats", type=int, default=7)
    cli.add_argument("--tokens", type=int, default=96)
    cli.add_argument("--out", type=Path)
    args = cli.parse_args()
    torch.manual_seed(0)
    path = zoo.resolve(args.model)
    paths = {
        name: load_target(path, dtype=args.dtype, device="cpu", fused=fused)
        for name, fused in (("fused", True), ("modules", False))
    }
    read = bytes_read(path, paths["fused"], args.context)
    speed = memory_speed()
    seconds = pass_seconds(paths, args.context, args.repeats)
    drafted = answer_stats(args, seconds["fused"])
    found = {
        "model": args.model,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "bytes_read": read,
        "bytes_per_s": speed,
        "floor_s": read / speed,
        "seconds": seconds,
        "drafted": drafted,
    }
    show(found)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found) + "\n", encoding="utf-8")


def bytes_read(path: Path, target: HFCausal, context: int) -> int:
    """Weights that every pass reads (a tied embedding once, as the output layer), and the cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    skipped = model.get_input_embeddings() if not model.config.tie_word_embeddings else None
    weights = sum(p.numel() for p in model.parameters())
    weights -= sum(p.numel() for p in skipped.parameters()) if skipped is not None else 0
    return weights * target.dtype.itemsize + context * target.kv_bytes_per_token


def memory_speed(size: int = 1 << 28) -> float:
    """Bytes per second of summing a large array with all threads, the fastest of a few."""
    store = torch.ones(size // 8, dtype=torch.float64)
    return size / min(timed(lambda: store.sum()) for _ in range(8))


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pass_seconds(paths: dict[str, HFCausal], context: int, repeats: int) -> dict[str, dict[int, float]]:
    """T(n) of each path: a root and a chain of n - 1 nodes behind `context` tokens."""
    text = torch.randint(3, 1000, (context + max(ROWS),)).tolist()
    caches = {}
    for name, target in paths.items():
        kv, table = target.make_kv(len(text)), BlockTable()
        kv.pool.grow(table, len(text))
        target.forward(make_batch([Feed(text[: context - 1], 0, table, None)]), kv)
        caches[name] = kv, table
    seconds: dict[str, dict[int, float]] = {name: {} for name in paths}
    for _ in range(repeats):
        for rows in ROWS:
            for name, target in paths.items():
                kv, table = caches[name]
                draft = chain(text[context : context + rows - 1]) if rows > 1 else NO_DRAFT
                batch = make_batch([Feed(text[context - 1 : context], context - 1, table, draft)])
                took = timed(lambda target=target, batch=batch, kv=kv: target.forward(batch, kv))
                seconds[name][rows] = min(took, seconds[name].get(rows, took))
    return seconds


def answer_stats(args: argparse.Namespace, seconds: dict[int, float]) -> dict[str, float]:
    """Decode one copyable answer plainly and drafted, in turn; return rates and the efficiency."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    llms = {draft: LLM(args.model, draft, dtype=args.dtype, prefix_cache=False) for draft in (None, "ngram")}
    best: dict[str | None, SpecStats] = {}
    for _ in range(4):
        for draft, llm in llms.items():
            stats = answer(llm, params).stats
            if draft not in best or decode_s(stats) < decode_s(best[draft]):
                best[draft] = stats
    plain, drafted = best[None], best["ngram"]
    speed_up = decode_s(plain) / decode_s(drafted)
    rows = 1 + drafted.drafted / drafted.steps
    allowed = drafted.mean_emitted * seconds[1] / on_line(list(seconds), list(seconds.values()), rows)
    return {
        "mean_emitted": drafted.mean_emitted,
        "rows": rows,
        "speed_up": speed_up,
        "allowed": allowed,
        "efficiency": speed_up / allowed,
        "other_share_plain": plain.other_s / decode_s(plain),
        "other_share_drafted": drafted.other_s / decode_s(drafted),
        "draft_share": drafted.draft_s / decode_s(drafted),
    }


def answer(llm: LLM, params: SamplingParams) -> Completion:
    """Answer what repeats itself, or go on with it if the model has no chat template."""
    if llm.tokenizer.chat_template:
        return llm.chat([{"role": "user", "content": COPYABLE}], params)
    return llm.generate(COPYABLE, params)[0]


def decode_s(stats: SpecStats) -> float:
    """Seconds after the prompt."""
    return stats.draft_s + stats.target_s + stats.other_s


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=100)
    floor = found["floor_s"]
    console.print(
        f"{found['model']}, {found['dtype']}, {found['threads']} threads: a pass reads "
        f"{found['bytes_read'] / 1e6:.0f} MB, memory gives {found['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"so the floor is {floor * 1e3:.1f} ms"
    )
    table = Table("path", *(f"T({rows})" for rows in ROWS), "T(8)/T(1)", "floor/T(1)", title="ms a pass")
    for name, times in found["seconds"].items():
        cells = [f"{times[rows] * 1e3:.1f}" for rows in ROWS]
        table.add_row(name, *cells, f"{times[8] / times[1]:.2f}", f"{floor / times[1]:.2f}")
    console.print(table)
    console.print({name: round(value, 3) for name, value in found["drafted"].items()})


if __name__ == "__main__":
    main()
