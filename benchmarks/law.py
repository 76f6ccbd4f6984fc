"""Do drafted answers follow the law of plain ones? Counts of their first three tokens, by chi-square.

    python benchmarks/law.py --draws 4000 --out results/law.jsonl

On a real model, for each prompt and setting: --draws answers decoded plainly, and as many with
each draft, every one with a seed of its own: `truncated`, a chain drawn from the target without its last two
layers, which is verified by rejection; `ngram` and `tree`, which are verified by matching. Compared are the
counts of the first token, of the first two and of all three, each by a two-sample chi-square; cells with
fewer than ten answers in both samples together are pooled. The p-value is three times the smallest of the
three. Under 1e-6 anywhere the exit code is 1.

What such a test can see is measured on a known law, by simulation: of how many pairs of samples it says that
they differ if in one of them a share of the probability has moved to the likeliest second token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from arrivals import Model
from decode import header
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import chi2_contingency

from foredraft import SamplingParams
from foredraft.engine import Engine
from foredraft.engine.pool import BLOCK

LENGTH = 3
ALARM = 1e-6
LEAST = 10  # answers in a cell
BUDGETS = {None: 0, "truncated": 2, "ngram": 2, "tree": 4}
BASE = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
# Texts that repeat themselves, so that there is something to look up.
CASES = (
    (
        "In the morning the cat sat on the mat and the dog lay on the rug. In the evening the dog lay on the "
        "mat and the cat sat on the rug. In the morning the cat sat on the",
        replace(BASE, top_k=20),
    ),
    (
        "Yes, said the first man. No, said the second man. Yes, said the first woman. No, said the second "
        "woman. Perhaps, said the child. Yes, said the first man. No, said the",
        replace(BASE, temperature=1.3, top_p=0.7),
    ),
    (
        "Sunday: sun in the north, rain in the south. Monday: rain in the north, wind in the south. "
        "Tuesday: sun in the north, wind in the south. Wednesday: rain in the north,",
        replace(BASE, temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, min_p=0.02),
    ),
)
PROMPT = BLOCK + 1  # tokens, the last of each text: one block, which all answers share, and the root
DISTANCES = (0.0, 0.01, 0.03, 0.05)
REPEATS = 400
VOCAB = 4


Counts = Mapping[tuple[int, ...], int]


@dataclass(frozen=True)
class Sample:
    """How often each answer was given, and what was drafted for that."""

    counts: Counts
    levels: int
    accepted: int


def sample(engine: Engine, prompt: list[int], params: SamplingParams, seeds: range) -> Sample:
    """Answer a prompt once for each seed; the prompt is fed once."""
    for seed in seeds:
        engine.add(prompt, replace(params, seed=seed), str(seed))
    answers: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] = (*answers.get(output.request_id, ()), *output.token_ids)
    return Sample(Counter(answers.values()), engine.stats.levels, engine.stats.accepted)


def p_value(one: Counts, other: Counts) -> float:
    """Return the p-value of two samples: of their first token, the first two and so on the most telling."""
    return min(1.0, LENGTH * min(_p_value(one, other, length) for length in range(1, LENGTH + 1)))


def _p_value(one: Counts, other: Counts, length: int) -> float:
    cells: dict[tuple[int, ...], list[int]] = {}
    for side, counts in enumerate((one, other)):
        for answer, count in counts.items():
            cells.setdefault(answer[:length], [0, 0])[side] += count
    table = np.array(list(cells.values())).T
    small = table.sum(axis=0) < LEAST
    table = np.column_stack([table[:, ~small], table[:, small].sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def compare(model: Model, case: int, draws: int) -> Iterator[dict[str, Any]]:
    """Compare each draft with plain decoding on one prompt."""
    text, params = CASES[case]
    prompt = model.tokenizer.encode(text)[-PROMPT:]
    assert len(prompt) == PROMPT
    plain: Counts = {}
    for number, (draft, budget) in enumerate(BUDGETS.items()):
        engine = model.engine(draft, max_seqs=64, max_len=2 * BLOCK, kv_tokens=65 * 2 * BLOCK)
        first = (case * len(BUDGETS) + number) * draws
        found = sample(engine, prompt, replace(params, budget=budget), range(first, first + draws))
        if draft is None:
            plain = found.counts
            continue
        yield {
            "prompt": case,
            "draft": draft,
            "draws": draws,
            "cells": sum(plain.get(c, 0) + n >= LEAST for c, n in found.counts.items()),
            "p_value": p_value(plain, found.counts),
            "levels": found.levels,
            "accepted": found.accepted,
        }


def known_law() -> np.ndarray:
    """Return the chances of all answers [VOCAB, VOCAB, VOCAB] where each token depends on the one before."""
    weights = np.exp(1.5 * np.random.default_rng(0).standard_normal((VOCAB + 1, VOCAB)))
    rows = weights / weights.sum(axis=1, keepdims=True)
    return np.einsum("a,ab,bc->abc", rows[VOCAB], rows[:VOCAB], rows[:VOCAB])


def biased(law: np.ndarray, distance: float) -> np.ndarray:
    """Move so much probability in all to the likeliest second token after each first one."""
    moved = np.zeros_like(law)
    for first, likeliest in enumerate(law.sum(axis=2).argmax(axis=1)):
        after = law[first, likeliest] / law[first, likeliest].sum()
        moved[first, likeliest] = law[first].sum() * after
    share = distance / (abs(moved - law).sum() / 2)
    return (1 - share) * law + share * moved


def power(distance: float, draws: int) -> dict[str, Any]:
    """Return how often a bias is seen, at the level used here and at 1 in 100."""
    dice, laws = np.random.default_rng(1), (known_law(), biased(known_law(), distance))

    def counts(law: np.ndarray) -> Counts:
        return dict(zip(np.ndindex(law.shape), dice.multinomial(draws, law.ravel()), strict=True))

    p_values = np.array([p_value(*map(counts, laws)) for _ in range(REPEATS)])
    return {
        "distance": distance,
        "draws": draws,
        "seen": float((p_values < ALARM).mean()),
        "seen_at_1_in_100": float((p_values < 0.01).mean()),
    }


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """Return what was compared, and what would have been seen."""
    found = Table("prompt", "draft", "draws", "cells", "accept_rate", "p-value", box=box.SIMPLE_HEAD)
    for record in records:
        if "p_value" in record:
            names = ("prompt", "draft", "draws", "cells")
            rate = record["accepted"] / max(1, record["levels"])
            found.add_row(*(str(record[name]) for name in names), f"{rate:.2f}", f"{record['p_value']:.3g}")
    seen = Table("moved", "draws", "seen at 1e-6", "seen at 0.01", box=box.SIMPLE_HEAD)
    for record in records:
        if "distance" in record:
            seen.add_row(
                f"{record['distance']:.0%}",
                str(record["draws"]),
                f"{record['seen']:.0%}",
                f"{record['seen_at_1_in_100']:.0%}",
            )
    return [found, seen]


def main() -> int:
    """Run everything, print the tables; 1 if a law differs."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--dtype", default="float32", help="float32 or bfloat16, which is several times faster")
    cli.add_argument(
        "--draws", type=int, default=1000, help="answers a prompt and draft; 20000 for a full run"
    )
    cli.add_argument("--out", type=Path, default=Path("results/law.jsonl"))
    args = cli.parse_args()

    records: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, args.out.open("w", encoding="utf-8") as out:

        def keep(record: dict[str, Any]) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()
            records.append(record)

        keep(header(args))
        for distance, draws in product(DISTANCES, sorted({args.draws, 20_000})):
            keep(power(distance, draws))
        model = Model.load(args.model, Path(folder), args.dtype)
        for case in track(range(len(CASES)), "prompts", console=Console(stderr=True)):
            for record in compare(model, case, args.draws):
                keep(record)
    for table in tables(records):
        Console(width=100).print(table)
    return int(any(record.get("p_value", 1) < ALARM for record in records))


if __name__ == "__main__":
    sys.exit(main())
