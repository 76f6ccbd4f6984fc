"""foredraft beside other engines: the same prompts, one run of every arm after another, several rounds.

    python benchmarks/peers.py --scripts PEERS --prompts prompts/*.jsonl --limit 2 --rounds 2 \\
        --arms foredraft:plain,foredraft:eagle+suffix,openvino:plain,openvino:ngram,llamacpp:plain:q8_0

An arm is ENGINE:MODE[:DTYPE[:DRAFT_TOKENS]]. Another engine is run by its script PEERS/peer_ENGINE.py in the
environment $PEERS_HOME/venv-ENGINE; arms whose environment is not there are left out, and named. Rounds go
through the arms forwards and backwards in turn. --tune picks, for each engine and dtype, the drafting arm
that is fastest on these prompts, and only that is measured on the prompts of --prompts.
Ratios are of tokens per second, reading the prompt included, with a 95 % bootstrap interval over prompts; of
arms that run several requests at once the interval is over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decode import interval, load
from rich.console import Console
from rich.table import Table

from foredraft.rows import read_rows

HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/peers")).expanduser()
OWN = "foredraft"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # the scripts' words and ours
# What an engine wants loaded before everything else, as far as it is there.
PRELOAD = {
    "vllm": (HOME / "venv-vllm/lib/libiomp5.so", Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"))
}
console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode. dtype: of the weights, in the words of the script."""

    engine: str
    mode: str
    dtype: str = "bf16"
    draft_tokens: str = ""

    @classmethod
    def parse(cls, text: str) -> Arm:
        parts = text.split(":")
        if not 2 <= len(parts) <= 4 or not all(parts) or not all(map(str.isdecimal, parts[3:])):
            raise argparse.ArgumentTypeError(f"{text!r} is no arm: use ENGINE:MODE[:DTYPE[:DRAFT_TOKENS]]")
        arm = cls(*parts)
        if arm.engine == OWN and (arm.draft_tokens or arm.dtype not in DTYPES):
            use = f"use {OWN}:MODE[:DTYPE], DTYPE one of {', '.join(DTYPES)}"
            raise argparse.ArgumentTypeError(f"{text!r} is no arm of ours: {use}")
        return arm

    @property
    def name(self) -> str:
        return ":".join(part for part in (self.engine, self.mode, self.dtype, self.draft_tokens) if part)

    def script(self, folder: Path | None) -> Path:
        """Return what answers prompts with it."""
        if self.engine == OWN:
            return Path(__file__).resolve()
        return (folder or Path()).resolve() / f"peer_{self.engine}.py"

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.engine == OWN else HOME / f"venv-{self.engine}/bin/python"

    def command(self, args: argparse.Namespace, prompts: Path, out: Path) -> list[str]:
        """Return what answers the prompts of a file."""
        more = ["--mode", self.mode, "--dtype", self.dtype]
        if self.engine == OWN:
            more = ["--own", self.mode, "--own-dtype", DTYPES[self.dtype], "--model", args.model]
        if self.engine == "llamacpp" and self.dtype != "q4_1":
            more += ["--model", str(HOME / f"smollm2-135m.{self.dtype}.gguf")]
        if self.draft_tokens:
            more += ["--draft-tokens", self.draft_tokens]
        if args.concurrency > 1:
            more += ["--concurrency", str(args.concurrency)]
        common = {"--prompts": prompts, "--out": out, "--max-tokens": args.max_tokens}
        common["--temperature"] = args.temperature
        script = str(self.script(args.scripts))
        return [str(self.python), script, *(str(x) for pair in common.items() for x in pair), *more]


