"""Does drafting change any answer? All that a request is given, against plain decoding, in float32.

    python benchmarks/exactness.py --prompts prompts/*.jsonl --out results/exactness.jsonl

Every prompt has one of five settings. It is answered plainly and alone, which is the reference; then with
every draft, in one batch size. Settings and batch sizes rotate, so that each draft meets all fifteen pairs of
them equally often. In batches of 1 and 4 half of the requests draft by a fixed budget and half by "auto"; in
batches of 16 every prompt is asked twice, once with each. Requests arrive at random, one in eight is
cancelled at a random token, some are preempted, and the cache is so small that some must wait.

Ids, text, finish reason, log-probabilities (to 1e-4) and usage must be equal; of a cancelled request, up to
there. A difference is a tie if changing the target's logits by at most --noise, at the first differing
position, makes the other token; anything else is a bug, and the exit code 1. The draft `truncated` is a chain
by a copy of the target without its last two layers, `tree` a tree by the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arrivals import Model, Request, serve
from decode import header, load
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foredraft import SamplingParams
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BlockTable
from foredraft.sampling import Noise, add_bias, argmax, draw, penalize, to_laws
from foredraft.types import NO_DRAFT

BUDGETS = {"ngram": 5, "truncated": 2, "tree": 3}  # the fixed ones
BATCHES = (1, 4, 16)
LONGEST = 192  # tokens of a prompt; longer ones are left out
CANCELLED = 8  # one in so many
PERTURBATIONS = 200


def settings_of(tokenizer: Any, max_tokens: int) -> dict[str, SamplingParams]:
    """Return the five ways to sample."""
    words = {" the": -5.0, ",": -5.0, " and": 3.0}
    bias = {tokenizer.encode(word, add_special_tokens=False)[0]: value for word, value in words.items()}
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    warm = replace(greedy, temperature=0.7, top_p=0.9, reproducible=True)
    return {
        "greedy": greedy,
        "T=0.7": warm,
        "T=1.3": replace(warm, temperature=1.3),
        "penalties": replace(
            warm, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=8
        ),
        "bias, stops": replace(warm, logit_bias=bias, stop=("\n\n", " because", "? ")),
    }


def requests_of(model: Model, rows: Iterable[dict[str, Any]], limit: int, max_tokens: int) -> list[Request]:
    """Return the first `limit` prompts that are not too long, the settings in turn."""
    settings = settings_of(model.tokenizer, max_tokens)
    found: list[Request] = []
    for row in rows:
        prompt = model.encode(row["messages"])
        if len(prompt) <= LONGEST and len(found) < limit:
            name = list(settings)[len(found) % len(settings)]
            found.append(Request(row["id"], prompt, name, replace(settings[name], seed=len(found))))
    return found


def alone(model: Model, request: Request, max_tokens: int) -> Request:
    """Answer a request plainly in an engine of its own."""
    longest = LONGEST + max_tokens
    engine = model.engine(None, max_seqs=1, max_len=longest, kv_tokens=longest)
    engine.add(request.prompt, request.params)
    found = replace(request, outputs=[])
    while engine.has_work:
        found.outputs += engine.step()
    return found


def judge(model: Model, wanted: Request, got: Request, noise: float) -> tuple[str, str]:
    """Return "equal", "tie" or "DIFFERENT", and in what."""
    length = len(got.tokens) if got.end == "cancelled" else max(len(got.tokens), len(wanted.tokens))
    for place, (token, other) in enumerate(zip(wanted.tokens[:length], got.tokens, strict=False)):
        if token != other:
            near = other in within(model, wanted, place, noise)
            return ("tie" if near else "DIFFERENT"), f"token {place}: {token} and {other}"
    text, end = wanted.text, wanted.end
    if got.end == "cancelled":
        sink, end = model.sink(got.params), "cancelled"
        sink.push(got.tokens)
        text = sink.take(final=True)
    pairs = zip(wanted.logprobs[:length], got.logprobs, strict=False)
    differing = {
        "length": len(got.tokens) != min(length, len(wanted.tokens)),
        "end": got.end != end,
        "text": got.text != text,
        "logprobs": len(got.logprobs) != len(got.tokens) or any(abs(a - b) > 1e-4 for a, b in pairs),
        "usage": got.outputs[-1].stats.emitted != len(got.tokens),
    }
    why = ", ".join(name for name, differs in differing.items() if differs)
    return ("DIFFERENT" if why else "equal"), why


@torch.inference_mode()
def within(model: Model, request: Request, place: int, noise: float) -> set[int]:
    """Return the tokens that logits at most `noise` away give at a place of the plain answer."""
    text, output, params = request.prompt + request.tokens[:place], request.tokens[:place], request.params
    kv, table = model.target.make_kv(len(text)), BlockTable()
    kv.pool.grow(table, len(text))
    logits = model.target.forward(make_batch([Feed(text, 0, table, NO_DRAFT)]), kv).logits
    generator, source = torch.Generator().manual_seed(0), Noise(params.seed or 0)
    found = set()
    for _ in range(PERTURBATIONS):
        moved = logits + (2 * torch.rand(logits.shape, generator=generator) - 1) * noise
        moved = penalize(moved, params, request.prompt, [output], model.target.eos_ids)
        if params.greedy:
            found.add(int(argmax(add_bias(moved, params))))
        else:
            found.add(draw(to_laws(moved, params)[0], source, len(text)))
    return found


def asked(requests: Sequence[Request], draft: str, batch: int, dice: random.Random) -> list[Request]:
    """Return the requests that a draft answers in one batch size, with their budgets."""
    found, first = [], list(BUDGETS).index(draft)
    for place, request in enumerate(requests):
        if BATCHES[(place + first) % len(BATCHES)] != batch:
            continue
        budgets: list[Any] = [BUDGETS[draft], "auto"]
        for budget in budgets if batch == BATCHES[-1] else budgets[place // 15 % 2 :][:1]:
            cancel_at = dice.randint(1, request.params.max_tokens - 1)
            found.append(
                replace(
                    request,
                    params=replace(request.params, budget=budget),
                    cancel_at=cancel_at if dice.randrange(CANCELLED) == 0 else None,
                    outputs=[],
                )
            )
    return found


def record_of(model: str, draft: str, batch: int, got: Request, verdict: tuple[str, str]) -> dict[str, Any]:
    """Return one answer as plain JSON values."""
    stats = got.outputs[-1].stats
    return {
        "model": model,
        "draft": draft,
        "batch": batch,
        "id": got.name,
        "setting": got.setting,
        "budget": got.params.budget,
        "end": got.end,
        "preempted": got.preempted,
        "verdict": verdict[0],
        "why": verdict[1],
        **{name: getattr(stats, name) for name in ("steps", "drafted", "levels", "accepted", "emitted")},
    }


def compare(name: str, rows: list[dict[str, Any]], args: argparse.Namespace, folder: Path) -> Iterable[Any]:
    """Yield the records of one model."""
    model, dice, console = Model.load(name, folder), random.Random(0), Console(stderr=True)
    requests = requests_of(model, rows, args.limit, args.max_tokens)
    plain = {
        r.name: alone(model, r, args.max_tokens) for r in track(requests, f"{name}, plain", console=console)
    }
    longest = LONGEST + args.max_tokens
    for draft in BUDGETS:
        for batch in track(BATCHES, f"{name}, {draft}", console=console):
            room = max(longest, batch * longest // 3)  # less than `batch` long requests need
            engine = model.engine(draft, max_seqs=batch, max_len=longest, kv_tokens=room)
            some = asked(requests, draft, batch, dice)
            serve(engine, some, batch, dice)
            for got in some:
                verdict = judge(model, plain[got.name], got, args.noise)
                yield record_of(name, draft, batch, got, verdict)


def report(records: Sequence[dict[str, Any]], *by: str) -> Table:
    """Count the verdicts of the answers, grouped by some of their fields."""
    columns = ("equal", "tie", "DIFFERENT", "cancelled", "preempted", "accept_rate")
    table = Table(*by, *columns, box=box.SIMPLE_HEAD)
    groups = dict.fromkeys(tuple(record[name] for name in by) for record in records)
    for group in groups:
        mine = [record for record in records if tuple(record[name] for name in by) == group]
        verdicts = Counter(record["verdict"] for record in mine)
        counts = [verdicts[name] for name in columns[:3]]
        counts += [sum(record["end"] == "cancelled" for record in mine), sum(r["preempted"] for r in mine)]
        rate = sum(r["accepted"] for r in mine) / max(1, sum(r["levels"] for r in mine))
        table.add_row(*map(str, (*group, *counts)), f"{rate:.2f}")
    return table


def main() -> int:
    """Run everything, print the tables; 1 if anything differs by more than a tie."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    cli.add_argument("--prompts", type=Path, nargs="*", help="JSONL files; without any, the demo's prompts")
    cli.add_argument("--limit", type=int, default=64, help="use so many prompts, of all files in turn")
    cli.add_argument("--max-tokens", type=int, default=32)
    cli.add_argument("--noise", type=float, default=1e-3, help="change of logits that explains a tie")
    cli.add_argument("--out", type=Path, default=Path("results/exactness.jsonl"))
    args = cli.parse_args()
    args.dtype = "float32"

    rows = load(args.prompts, args.limit)
    random.Random(0).shuffle(rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with args.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps(header(args)) + "\n")
        for name in args.models:
            with tempfile.TemporaryDirectory() as folder:
                for record in compare(name, rows, args, Path(folder)):
                    records.append(record)
                    out.write(json.dumps(record) + "\n")
                    out.flush()
    for by in (("model", "draft", "batch"), ("model", "setting"), ("model", "budget")):
        Console(width=100).print(report(records, *by))
    return int(any(record["verdict"] == "DIFFERENT" for record in records))


if __name__ == "__main__":
    sys.exit(main())
