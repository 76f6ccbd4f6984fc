"""Three small plots as inline SVG: lines over named places, lines over numbers, grouped bars.

Colours are CSS classes (series-0 …), so that a page may be light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 24, 44


@dataclass(frozen=True, slots=True)
class Series:
    """A line or a set of bars; low and high are the ends of intervals (None: no interval). None: no value."""

    name: str
    color: int
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def _ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 up to at least `most`."""
    rough = max(most, 1e-9) / 4
    magnitude = 10.0 ** np.floor(np.log10(rough))
    step = next(float(magnitude * size) for size in (1, 2, 2.5, 5, 10) if magnitude * size >= rough)
    return [step * n for n in range(int(np.ceil(most / step - 1e-9)) + 1)]


class _Frame:
    """Axes with horizontal grid lines; places on x are given in 0 … 1."""

    def __init__(self, most: float, y_label: str, x_label: str, label: str) -> None:
        self.ticks = _ticks(most)
        self.parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
            f'<text class="axis" x="{_LEFT}" y="10">{escape(y_label)}</text>',
            f'<text class="axis" x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
            f"{escape(x_label)}</text>",
        ]
        for tick in self.ticks:
            y = self.y(tick)
            self.parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )

    def x(self, share: float) -> float:
        """From 0 … 1 to a place."""
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """From a value to a place."""
        return HEIGHT - _BOTTOM - value / self.ticks[-1] * (HEIGHT - _TOP - _BOTTOM)

    def name(self, share: float, text: str) -> None:
        """Write a name below the axis."""
        x, y = self.x(share), HEIGHT - _BOTTOM + 16
        self.parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'
        )

    def level(self, value: float) -> None:
        """Draw a reference line."""
        y = self.y(value)
        self.parts.append(
            f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )

    def line(self, color: int, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line through places."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line series-{color}" points="{path}"/>')

    def done(self) -> str:
        """Return the whole."""
        return "".join([*self.parts, "</svg>"])


def _most(series: Sequence[Series], least: float = 0.0) -> float:
    values = [v for s in series for v in (*s.values, *s.high) if v is not None]
    return max([least, *values])


def lines(
    names: Sequence[str], series: Sequence[Series], *, y: str, x: str, level: float | None = None, label: str
) -> str:
    """Plot values over named places, with intervals and a reference level."""
    frame = _Frame(_most(series, level or 0.0), y, x, label)
    place: Callable[[int], float] = lambda i: (i + 0.5) / len(names)  # noqa: E731
    for i, name in enumerate(names):
        frame.name(place(i), name)
    if level is not None:
        frame.level(level)
    for shift, one in enumerate(series):
        nudge = (shift - (len(series) - 1) / 2) * 6
        known = [(i, v) for i, v in enumerate(one.values) if v is not None]
        points = [(frame.x(place(i)) + nudge, frame.y(v)) for i, v in known]
        frame.line(one.color, points)
        for (i, value), (px, py) in zip(known, points, strict=True):
            low, high = (side[i] if side else None for side in (one.low, one.high))
            if low is not None and high is not None:
                frame.parts.append(
                    f'<line class="line series-{one.color}" x1="{px:.1f}" x2="{px:.1f}" '
                    f'y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"/>'
                )
            title = f"<title>{escape(one.name)}, {escape(names[i])}: {value:.3g}</title>"
            frame.parts.append(
                f'<circle class="dot series-{one.color}" cx="{px:.1f}" cy="{py:.1f}" r="4">{title}</circle>'
            )
    return frame.done()


def bars(names: Sequence[str], series: Sequence[Series], *, y: str, label: str) -> str:
    """Plot grouped bars over names."""
    frame = _Frame(_most(series), y, "", label)
    width = min(26.0, 0.8 * (WIDTH - _LEFT - _RIGHT) / max(len(names) * len(series), 1))
    for i, name in enumerate(names):
        middle = (i + 0.5) / len(names)
        frame.name(middle, name if len(name) * len(names) < 80 else name[: 80 // len(names)] + "…")
        for place, one in enumerate(series):
            value = one.values[i]
            if value is None:
                continue
            x = frame.x(middle) + (place - len(series) / 2) * width + 1
            top, bottom = frame.y(value), frame.y(0)
            frame.parts.append(
                f'<rect class="bar series-{one.color}" x="{x:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{bottom - top:.1f}" rx="2"><title>{escape(one.name)}, {escape(name)}: {value:.3g}'
                "</title></rect>"
            )
    return frame.done()


def shares(series: Sequence[Series], *, x: str, label: str) -> str:
    """Plot, for each series of raw values, the share of them that is no larger (its distribution)."""
    most = _most(series)
    frame = _Frame(1.0, "share of requests", x, label)
    ticks = _ticks(most)
    for tick in ticks:
        frame.name(tick / ticks[-1], f"{tick:g}")
    for one in series:
        values = sorted(v for v in one.values if v is not None)
        points = [(frame.x(0), frame.y(0))]
        for n, value in enumerate(values):
            at = frame.x(value / ticks[-1])
            points += [(at, frame.y(n / len(values))), (at, frame.y((n + 1) / len(values)))]
        points.append((frame.x(1), frame.y(1)))
        frame.line(one.color, points)
    return frame.done()
