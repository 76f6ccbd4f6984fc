"""The small table that matters, for a terminal, and the same figures as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from foredraft.measure.records import Record
from foredraft.measure.stats import Figures, figures, verdict

COLUMNS = (
    "load",
    "arm",
    "tokens/s\nper user",
    "TTFT s\np50",
    "TTFT s\np95",
    "ms per\ntoken",
    "tokens/s\nin all",
    "accept_\nrate",
    "mean_\nemitted",
    "speed-up",
)


def cells(found: Figures) -> list[str]:
    """Return one row of the table, in the order of COLUMNS."""
    failed = f" ({found.failed} failed)" if found.failed else ""
    return [
        found.load,
        found.arm + failed,
        f"{found.user_speed:.1f}",
        _number(found.ttft_p50, 1, 3),
        _number(found.ttft_p95, 1, 3),
        _number(found.inter_token, 1000, 1),
        f"{found.throughput:.1f}",
        _number(found.accept_rate, 1, 2),
        _number(found.mean_emitted, 1, 2),
        found.speedup.text if found.speedup else "-",
    ]


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def all_figures(record: Record, category: str | None = None) -> list[Figures]:
    """Return the figures of every arm at every load."""
    found = (figures(record, arm, load, category) for load in record.header.loads for arm in record.arms)
    return [one for one in found if one is not None]


def tables(record: Record, *, by_category: bool = False) -> list[Table]:
    """Return the table over all requests, and one a category if asked for."""
    categories: Sequence[str | None] = [None]
    if by_category and len(record.categories) > 1:
        categories = [*record.categories, None]
    return [_table(record, category) for category in categories]


def _table(record: Record, category: str | None) -> Table:
    table = Table(title=escape(category or "all requests"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("load", "arm") else "right")
    for found in all_figures(record, category):
        table.add_row(*map(escape, cells(found)))
    return table


def verdicts(record: Record) -> list[str]:
    """Return a sentence for each load, where there is something to compare."""
    if len(record.arms) < 2:
        return []
    loads = dict.fromkeys(r.load for r in record.results)
    return [verdict(record, load) for load in record.header.loads if load in loads]


def sources(record: Record) -> list[str]:
    """Return where each arm's tokens and acceptance come from, and what is odd about it."""
    lines = []
    for arm in record.header.arms:
        told = next((r.acceptance for r in record.results if r.arm == arm.name and r.acceptance), None)
        told = told or next((c.acceptance for c in record.counters if c.arm == arm.name), None)
        acceptance = told.source if told else "not told"
        lines.append(f"{arm.name}: tokens from {arm.counter}; acceptance: {acceptance}")
        lines += [f"{arm.name}: {text}" for text in arm.notes]
    return lines


def summary(record: Record) -> dict[str, Any]:
    """Return header, figures and verdicts as plain JSON values."""
    names: list[str | None] = [None]
    if len(record.categories) > 1:
        names += record.categories
    return {
        "header": asdict(record.header),
        "figures": [_plain(found, name) for name in names for found in all_figures(record, name)],
        "verdicts": verdicts(record),
        "sources": sources(record),
    }


def _plain(found: Figures, category: str | None) -> dict[str, Any]:
    rates = {"accept_rate": found.accept_rate, "mean_emitted": found.mean_emitted}
    return {"category": category or "all", **asdict(found), **rates, "accepted_at": found.accepted_at}
