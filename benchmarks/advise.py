"""Does `advise` predict what `measure` finds? Predicted and measured speed-up of each draft at each load.

    GOMP_SPINCOUNT=10000 python benchmarks/advise.py --drafts ngram,suffix,medusa,eagle --loads 1,4,16
    python benchmarks/advise.py --requests prompts/*.jsonl --limit 8 --max-tokens 64 --loads 1

Of each draft the best predicted fixed budget is measured, and the controller's budgets ("auto"), against
plain decoding in the same run, arms in turn. Needs a machine that does nothing else: prediction and
measurement of a load are minutes apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foredraft import LLM
from foredraft.measure import run
from foredraft.measure.advise import Advice, predict
from foredraft.measure.engine_arm import Bench, EngineArm, open_bench
from foredraft.measure.methods import method_of, traffic_of
from foredraft.measure.records import RecordFile
from foredraft.measure.stats import figures
from foredraft.measure.workload import Ask, Defaults, Load, load_asks, parse_loads

console = Console(stderr=True)


def main() -> None:
    """Predict, measure, print the table."""
    args = parse()
    asks = load_asks(args.requests, Defaults(max_tokens=args.max_tokens), args.limit)
    bench = open_bench(LLM(args.model, dtype=args.dtype, prefix_cache=False), asks, args.loads)
    methods = [method_of(bench, draft) for draft in args.drafts]
    traffic = traffic_of(bench, asks)
    rows, costs = [], []
    for load in args.loads:
        with console.status("predicting") as status:
            advice = predict(bench.target, methods, traffic, [load.concurrency or 1], status.update)
        costs += [asdict(one) for one in advice.costs]
        rows += compare(bench, advice, args.drafts, asks, load, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as out:
        header = {"command": vars(args), "machine": run.machine(), "costs": costs}
        for row in (header, *rows):
            out.write(json.dumps(row, default=str) + "\n")
    show(rows)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--requests", type=Path, nargs="*", default=[], help="JSONL; without any, the built-in")
    cli.add_argument("--limit", type=int, help="use the first N requests of each file")
    cli.add_argument("--max-tokens", type=int, default=96)
    cli.add_argument(
        "--drafts", type=lambda text: text.split(","), default=["ngram", "suffix", "medusa", "eagle"]
    )
    cli.add_argument("--loads", type=parse_loads, default=parse_loads("1,4,16"))
    cli.add_argument("--rounds", type=int, default=3, help="times all requests are asked, arms in turn")
    cli.add_argument("--out", type=Path, default=Path("results/advise.jsonl"))
    return cli.parse_args()


def compare(
    bench: Bench, advice: Advice, drafts: Sequence[str], asks: Sequence[Ask], load: Load, rounds: int
) -> list[dict[str, Any]]:
    """Measure plain decoding and, of each draft, its best fixed budget and auto; return a row for each."""
    assert load.concurrency is not None
    said = [found(draft, load.concurrency) for draft in drafts for found in (advice.of, advice.auto)]
    arms = [EngineArm("none", "none", bench.engine("none"), bench)]
    for one in said:
        name = f"{one.method}:{one.budget or 'auto'}"
        arms.append(EngineArm(name, one.method, bench.engine(one.method, one.budget or "auto"), bench))
    file = RecordFile(None, run.make_header(arms, [load], asks, 0))
    with console.status(f"measuring at load {load.label}"):
        for arm in arms:
            run.warm_up(arm, asks)
        for turn in range(rounds):
            first = turn % len(arms)
            some = [replace(ask, id=f"{ask.id} {turn}") for ask in asks]
            run.measure(arms[first:] + arms[:first], some, [load], file)
    rows = []
    for one, arm in zip(said, arms[1:], strict=True):
        found = figures(file.record, arm.name, load.label)
        assert found is not None
        assert found.speedup is not None
        measured = asdict(found.speedup)
        rates = {"measured_accept_rate": found.accept_rate, "measured_mean_emitted": found.mean_emitted}
        ratio = one.speedup / found.speedup.value
        rows.append({"arm": arm.name, **asdict(one), "measured": measured, **rates, "ratio": ratio})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each load and arm, and how far off the worst is."""
    table = Table("load", "draft:budget", "predicted", "measured", "interval", "ratio", "mean_emitted")
    for row in rows:
        measured, low = row["measured"], row["measured"]["low"]
        table.add_row(
            str(row["load"]),
            row["arm"],
            f"{row['speedup']:.2f}",
            f"{measured['value']:.2f}",
            "-" if low is None else f"{low:.2f} to {measured['high']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['mean_emitted']:.2f}, {row['measured_mean_emitted']:.2f}",
        )
    Console(width=110).print(table)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    print(f"farthest off: {worst['arm']} at load {worst['load']}, predicted / measured {worst['ratio']:.2f}")


if __name__ == "__main__":
    main()