def main() -> None:
    """Run all arms, write the records, print the table."""
    args = parse()
    if args.own:
        answer(args)
        return
    arms = [arm for arm in args.arms if there(arm)]
    if args.tune and arms:
        arms = tuned(arms, args)
    records = measure(arms, args.prompts, args, args.out)
    rounds = {arm.name: {r["round"] for r in records if r["arm"] == arm.name} for arm in arms}
    whole = [arm for arm in arms if len(rounds[arm.name]) == args.rounds]
    if whole:
        report(records, whole)
    sys.exit(len(whole) < len(arms) or not arms)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--scripts", type=Path, help="directory with peer_ENGINE.py")
    cli.add_argument("--prompts", type=Path, nargs="*", help="JSONL files; without any, the demo's prompts")
    cli.add_argument("--tune", type=Path, nargs="*", help="other JSONL files, to choose drafting arms on")
    cli.add_argument("--limit", type=positive, default=2, help="use the first N rows of each file")
    cli.add_argument("--arms", type=different, default=f"{OWN}:plain,{OWN}:auto")
    cli.add_argument("--rounds", type=positive, default=2)
    cli.add_argument("--concurrency", type=positive, default=1, help="requests that run together")
    cli.add_argument("--max-tokens", type=positive, default=128)
    cli.add_argument("--temperature", type=float, default=0.0)
    cli.add_argument("--model", default="smollm2-135m", help="of foredraft; the scripts know their own")
    cli.add_argument("--out", type=Path, default=Path("results/peers.jsonl"))
    cli.add_argument("--own", help=argparse.SUPPRESS)
    cli.add_argument("--own-dtype", help=argparse.SUPPRESS)
    args = cli.parse_args()
    for arm in args.arms:
        if not arm.script(args.scripts).exists():
            cli.error(f"{arm.name} needs {arm.script(args.scripts)}: give --scripts, the directory with it")
    return args


def different(text: str) -> list[Arm]:
    """Return arms that are told apart by their names."""
    arms = [Arm.parse(part) for part in text.split(",")]
    if len(set(arms)) < len(arms):
        raise argparse.ArgumentTypeError("two arms are the same: name each once")
    return arms


def positive(text: str) -> int:
    """Return a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def there(arm: Arm) -> bool:
    """True if an arm can run; says so where not."""
    if not arm.python.exists():
        console.print(f"{arm.name} is left out: {arm.python} is not there")
    return arm.python.exists()


def measure(
    arms: Sequence[Arm], files: Sequence[Path] | None, args: argparse.Namespace, out: Path
) -> list[dict[str, Any]]:
    """Run arms over prompts, in rounds; write and return the records. An arm that fails is left out then."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prompts, partial = out.with_suffix(".prompts").resolve(), out.with_suffix(".partial").resolve()
    prompts.write_text("".join(json.dumps(row) + "\n" for row in load(files, args.limit)), encoding="utf-8")
    records: list[dict[str, Any]] = []
    left = list(arms)
    with out.open("w", encoding="utf-8") as file:
        for number in range(args.rounds):
            for arm in list(left) if number % 2 == 0 else list(reversed(left)):
                begun_s = time.monotonic()
                ran = run(arm, args, prompts, partial)
                if not ran:
                    left.remove(arm)
                    continue
                for row in ran:
                    records.append({"arm": arm.name, "round": number} | row)
                    file.write(json.dumps(records[-1]) + "\n")
                file.flush()
                took_s = time.monotonic() - begun_s
                console.print(f"round {number + 1}: {arm.name} {speed(ran):.1f} tokens/s, {took_s:.0f} s")
    return records


