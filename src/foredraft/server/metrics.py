"""Prometheus metrics, named and labelled as vLLM's where it has the like. Counters only; rates belong in the
query.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foredraft.engine.config import Load
from foredraft.types import SpecStats, StepOutput

_P = "foredraft:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_NODES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_POSITIONS = 8  # that have a series before they occur: a rate needs its 0

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step drafted and kept."""

    drafted: int
    levels: int
    accepted: int


@dataclass(slots=True)
class Tally:
    """The steps of one answer, told apart from its running record. histogram[a]: drafting steps that accepted
    a nodes. most: nodes of its largest draft.
    """

    steps: int = 0
    histogram: list[int] = field(default_factory=list)
    most: int = 0
    _seen: tuple[int, int, int, int] = (0, 0, 0, 0)

    def step(self, stats: SpecStats) -> StepCount | None:
        """Return what is new in the record; None if no step emitted."""
        now = (stats.steps, stats.drafted, stats.levels, stats.accepted)
        steps, drafted, levels, accepted = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        if not steps:
            return None
        if drafted:
            self.steps += 1
            self.most = max(self.most, drafted)
            self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
            self.histogram[accepted] += 1
        return StepCount(drafted, levels, accepted)


@dataclass(slots=True)
class _Running:
    tally: Tally = field(default_factory=Tally)
    last_s: float = 0.0


class Metrics:
    """One registry a server. `step` is called by the engine's thread, the rest by the event loop."""

    def __init__(self, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._served = (model, "0")  # vLLM numbers its engines; there is one here
        self._running: dict[str, _Running] = {}
        self._before = SpecStats()

        def vllm(kind: type[_Metric], name: str, text: str, *labels: str, **options: Any) -> _Metric:
            """Return a metric that vLLM's dashboards find: it has their labels, before its own."""
            names = ("model_name", "engine", *labels)
            metric = kind(_P + name, text, names, registry=registry, **options)
            return metric if labels else metric.labels(*self._served)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_P + name, text, labels, registry=registry)

        Gauge(_P + "model_info", "The model that is served", ["model"], registry=registry).labels(model).set(
            1
        )
        self.http = counter("http_requests", "HTTP requests", "path", "status")
        self.finished = vllm(Counter, "request_success", "Answers that ended, by reason", "finished_reason")
        self.rejected = counter("requests_rejected", "Requests not taken, by reason", "reason")
        self.prompt_tokens = vllm(Counter, "prompt_tokens", "Prompt tokens of requests that were taken")
        self.tokens = vllm(Counter, "generation_tokens", "Emitted tokens")
        self.running = vllm(Gauge, "num_requests_running", "Answers that are being written")
        self.waiting = vllm(Gauge, "num_requests_waiting", "Answers that wait for a place")
        self.kv_use = vllm(Gauge, "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        self.ttft = vllm(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token", buckets=_SECONDS
        )
        self.gap = vllm(
            Histogram,
            "inter_token_latency_seconds",
            "A step's time over the tokens it emitted",
            buckets=_SHORT,
        )
        self.e2e = vllm(
            Histogram, "e2e_request_latency_seconds", "From arrival to the last token", buckets=_SECONDS
        )
        self.drafts = vllm(Counter, "spec_decode_num_drafts", "Steps that drafted")
        self.drafted = vllm(Counter, "spec_decode_num_draft_tokens", "Drafted tokens")
        self.levels = vllm(Counter, "spec_decode_num_draft_levels", "Levels of the drafts")
        self.accepted = vllm(Counter, "spec_decode_num_accepted_tokens", "Accepted tokens, the bonus apart")
        self.accepted_at = vllm(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps whose path reached a depth",
            "position",
        )
        for position in range(_POSITIONS):
            self.accepted_at.labels(*self._served, str(position))
        self.budget = Histogram(
            _P + "draft_nodes",
            "Nodes drafted in a step; 0 is plain decoding",
            buckets=_NODES,
            registry=registry,
        )
        self.seconds = counter("engine_seconds", "Where the engine's time went", "part")
        self.captured = counter("captured_requests", "Requests written to the capture file")
        self.uncaptured = counter("capture_dropped", "Requests that could not be captured", "reason")

    def text(self) -> bytes:
        """Return what Prometheus reads."""
        return generate_latest(self.registry)

    def step(self, outputs: Sequence[StepOutput], total: SpecStats, load: Load) -> None:
        """Count one step of the engine."""
        now = time.perf_counter()
        for output in outputs:
            self._output(output, now)
        for part in ("prompt", "draft", "target", "other"):
            name = f"{part}_s"
            self.seconds.labels(part).inc(max(0.0, getattr(total, name) - getattr(self._before, name)))
            setattr(self._before, name, getattr(total, name))
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_use.set(load.kv_use)

    def _output(self, output: StepOutput, now: float) -> None:
        known = self._running.setdefault(output.request_id, _Running())
        emitted = len(output.token_ids)
        self.tokens.inc(emitted)
        if emitted and known.last_s:
            for _ in range(emitted):
                self.gap.observe((now - known.last_s) / emitted)
        elif emitted:
            self.ttft.observe(output.stats.ttft_s)
        if emitted:
            known.last_s = now
        count = known.tally.step(output.stats)
        if count is not None:
            self._drafted(count)
        if output.finish_reason is not None:
            del self._running[output.request_id]
            self.finished.labels(*self._served, output.finish_reason).inc()
            self.e2e.observe(output.stats.total_s)

    def _drafted(self, count: StepCount) -> None:
        self.budget.observe(count.drafted)
        if count.drafted:
            self.drafts.inc()
            self.drafted.inc(count.drafted)
            self.levels.inc(count.levels)
            self.accepted.inc(count.accepted)
            for position in range(count.accepted):
                self.accepted_at.labels(*self._served, str(position)).inc()
