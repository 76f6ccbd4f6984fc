"""The report as one page of HTML that needs nothing else, light or dark as the reader has it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from foredraft.measure import svg, tables
from foredraft.measure.files import write_text
from foredraft.measure.records import Record, Result
from foredraft.measure.run import refusals
from foredraft.measure.stats import Figures, figures

_WORST = 8


def write_page(record: Record, path: Path) -> None:
    """Write the page; raises ConfigError if the file cannot be written."""
    write_text(path, render(record))


def render(record: Record) -> str:
    """Return the page."""
    text = resources.files("foredraft.measure").joinpath("page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(text)
    return template.render(
        header=record.header,
        columns=[column.replace("_\n", "_").replace("\n", " ") for column in tables.COLUMNS],
        rows=[tables.cells(found) for found in tables.all_figures(record)],
        categories=[
            (name, [tables.cells(found) for found in tables.all_figures(record, name)])
            for name in (record.categories if len(record.categories) > 1 else [])
        ],
        verdicts=tables.verdicts(record),
        sources=tables.sources(record),
        failures=refusals(record),
        arms=list(enumerate(record.arms)),
        plots=plots(record),
        worst=worst(record),
    )


def plots(record: Record) -> list[dict[str, Any]]:
    """Return the plots that the record has data for: title, what to read from it, SVG, arms shown."""
    made = [_speedups(record), _positions(record), _by_category(record), *_first_tokens(record)]
    return [plot for plot in made if plot is not None]


def _colors(record: Record) -> dict[str, int]:
    return {arm: place for place, arm in enumerate(record.arms)}


def _plot(title: str, note: str, image: str, series: list[svg.Series]) -> dict[str, Any]:
    return {"title": title, "note": note, "svg": image, "legend": [(s.color, s.name) for s in series]}


def _speedups(record: Record) -> dict[str, Any] | None:
    loads = list(record.header.loads)
    series = []
    for arm in record.arms[1:]:
        found = [figures(record, arm, load) for load in loads]
        ratios = [f.speedup if f else None for f in found]
        if any(ratios):
            series.append(
                svg.Series(
                    arm,
                    _colors(record)[arm],
                    [r.value if r else None for r in ratios],
                    [r.low if r else None for r in ratios],
                    [r.high if r else None for r in ratios],
                )
            )
    if not series:
        return None
    note = (
        f"Tokens/s per user over those of {record.arms[0]}, with 95 % intervals. Below the line it is slower."
    )
    image = svg.lines(loads, series, y="speed-up", x="load", level=1.0, label="Speed-up against load")
    return _plot("Speed-up against load", note, image, series)


def _first_load(record: Record, arm: str) -> Figures | None:
    return next((f for load in record.header.loads if (f := figures(record, arm, load))), None)


def _positions(record: Record) -> dict[str, Any] | None:
    shares = {arm: f.accepted_at for arm in record.arms if (f := _first_load(record, arm)) and f.accepted_at}
    if not shares:
        return None
    deepest = max(map(len, shares.values()))
    series = [
        svg.Series(arm, _colors(record)[arm], [*values, *[None] * (deepest - len(values))])
        for arm, values in shares.items()
    ]
    names = [str(depth + 1) for depth in range(deepest)]
    image = svg.lines(names, series, y="share of steps", x="depth", label="Acceptance by position")
    note = "Share of all steps whose accepted path reached this depth, at the first load."
    return _plot("Acceptance by position", note, image, series)


def _by_category(record: Record) -> dict[str, Any] | None:
    names = record.categories
    series = []
    for arm in record.arms:
        found = [figures(record, arm, record.header.loads[0], name) for name in names]
        rates = [f.accept_rate if f else None for f in found]
        if any(rate is not None for rate in rates):
            series.append(svg.Series(arm, _colors(record)[arm], rates))
    if not series or len(names) < 2:
        return None
    image = svg.bars(names, series, y="accept_rate", label="Acceptance by category")
    return _plot("Acceptance by category", "Accepted over drafted levels, at the first load.", image, series)


def _first_tokens(record: Record) -> list[dict[str, Any]]:
    made = []
    for load in record.header.loads:
        series = []
        for arm in record.arms:
            times = [r.ttft_s for r in record.pick(arm, load) if r.ttft_s is not None and r.error is None]
            if times:
                series.append(svg.Series(arm, _colors(record)[arm], times))
        if series:
            image = svg.shares(series, x="seconds", label=f"Time to first token at load {load}")
            title = f"Time to first token, load {load}"
            made.append(_plot(title, "Share of requests that had their first token by then.", image, series))
    return made


def worst(record: Record) -> list[dict[str, Any]]:
    """Return the requests with the lowest speed-up, and the text they were answered with."""
    base = {(r.id, r.load): r for r in record.results if r.arm == record.arms[0] and _counts(r)}
    rows: list[dict[str, Any]] = []
    for result in record.results:
        other = base.get((result.id, result.load))
        if result.arm == record.arms[0] or other is None or not _counts(result):
            continue
        ratio = (result.emitted / result.total_s) / (other.emitted / other.total_s)
        rows.append(
            {
                "id": result.id,
                "category": result.category,
                "arm": result.arm,
                "load": result.load,
                "tokens": result.emitted,
                "ratio": f"{ratio:.2f}",
                "text": result.text[:160],
            }
        )
    return sorted(rows, key=lambda row: float(row["ratio"]))[:_WORST]


def _counts(result: Result) -> bool:
    return result.error is None and result.emitted > 0 and result.total_s > 0
