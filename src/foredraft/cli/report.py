"""`foredraft report`: the figures of a measurement, again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.arms import need_extra
from foredraft.cli.output import note, print_json

if TYPE_CHECKING:
    from foredraft.measure.records import Record


def report(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS…", help="Files that measure wrote.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write a page of HTML with plots.")] = None,
    by_category: Annotated[bool, typer.Option("--by-category", help="Print a table a category.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Show a measurement again, from its records.

    [bold]Examples[/bold]

    foredraft report measure.jsonl --out report.html

    foredraft report load-1.jsonl load-8.jsonl --by-category
    """
    need_extra()
    from foredraft.measure.records import read_record

    show(read_record(records), report=out, by_category=by_category, as_json=as_json)


def show(record: Record, *, report: Path | None, by_category: bool, as_json: bool) -> None:
    """Print the figures of a record, and write the page if asked for."""
    from rich.console import Console

    from foredraft.measure import tables
    from foredraft.measure.run import refusals

    if as_json:
        print_json(tables.summary(record))
    else:
        console = Console(width=None if Console().is_terminal else 110)
        for table in tables.tables(record, by_category=by_category):
            console.print(table)
        for line in tables.verdicts(record):
            console.print(line, markup=False, highlight=False)
    beside = Console(stderr=True, soft_wrap=True)  # a line stays one, however narrow the terminal
    for line in [*tables.sources(record), *refusals(record)]:
        beside.print(line, style="dim", markup=False, highlight=False)
    if report is not None:
        from foredraft.measure.page import write_page

        write_page(record, report)
        note(f"wrote {report}")
