"""From records to figures: one definition each, and intervals that repeat exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from foredraft.measure.acceptance import total
from foredraft.measure.records import Acceptance, Record, Result

_RESAMPLES = 4000
_LEAST = 4  # blocks that an interval needs


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its 95 % bootstrap interval over blocks of requests (None: too few blocks)."""

    value: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        """As tables show it."""
        return f"{self.value:.2f}" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low is not None else "")


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load. Speeds in tokens/s, times in seconds.

    user_speed: tokens over the time their requests took, so what one user sees, prompt included. inter_token:
    mean time per token after those that came first, over all requests. throughput: tokens per second of the
    time in which requests were running. speedup: user_speed over the baseline's, on requests that both
    answered.
    """

    arm: str
    load: str
    requests: int
    failed: int
    tokens: int
    user_speed: float
    ttft_p50: float | None
    ttft_p95: float | None
    inter_token: float | None
    throughput: float
    acceptance: Acceptance | None
    speedup: Interval | None

    @property
    def accept_rate(self) -> float | None:
        """accepted / levels."""
        told = self.acceptance
        if told is None or not told.levels or told.accepted is None:
            return None
        return told.accepted / told.levels

    @property
    def mean_emitted(self) -> float | None:
        """emitted / steps, bonus included."""
        told = self.acceptance
        return told.emitted / told.steps if told and told.steps and told.emitted else None

    @property
    def accepted_at(self) -> list[float]:
        """Share of steps whose path reached each depth."""
        told = self.acceptance
        return [count / told.steps for count in told.accepted_at] if told and told.steps else []


def figures(record: Record, arm: str, load: str, category: str | None = None) -> Figures | None:
    """Return the figures of an arm at a load, of a category or all; None if no request was answered."""
    mine = record.pick(arm, load, category)
    good = [r for r in mine if r.error is None]
    if not good:
        return None
    first = [r.ttft_s for r in good if r.ttft_s is not None]
    late = [(r.total_s - r.ttft_s, r.emitted - r.first_tokens) for r in good if r.ttft_s is not None]
    late_tokens = sum(tokens for _, tokens in late)
    baseline = record.arms[0]
    return Figures(
        arm=arm,
        load=load,
        requests=len(mine),
        failed=len(mine) - len(good),
        tokens=sum(r.emitted for r in good),
        user_speed=sum(r.emitted for r in good) / sum(r.total_s for r in good),
        ttft_p50=float(np.quantile(first, 0.5)) if first else None,
        ttft_p95=float(np.quantile(first, 0.95)) if first else None,
        inter_token=sum(s for s, _ in late) / late_tokens if late_tokens > 0 else None,
        throughput=sum(r.emitted for r in good) / _busy_s(good),
        acceptance=_acceptance(record, good, arm, load, category),
        speedup=None if arm == baseline else speedup(good, record.pick(baseline, load, category)),
    )


def _busy_s(results: Sequence[Result]) -> float:
    """Seconds in which at least one of the requests was running."""
    busy, until = 0.0, -1.0
    for start, end in sorted((r.start_s, r.start_s + r.total_s) for r in results):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def _acceptance(
    record: Record, good: Sequence[Result], arm: str, load: str, category: str | None
) -> Acceptance | None:
    """Per response where every response tells, else the server's counters (which know no category)."""
    told = [r.acceptance for r in good if r.acceptance is not None]
    if len(told) == len(good):
        return total(told)
    if category is not None and len(record.categories) > 1:
        return None
    return total(c.acceptance for c in record.counters if (c.arm, c.load) == (arm, load))


def speedup(mine: Sequence[Result], base: Sequence[Result]) -> Interval | None:
    """Return the ratio of tokens/s on requests that both arms answered, with a bootstrap interval over
    blocks: requests that ran side by side share their steps, and whatever else the machine did.
    """
    others = {r.id: r for r in base if r.error is None}
    pairs = [(r, others[r.id]) for r in mine if r.error is None and r.id in others]
    pairs = [(a, b) for a, b in pairs if a.emitted and b.emitted]
    if not pairs:
        return None
    of_block: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
    for a, b in pairs:
        of_block[a.block] += (a.emitted, a.total_s, b.emitted, b.total_s)
    columns = np.array(list(of_block.values())).T
    point = float(_ratio(*columns))
    if len(of_block) < _LEAST:
        return Interval(point, None, None)
    found = stats.bootstrap(
        tuple(columns),
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    # Few blocks vary less among themselves than blocks do: wider, as Student is wider than normal.
    count = len(of_block)
    wider = stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975) * (count / (count - 1)) ** 0.5
    low, high = (point * (float(end) / point) ** wider for end in (found.low, found.high))
    return Interval(point, low, high)


def _ratio(a: Any, a_s: Any, b: Any, b_s: Any, axis: int = -1) -> NDArray[np.float64]:
    speeds = [np.sum(tokens, axis=axis) / np.sum(times, axis=axis) for tokens, times in ((a, a_s), (b, b_s))]
    return np.asarray(speeds[0] / speeds[1])


def verdict(record: Record, load: str) -> str:
    """Return what a load's figures say, in one sentence a variant."""
    sentences = []
    baseline = record.arms[0]
    unit = "arriving" if load.endswith("/s") else "at once"
    for arm in record.arms[1:]:
        found = figures(record, arm, load)
        if found is None or found.speedup is None:
            sentences.append(f"{arm}: nothing to compare, no request was answered by both arms")
            continue
        sentences.append(f"{arm} {_judged(found, baseline)}")
    return f"Load {load} ({unit}): " + "; ".join(sentences) + "."


def _judged(found: Figures, baseline: str) -> str:
    ratio = found.speedup
    assert ratio is not None
    rate = found.accept_rate
    why = f" ({rate:.0%} of drafted levels accepted)" if rate is not None else ""
    if ratio.low is None or ratio.high is None:
        return f"is {ratio.text}x as fast as {baseline}, on too few requests for an interval{why}"
    if ratio.low > 1:
        return f"is {ratio.text}x as fast as {baseline}: worth it here{why}"
    if ratio.high < 1:
        return f"is slower than {baseline}, {ratio.text}x: leave it off here{why}"
    return f"shows no difference to {baseline}, {ratio.text}x{why}"