def run(arm: Arm, args: argparse.Namespace, prompts: Path, out: Path) -> list[dict[str, Any]]:
    """Run one arm in a process of its own; if it fails say its last words and return nothing."""
    preload = ":".join(str(file) for file in PRELOAD.get(arm.engine, ()) if file.exists())
    env = {"GOMP_SPINCOUNT": "10000"} | os.environ | ({"LD_PRELOAD": preload} if preload else {})
    ran = subprocess.run(
        arm.command(args, prompts, out),
        env=env,
        cwd=None if arm.engine == OWN else args.scripts,  # --model may name a directory from here
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        console.print(f"{arm.name} failed and is left out:\n{ran.stderr[-2000:]}", markup=False)
        return []
    return [row for _, row in read_rows(out)]


def answer(args: argparse.Namespace) -> None:
    """Answer the prompts with foredraft, as the scripts of the others do."""
    from foredraft import LLM, SamplingParams
    from foredraft.text import encode_chat

    draft = None if args.own == "plain" else args.own
    llm = LLM(args.model, draft, dtype=args.own_dtype, max_seqs=args.concurrency, prefix_cache=False)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
    rows = load(args.prompts, sys.maxsize)
    prompts = [encode_chat(llm.tokenizer, row["messages"]) for row in rows]
    llm.generate([prompts[0]], params)
    each = 1 if args.concurrency == 1 else len(rows)
    with args.out.open("w", encoding="utf-8") as out:
        for first in range(0, len(rows), each):
            begun_s = time.perf_counter()
            answers = llm.generate(prompts[first : first + each], params)
            total_s = (time.perf_counter() - begun_s) / len(answers)
            for row, found in zip(rows[first : first + each], answers, strict=True):
                record = {"id": row["id"], "output_tokens": len(found.token_ids), "total_s": total_s}
                out.write(json.dumps(record | {"output_token_ids": found.token_ids}) + "\n")


def tuned(arms: Sequence[Arm], args: argparse.Namespace) -> list[Arm]:
    """Return the plain arms, and of the drafting arms of each engine and dtype the fastest."""
    records = measure(arms, args.tune, args, args.out.with_suffix(".tune.jsonl"))
    best: dict[tuple[str, str], Arm] = {}
    for arm in arms:
        kind = (arm.engine, arm.dtype)
        if arm.mode != "plain" and (kind not in best or of(records, arm) > of(records, best[kind])):
            best[kind] = arm
    console.print(f"chosen: {', '.join(arm.name for arm in best.values())}")
    return [arm for arm in arms if arm.mode == "plain" or arm in best.values()]


def of(records: Sequence[dict[str, Any]], arm: Arm) -> float:
    """Return an arm's tokens per second over all rounds."""
    return speed([record for record in records if record["arm"] == arm.name])


def speed(records: Sequence[dict[str, Any]]) -> float:
    """Return tokens per second, prompts included."""
    return sum(r["output_tokens"] for r in records) / sum(r["total_s"] for r in records)


def bounds(records: Sequence[dict[str, Any]], arm: Arm, base: Arm, unit: str) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of one arm's speed over another's, over prompts or rounds; NaNs if
    these are too few.
    """
    units = list(dict.fromkeys(r[unit] for r in records))
    if len(units) < 4:
        return math.nan, math.nan
    sides = []
    for side in (arm, base):
        mine = [[r for r in records if r["arm"] == side.name and r[unit] == one] for one in units]
        sides.append(
            np.array([[sum(r[key] for r in some) for key in ("output_tokens", "total_s")] for some in mine])
        )
    return interval(*sides)


def report(records: Sequence[dict[str, Any]], arms: Sequence[Arm]) -> None:
    """Print a row for each arm: its speed in all and by round, and its ratio to the first arm."""
    unit = "id" if len({r["total_s"] for r in records if r["round"] == 0}) > len(arms) else "round"
    table = Table("arm", "tokens/s", "by round", f"over {arms[0].name}", "95 %", "other answers")
    plain = {r["id"]: r["output_token_ids"] for r in records if (r["arm"], r["round"]) == (arms[0].name, 0)}
    for arm in arms:
        mine = [r for r in records if r["arm"] == arm.name]
        rounds = [
            speed([r for r in mine if r["round"] == number]) for number in sorted({r["round"] for r in mine})
        ]
        ratio = speed(mine) / of(records, arms[0])
        low, high = bounds(records, arm, arms[0], unit) if arm != arms[0] else (math.nan, math.nan)
        differ = sum(r["output_token_ids"] != plain[r["id"]] for r in mine if r["round"] == 0)
        table.add_row(
            arm.name,
            f"{speed(mine):.1f}",
            " ".join(f"{one:.1f}" for one in rounds),
            f"{ratio:.2f}",
            "" if math.isnan(low) else f"{low:.2f} to {high:.2f}",
            str(differ),
        )
    console.print(table)


if __name__ == "__main__":
    main()
