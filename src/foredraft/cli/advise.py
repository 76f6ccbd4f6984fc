"""`foredraft advise`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.arms import Answering, Asked, loads_of, need_extra
from foredraft.cli.measure import end, run_arms
from foredraft.cli.options import takes_options
from foredraft.cli.output import note, print_json
from foredraft.errors import ConfigError
from foredraft.measure.files import check_place

if TYPE_CHECKING:
    from foredraft.measure.advise import Advice
    from foredraft.measure.records import Record, RecordFile


@takes_options
def advise(
    asked: Asked,
    answering: Answering,
    record: Annotated[
        list[Path] | None,
        typer.Option(help="Advise from what measure wrote, without running anything; may be repeated."),
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(help="Show what measure wrote beside the predictions.")
    ] = None,
    load: Annotated[str, typer.Option(help="Requests at once, several loads as 1,4,16.")] = "1,4,16",
    out: Annotated[
        Path | None, typer.Option(help="Where the raw records of servers go (JSONL); else none are kept.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as one JSON object.")] = False,
) -> None:
    """Predict which draft pays, with which budget, up to which load.

    The target answers the requests once; each draft is replayed against these answers, passes are timed, and
    both together give the speed-up. Servers are measured, as measure does. A record needs neither.

    [bold]Examples[/bold]

    foredraft advise --requests requests.jsonl --draft ngram,suffix --load 1,4,16

    foredraft advise --baseline http://localhost:8000 --variant eagle=http://localhost:8001 --load 1,8

    foredraft advise --record measure.jsonl
    """
    need_extra()
    from foredraft.measure.records import read_record

    if measured and (record or answering.servers):
        raise ConfigError(
            "--measured stands beside predictions: leave out --record, --baseline and --variant"
        )
    if out is not None and (record or not answering.servers):
        raise ConfigError("--out keeps what servers were measured at: name --baseline and --variant")
    if record:
        _from_record(read_record(record), as_json)
        return
    if answering.servers:
        file, whole = _of_servers(asked, answering, load, out)
        _from_record(file.record, as_json)
        end(file, whole)
    beside = read_record(measured) if measured else None
    advice = _predicted(asked, answering, load)
    _show(advice, beside, as_json)


def _of_servers(asked: Asked, answering: Answering, load: str, out: Path | None) -> tuple[RecordFile, bool]:
    """Measure servers; return the record, and whether it is whole."""
    if bool(answering.baseline) + len(answering.variant) < 2:
        raise ConfigError("there is nothing to compare: name a baseline and a variant")
    asks = asked.load_asks()
    loads = loads_of(load)
    if out is not None:
        check_place(out)
    with answering.arms(asks, loads) as arms:
        return run_arms(arms, asks, loads, out, asked.seed)


def _predicted(asked: Asked, answering: Answering, load: str) -> Advice:
    from rich.console import Console
    from rich.markup import escape

    from foredraft.measure.advise import predict
    from foredraft.measure.engine_arm import open_bench
    from foredraft.measure.methods import method_of, traffic_of

    asks = asked.load_asks()
    loads, drafts = loads_of(load), answering.drafts()
    bench = open_bench(answering.load_llm(), asks, loads)
    methods = [method_of(bench, draft) for _, draft, _ in drafts if draft != "none"]
    if not methods:
        raise ConfigError(f"--draft {answering.draft} names no draft to judge: use ngram,suffix")
    with Console(stderr=True).status("answering the requests") as status:
        traffic = traffic_of(bench, asks)
        at_once = sorted({one.concurrency or 1 for one in loads})
        return predict(bench.target, methods, traffic, at_once, lambda part: status.update(escape(part)))


def _show(advice: Advice, beside: Record | None, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = _rows(advice, beside)
    if as_json:
        print_json({"best": rows, **asdict(advice)})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="best budget of each draft")
    for column in ("load", "draft", "budget", "accept_rate", "mean_emitted", "predicted", "auto", "measured"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v or "-") for v in row.values()))
    Console(width=110).print(table)
    for line in _verdicts(advice):
        print(line)


def _rows(advice: Advice, beside: Record | None) -> list[dict[str, Any]]:
    from foredraft.measure.stats import figures

    rows = []
    for load in advice.loads:
        for method in dict.fromkeys(p.method for p in advice.predictions):
            best = advice.of(method, load)
            found = None
            if beside is not None:
                arms = [arm for arm in (f"{method}:{best.budget}", method) if arm in beside.arms]
                found = figures(beside, arms[0], str(load)) if arms else None
            ratio = found.speedup.value if found is not None and found.speedup is not None else None
            row = {"load": load, "draft": method, "budget": best.budget, "accept_rate": best.accept_rate}
            row |= {"mean_emitted": best.mean_emitted, "predicted": best.speedup}
            row |= {"auto": advice.auto(method, load).speedup, "measured": ratio}
            rows.append(row)
    return rows


def _verdicts(advice: Advice) -> list[str]:
    """The best of each load, what speaks for and against it, and configuration for the first load."""
    from foredraft.measure.reasons import WORTH
    from foredraft.measure.recipes import recipes

    lines = []
    for load in advice.loads:
        best = advice.best(load)
        if best.speedup < WORTH:
            lines.append(f"Load {load}: leave drafting off; the best, {best.method}, is {best.speedup:.2f}x.")
        else:
            lines.append(
                f"Load {load}: {best.method} with budget {best.budget}, {best.speedup:.2f}x predicted."
            )
    lines += [f"- {reason}" for reason in advice.reasons]
    best = advice.best(advice.loads[0])
    even = advice.break_even(best.method)
    budget = best.budget if best.speedup >= WORTH else 0
    return [*lines, "", *recipes(best.method, budget or 0, int(even) if even and even > 1 else None)]


def _from_record(record: Record, as_json: bool) -> None:
    from foredraft.measure.from_record import estimates, reasons
    from foredraft.measure.reasons import break_even
    from foredraft.measure.recipes import method_called, recipes
    from foredraft.measure.run import refusals

    for line in refusals(record):
        note(line)
    found = estimates(record)
    why = reasons(record, found)
    if as_json:
        print_json({"estimates": [asdict(one) for one in found], "reasons": why})
        return
    for one in found:
        what = f"budget {one.best_budget} would give {one.best_speedup:.2f}x between the prompt and the end"
        if one.best_budget is None:
            what = (
                f"{one.best_speedup:.2f}x between the prompt and the end; it drafted trees, or more at some "
                "steps than at others, so the record does not tell what other budgets would give"
            )
        elif not one.best_budget:
            what = "no budget pays"
        print(
            f"Load {one.load}: {one.arm} drafted {one.drafted:.1f} a step, {one.accept_rate:.0%} accepted, "
            f"each node costing {one.node_cost:.3f} of a step: {one.measured:.2f}x measured; {what}."
        )
    for reason in why:
        print(f"- {reason}")
    drafts = {arm.name: arm.draft for arm in record.header.arms if arm.kind == "engine"}
    for arm in dict.fromkeys(one.arm for one in found):
        mine = [one for one in found if one.arm == arm and one.load.isdecimal()]
        even = break_even([(int(one.load), one.measured) for one in mine])
        if mine and mine[0].best_budget is not None:
            draft = drafts.get(arm) or method_called(arm)
            print("\n".join(recipes(draft, mine[0].best_budget, int(even) if even and even > 1 else None)))
