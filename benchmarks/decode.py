"""Tokens per second of several ways to decode the same prompts, paired and alternating.

Each prompt is decoded by every arm, one after another, in an order that rotates from prompt to prompt, after
a warm-up. Ratios are of total tokens per second, with a 95 % bootstrap interval over prompts.

    python benchmarks/decode.py --prompts prompts/*.jsonl --limit 20 --out results/decode.jsonl
    python benchmarks/decode.py --arms plain,ngram,suffix                   # the demo's built-in prompts

Prompt files are JSONL with `id`, `category` and `messages`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.rows import read_rows

Arm = Callable[[list[int]], tuple[list[int], dict[str, Any]]]  # prompt ids -> output ids, what else is known
WARM_UP = "Say it again: one two three four, one two three four, one two three four."


def main() -> None:
    """Measure, write the records, print the table."""
    args = parse()
    torch.manual_seed(args.seed)
    rows = load(args.prompts, args.limit)
    llms = {
        name: LLM(args.model, draft=draft_of(name), dtype=args.dtype, prefix_cache=False)
        for name in args.arms
        if name != "transformers"
    }
    first = next(iter(llms.values()))
    arms: dict[str, Arm] = {name: our_arm(llm, args) for name, llm in llms.items()}
    if "transformers" in args.arms:
        arms["transformers"] = transformers_arm(first.model_path, args)
    arms = {name: arms[name] for name in args.arms}

    def encode(messages: Sequence[dict[str, str]]) -> list[int]:
        return list(
            first.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )

    for arm in arms.values():
        arm(encode([{"role": "user", "content": WARM_UP}]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with args.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps(header(args)) + "\n")
        for number, row in enumerate(track(rows, description="decoding", console=Console(stderr=True))):
            names = list(arms)
            names = names[number % len(names) :] + names[: number % len(names)]
            for name in names:
                start = time.perf_counter()
                ids, more = arms[name](encode(row["messages"]))
                wall_s = time.perf_counter() - start
                record = {"id": row["id"], "category": row["category"], "arm": name, "emitted": len(ids)}
                records.append(record | {"wall_s": wall_s, "ids": ids} | more)
                out.write(json.dumps(records[-1]) + "\n")
                out.flush()
    report(records, args.arms)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--prompts", type=Path, nargs="*", help="JSONL files; without any, the demo's prompts")
    cli.add_argument("--limit", type=int, default=20, help="use the first N rows of each file")
    cli.add_argument(
        "--arms", type=lambda text: text.split(","), default=["transformers", "plain", "ngram", "suffix"]
    )
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--temperature", type=float, default=0.0)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--out", type=Path, default=Path("results/decode.jsonl"))
    return cli.parse_args()


def load(paths: Sequence[Path] | None, limit: int) -> list[dict[str, Any]]:
    """Read the first `limit` rows of each file, or the demo's prompts."""
    if not paths:
        from foredraft.demo import demo_prompts

        return [
            {"id": f"demo-{i}", "category": p.category, "messages": [{"role": "user", "content": p.text}]}
            for i, p in enumerate(demo_prompts())
        ]
    return [row for path in paths for _, row in islice(read_rows(path), limit)]


def draft_of(arm: str) -> str | None:
    """Return the draft that an arm's name stands for: `plain` has none."""
    return None if arm == "plain" else arm


