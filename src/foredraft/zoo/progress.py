"""What a pull shows while it works: one line a stage, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int | None], None]
"""Called as report(stage, done, total): bytes, or total=None for a stage whose length is not known."""


@contextmanager
def shown(progress: bool) -> Iterator[Report]:
    """Give a Report that draws bars, or one that does nothing."""
    if not progress:
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    # The stream is fixed here, so the bars stay visible while a noisy library's output is held back.
    console = Console(file=sys.stderr)
    columns = [TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[size]}")]
    tasks: dict[str, TaskID] = {}

    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:

        def finish() -> None:
            for task in bars.tasks:
                bars.update(task.id, total=task.total or 1, completed=task.total or 1)

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                finish()
                tasks[stage] = bars.add_task(stage, size="")
            size = f"{total / 1e6:,.0f} MB" if total else ""
            bars.update(tasks[stage], completed=done, total=total, size=size)

        yield report
        finish()
