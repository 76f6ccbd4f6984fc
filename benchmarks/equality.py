"""Is greedy text the target's own? Counts prompts on which we differ from transformers' generate, in float32.

    python benchmarks/equality.py --prompts prompts/*.jsonl --limit 7 --out results/equality.jsonl

Each prompt is decoded by transformers, and by us for each draft and batch size. A difference is a tie if at
the first differing position the target's two best logits are closer than --noise; anything else is a bug, and
the exit code 1. The draft `truncated` is a copy of the target's first layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from decode import load
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foredraft import LLM, SamplingParams, zoo


def truncated_copy(source: Path, target: Path, layers: int) -> Path:
    """Write the model in `source` with its first `layers` layers alone, tokenizer included."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):  # which of them have a sliding window
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


@torch.inference_mode()
def reference(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return what transformers' own greedy generate answers."""
    inputs = torch.tensor([list(prompt)])
    mask = torch.ones_like(inputs)
    out = model.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def gap(model: Any, text: Sequence[int]) -> float:
    """Return how far apart the target's two best logits after `text` are."""
    best = model(torch.tensor([list(text)])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def judge(model: Any, prompt: list[int], wanted: list[int], got: list[int], noise: float) -> str:
    """Return "same", "tie" or "DIFFERENT"."""
    if wanted == got:
        return "same"
    pairs = zip(wanted, got, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return "DIFFERENT"  # one is the beginning of the other: no tie explains that
    return "tie" if gap(model, prompt + wanted[:first]) <= noise else "DIFFERENT"


def main() -> int:
    """Run everything, print the table; 1 if anything differs by more than a tie."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--prompts", type=Path, nargs="*", help="JSONL files; without any, the demo's prompts")
    cli.add_argument("--limit", type=int, default=7, help="use the first N rows of each file")
    cli.add_argument("--max-tokens", type=int, default=64)
    cli.add_argument("--drafts", type=lambda text: text.split(","), default=["none", "ngram", "truncated"])
    cli.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    cli.add_argument("--layers", type=int, default=8, help="layers of the truncated draft")
    cli.add_argument("--noise", type=float, default=1e-3, help="logit gap within which a difference is a tie")
    cli.add_argument("--out", type=Path, default=Path("results/equality.jsonl"))
    args = cli.parse_args()

    path = zoo.resolve(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    rows = load(args.prompts, args.limit)
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for row in rows
    ]
    progress = Console(stderr=True)
    wanted = [reference(model, p, args.max_tokens) for p in track(prompts, "transformers", console=progress)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(title=f"{len(prompts)} prompts, {args.max_tokens} tokens, float32")
    for column in ("draft", "batch", "same", "tie", "DIFFERENT", "accept_rate"):
        table.add_column(column)
    bad = 0
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with tempfile.TemporaryDirectory() as folder, args.out.open("w", encoding="utf-8") as out:
        for name in args.drafts:
            draft = truncated_copy(path, Path(folder) / "draft", args.layers) if name == "truncated" else name
            for batch in args.batch:
                llm = LLM(
                    args.model, draft=None if name == "none" else draft, dtype="float32", max_seqs=batch
                )
                answers = []
                for start in track(
                    range(0, len(prompts), 4 * batch), f"{name}, batch {batch}", console=progress
                ):
                    answers += llm.generate(prompts[start : start + 4 * batch], params)
                verdicts = [
                    judge(model, p, w, a.token_ids, args.noise)
                    for p, w, a in zip(prompts, wanted, answers, strict=True)
                ]
                for row, verdict in zip(rows, verdicts, strict=True):
                    record = {"id": row["id"], "draft": name, "batch": batch, "verdict": verdict}
                    out.write(json.dumps(record) + "\n")
                bad += verdicts.count("DIFFERENT")
                levels = sum(a.stats.levels for a in answers)
                rate = f"{sum(a.stats.accepted for a in answers) / levels:.2f}" if levels else "-"
                counts = [str(verdicts.count(kind)) for kind in ("same", "tie", "DIFFERENT")]
                table.add_row(name, str(batch), *counts, rate)
    Console().print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