def our_arm(llm: LLM, args: argparse.Namespace) -> Arm:
    """Decode with foredraft."""
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)

    def run(prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        pieces = list(llm.stream(prompt, params))
        stats = pieces[-1].stats
        assert stats is not None
        return [token for piece in pieces for token in piece.token_ids], {
            "first_tokens": len(pieces[0].token_ids),
            "steps": stats.steps,
            "drafted": stats.drafted,
            "levels": stats.levels,
            "accepted": stats.accepted,
            "accepted_at": stats.accepted_at,
            "prompt_s": stats.prompt_s,
            "draft_s": stats.draft_s,
            "target_s": stats.target_s,
            "other_s": stats.other_s,
        }

    return run


def transformers_arm(path: Path, args: argparse.Namespace) -> Arm:
    """Decode with transformers' own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    options: dict[str, Any] = {"max_new_tokens": args.max_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}

    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        inputs = torch.tensor([prompt])
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        return out[0, len(prompt) :].tolist(), {}

    return run


def header(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader needs to repeat the run."""
    import transformers

    return {
        "command": sys.argv,
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
    }


def decode_speed(records: Sequence[dict[str, Any]]) -> float | None:
    """Return tokens/s after the step that read the prompt; None for an arm that does not tell."""
    if any("prompt_s" not in r for r in records):
        return None
    decode_s = sum(r["draft_s"] + r["target_s"] + r["other_s"] for r in records)
    return sum(r["emitted"] - r["first_tokens"] for r in records) / decode_s


def ratio(records: Sequence[dict[str, Any]], arm: str, base: str) -> tuple[float, float, float]:
    """Return tokens/s of `arm` over that of `base`, and its 95 % bootstrap interval over prompts."""
    sides = []
    for name in (arm, base):
        mine = sorted((r["id"], r["emitted"], r["wall_s"]) for r in records if r["arm"] == name)
        sides.append(np.array([(emitted, wall_s) for _, emitted, wall_s in mine]))
    totals = [side.sum(axis=0) for side in sides]
    point = (totals[0][0] / totals[0][1]) / (totals[1][0] / totals[1][1])
    return float(point), *interval(*sides)


def interval(mine: NDArray[np.float64], base: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of one speed over another; both: tokens and seconds, [n, 2]."""
    draws = np.random.default_rng(0).integers(len(mine), size=(2000, len(mine)))
    speeds = [side[draws].sum(axis=1) for side in (mine, base)]
    samples = (speeds[0][:, 0] / speeds[0][:, 1]) / (speeds[1][:, 0] / speeds[1][:, 1])
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def shares(records: Sequence[dict[str, Any]], most: int = 5) -> list[float]:
    """Return the share of steps that accepted a guess at depth 1, 2, …, of `most` depths."""
    steps = sum(r.get("steps", 0) for r in records)
    rows = [r.get("accepted_at", []) for r in records]
    deepest = min(most, max(map(len, rows), default=0))
    return [sum(row[depth] for row in rows if depth < len(row)) / steps for depth in range(deepest)]


def draft_share(records: Sequence[dict[str, Any]]) -> float | None:
    """Return the time of drafting over that of target passes, after the prompt; None where none is told."""
    target_s = sum(r.get("target_s", 0.0) for r in records)
    return sum(r["draft_s"] for r in records) / target_s if target_s else None


def report(records: Sequence[dict[str, Any]], arms: Sequence[str]) -> None:
    """Print one table: a row for each category and arm."""
    base = "plain" if "plain" in arms else arms[0]
    table = Table(
        title=f"tokens/s in all, after the prompt; ratio in all to {base}, 95 % interval; draft / target time"
    )
    for column in (
        "category",
        "arm",
        "prompts",
        "tokens/s",
        "decode",
        "ratio",
        "interval",
        "accept_rate",
        "mean_emitted",
        "accepted_at",
        "draft time",
        "differ",
    ):
        table.add_column(column, justify="left" if column in ("category", "arm") else "right")
    categories = list(dict.fromkeys(r["category"] for r in records))
    for category in [*categories, "all"] if len(categories) > 1 else ["all"]:
        some = [r for r in records if category in ("all", r["category"])]
        plain_ids = {r["id"]: r["ids"] for r in some if r["arm"] == base}
        for arm in arms:
            mine = [r for r in some if r["arm"] == arm]
            point, low, high = ratio(some, arm, base)
            speed = sum(r["emitted"] for r in mine) / sum(r["wall_s"] for r in mine)
            levels, steps = (sum(r.get(name, 0) for r in mine) for name in ("levels", "steps"))
            table.add_row(
                category,
                arm,
                str(len(mine)),
                f"{speed:.1f}",
                "-" if (decode := decode_speed(mine)) is None else f"{decode:.1f}",
                f"{point:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{sum(r['accepted'] for r in mine) / levels:.2f}" if levels else "-",
                f"{sum(r['emitted'] for r in mine) / steps:.2f}" if steps else "-",
                " ".join(f"{share:.2f}" for share in shares(mine)) or "-",
                "-" if (share := draft_share(mine)) is None else f"{share:.2f}",
                str(sum(r["ids"] != plain_ids[r["id"]] for r in mine)),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
