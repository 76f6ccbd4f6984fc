"""`foredraft measure`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from foredraft.cli.arms import REQUESTS, Answering, Asked, loads_of
from foredraft.cli.options import takes_options
from foredraft.cli.output import INTERRUPTED
from foredraft.cli.report import show
from foredraft.measure.files import check_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.measure.records import RecordFile
    from foredraft.measure.run import Arm
    from foredraft.measure.workload import Ask, Load


@takes_options
def measure(
    asked: Asked,
    answering: Answering,
    load: Annotated[
        str | None,
        typer.Option(
            help="Requests at once, several loads as 1,4,16, which is the default without --rate.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Requests arriving per second, as 0.5,2.", rich_help_panel=REQUESTS)
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the raw records go (JSONL).")] = Path("measure.jsonl"),
    report: Annotated[Path | None, typer.Option(help="Write a page of HTML with plots.")] = None,
    by_category: Annotated[bool, typer.Option("--by-category", help="Print a table a category.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Measure what drafting gains on your requests, at your loads.

    The same requests are answered by every arm, in turn; the arms differ only in the draft. Ctrl-C keeps what
    was measured.

    [bold]Examples[/bold]

    foredraft measure --requests requests.jsonl --draft none,ngram --load 1,4

    foredraft measure --baseline http://localhost:8000 --variant eagle=http://localhost:8001

    foredraft measure --draft none,ngram,ngram:5 --report report.html
    """
    asks = asked.load_asks()
    default = "" if rate else "1,4,16"
    loads = loads_of(default if load is None else load, rate)
    for path in (out, report):
        if path is not None:
            check_place(path)
    with answering.arms(asks, loads) as arms:
        file, whole = run_arms(arms, asks, loads, out, asked.seed)
    show(file.record, report=report, by_category=by_category, as_json=as_json)
    end(file, whole)


def end(file: RecordFile, whole: bool) -> NoReturn:
    """Exit after a measurement; raises ConfigError if its record was not kept."""
    if file.fault is not None:
        raise file.fault
    raise typer.Exit(0 if whole else INTERRUPTED)


def run_arms(
    arms: Sequence[Arm], asks: Sequence[Ask], loads: Sequence[Load], out: Path | None, seed: int
) -> tuple[RecordFile, bool]:
    """Measure; return the record, also written to `out` if given, and whether it is whole: an interrupt keeps
    what there is.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from foredraft.measure import run
    from foredraft.measure.records import RecordFile, Result

    total = sum(len(part) for load in loads for part in run.blocks(asks, load)) * len(arms)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        run.check_same_model(arms, asks)
        for arm in arms:
            run.warm_up(arm, asks)
        file = RecordFile(out, run.make_header(arms, loads, asks, seed))

        def on_result(result: Result) -> None:
            bar.update(task, advance=1, description=f"load {result.load}, {result.arm}")

        whole = True
        try:
            run.measure(arms, asks, loads, file, on_result)
        except KeyboardInterrupt:
            if not file.record.results:
                raise
            whole = False
        finally:
            file.close()
    return file, whole
