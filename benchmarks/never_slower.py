"""Is drafting with budget "auto" ever slower than plain decoding? Paired runs, repeated until it is clear.

    GOMP_SPINCOUNT=10000 python benchmarks/never_slower.py --loads 1,4,16 --drafts auto,untrained,fading

Prompts are served `load` at a time, plainly and drafted, in alternating order. A pair gives the ratio of
their tokens per second until the last answer of the group is done, and how much sooner an answer is on
average; a group of prompts is repeated until the 95 % interval of the mean log ratio is
within 1 % to each side, or --most times. Drafts: a name that LLM knows; `useless` guesses random tokens;
`untrained` is an EAGLE head of random weights, which costs what a trained one does; `fading` is the n-gram
lookup for the first half of an answer and random tokens after. On a machine that other programs share one
thread and --clock cpu disturb less, and still by several percent.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from decode import load
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from foredraft import LLM, SamplingParams, zoo
from foredraft.control import AcceptanceBudget, pass_costs
from foredraft.engine.drafter import Drafter
from foredraft.engine.sequence import Sequence
from foredraft.models.checkpoint import target_facts
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.propose import NgramProposer
from foredraft.propose.heads import save_eagle
from foredraft.train.recipes import fused_layers
from foredraft.types import Draft, Needs, Source, chain

LONGEST = 8
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Useless(NgramProposer):
    """Random tokens once an answer is `after` tokens long; before, what the n-gram lookup finds."""

    needs = Needs()

    def __init__(self, vocab_size: int, after: int) -> None:
        super().__init__()
        self.vocab_size, self.after, self.random = vocab_size, after, random.Random(0)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one chain a sequence."""
        found = super().propose(seqs, budgets)
        return [
            chain([self.random.randrange(self.vocab_size) for _ in range(min(budget, seq.levels_left))])
            if len(seq.output) >= self.after
            else draft
            for seq, budget, draft in zip(seqs, budgets, found, strict=True)
        ]


def main() -> None:
    """Measure every draft at every load; end with 1 if a ratio is below the bar."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--prompts", type=Path, nargs="*", help="JSONL files; without any, the demo's prompts")
    cli.add_argument("--limit", type=int, default=20, help="use the first N rows of each file")
    cli.add_argument("--loads", type=numbers, default=[1, 2, 4, 8, 16, 32])
    cli.add_argument(
        "--drafts", type=lambda text: text.split(","), default=["auto", "untrained", "useless", "fading"]
    )
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--temperature", type=float, default=0.0)
    cli.add_argument("--most", type=int, default=12, help="pairs a group at most")
    cli.add_argument("--clock", choices=list(CLOCKS), default="wall")
    cli.add_argument("--bar", type=float, default=0.98)
    cli.add_argument("--out", type=Path, default=Path("results/never_slower.jsonl"))
    args = cli.parse_args()
    prompts = load(args.prompts, args.limit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    with args.out.open("w", encoding="utf-8") as out:
        for draft in args.drafts:
            llm = drafting(draft, args)
            for size in args.loads:
                for first in range(0, max(len(prompts) - size + 1, 1), size):
                    group = [prompts[(first + i) % len(prompts)] for i in range(size)]
                    record = compare(llm, group, args)
                    records.append(
                        {"draft": draft, "load": size, "ids": [row["id"] for row in group]} | record
                    )
                    out.write(json.dumps(records[-1]) + "\n")
                    out.flush()
    report(records)
    sys.exit(any(record["high"] < args.bar for record in records))


def numbers(text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def drafting(draft: str, args: argparse.Namespace) -> LLM:
    """An LLM with this draft and the automatic budget."""
    if draft == "untrained":
        with tempfile.TemporaryDirectory() as path:
            write_untrained(Path(path), args.model)
            return LLM(args.model, path, max_seqs=max(args.loads), prefix_cache=False)
    name = "ngram" if draft in ("useless", "fading") else draft
    llm = LLM(args.model, name, max_seqs=max(args.loads), prefix_cache=False)
    if name != draft:
        after = args.max_tokens // 2 if draft == "fading" else 0
        target: Any = llm.engine.target
        controller = AcceptanceBudget(Source(LONGEST), costs=pass_costs(target, target.name))
        llm.engine.drafter = Drafter(Useless(target.vocab_size, after), controller)
    return llm


def write_untrained(path: Path, model: str) -> None:
    """Write an EAGLE head of random weights, in the shape of the one that is trained here."""
    from transformers import AutoConfig

    home = zoo.resolve(model)
    facts, config = target_facts(home), AutoConfig.from_pretrained(home)
    torch.manual_seed(0)
    head = EagleLayer(EagleConfig.like(config, fused_layers(facts.num_layers), 8192))
    save_eagle(path, head, facts, max_len=config.max_position_embeddings)


def compare(llm: LLM, group: Seq[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Serve a group of prompts in pairs of runs until the ratio is known well enough. Both runs of a pair are
    made by the same engine, since where two engines' weights lie in memory makes one of them 1 % slower.
    """
    drafted, plain = llm.engine.drafter, Drafter(None, None)
    ratios: list[float] = []
    sooner: list[float] = []
    for turn in range(args.most):
        speeds, waits = {}, {}
        for drafter in (plain, drafted) if turn % 2 == 0 else (drafted, plain):
            llm.engine.drafter = drafter
            speeds[drafter], waits[drafter] = serve(llm, group, args, seed=turn)
        ratios.append(math.log(speeds[drafted] / speeds[plain]))
        sooner.append(waits[plain] / waits[drafted])
        if len(ratios) >= 3 and half_width(ratios) < 0.01:
            break
    llm.engine.drafter = drafted
    mean, half = sum(ratios) / len(ratios), half_width(ratios)
    bounds = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
    return bounds | {"sooner": geometric_mean(sooner), "pairs": len(ratios)}


def half_width(ratios: Seq[float]) -> float:
    """Half of the 95 % interval of the mean."""
    if len(ratios) < 2:
        return math.inf
    spread = torch.tensor(ratios, dtype=torch.float64).std().item()
    return float(student.ppf(0.975, len(ratios) - 1)) * spread / math.sqrt(len(ratios))


def serve(llm: LLM, group: Seq[dict[str, Any]], args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return the tokens per second of answering all prompts of a group at once, reading them included, and
    the mean seconds to the end of an answer.
    """
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=seed, ignore_eos=True
    )
    clock = CLOCKS[args.clock]
    start = clock()
    answers = llm.chat([row["messages"] for row in group], params)
    speed = sum(len(answer.token_ids) for answer in answers) / (clock() - start)
    return speed, sum(answer.stats.total_s for answer in answers) / len(answers)


def report(records: Seq[dict[str, Any]]) -> None:
    """Print a row for each draft and load."""
    table = Table("draft", "load", "groups", "pairs", "mean", "lowest", "its interval", "an answer")
    for draft, size in dict.fromkeys((r["draft"], r["load"]) for r in records):
        mine = [r for r in records if (r["draft"], r["load"]) == (draft, size)]
        worst = min(mine, key=lambda r: r["ratio"])
        mean, sooner = (geometric_mean(r[key] for r in mine) for key in ("ratio", "sooner"))
        table.add_row(
            draft,
            str(size),
            str(len(mine)),
            str(sum(r["pairs"] for r in mine)),
            f"{mean:.3f}",
            f"{worst['ratio']:.3f}",
            f"{worst['low']:.3f} to {worst['high']:.3f}",
            f"{sooner:.3f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
