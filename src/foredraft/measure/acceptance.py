"""Acceptance as servers tell it, converted to ours.

Counters (Prometheus): vLLM's names under vllm:, foredraft: and llamacpp:, TensorRT-LLM's, SGLang's gauges.
Per response: our own `metrics.foredraft`, vLLM's `metrics.speculative_decoding`, llama.cpp's `timings`,
SGLang's `meta_info`. What cannot be read of any of them is not told.
What other engines call "drafts" are steps that drafted. Ours count every step, so steps are derived from the
tokens: each step emits what it accepted and one more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from foredraft.measure.records import Acceptance

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+\w.]+)")
_POSITION = re.compile(r'position="(\d+)"')
_PREFIXES = ("vllm:", "foredraft:", "llamacpp:")
_TRT = "trtllm_spec_decode_num_"
_EMITTED = ("vllm:generation_tokens", "foredraft:generation_tokens", "llamacpp:tokens_predicted")

Counters = dict[str, float]


def parse_metrics(text: str) -> Counters:
    """Return what a /metrics page says about speculation, under our keys.

    Counters, summed over all labels but the position: drafted, levels (only ours), accepted,
    accepted_at.<depth> and emitted, all tokens. Gauges of SGLang, the mean over its parts:
    gauge.mean_emitted and gauge.accept_rate.
    """
    found: Counters = {}
    parts: Counter[str] = Counter()
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        key = _key(match[1], match[2] or "")
        if key is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            found[key] = found.get(key, 0.0) + value
            parts[key] += 1
    return {key: value / parts[key] if key.startswith("gauge.") else value for key, value in found.items()}


def _key(name: str, labels: str) -> str | None:
    name = name.removesuffix("_total")
    if name in ("sglang:spec_accept_length", "sglang:spec_accept_rate"):
        return "gauge.mean_emitted" if name.endswith("length") else "gauge.accept_rate"
    if name.startswith(_TRT):
        return {"draft_tokens": "drafted", "accepted_tokens": "accepted"}.get(name.removeprefix(_TRT))
    if name in _EMITTED:
        return "emitted"
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix + "spec_decode_num_")), None)
    if prefix is None:
        return None
    rest = name.removeprefix(prefix + "spec_decode_num_")
    position = _POSITION.search(labels)
    if rest == "accepted_tokens_per_pos" and position:
        return f"accepted_at.{position[1]}"
    return {"draft_tokens": "drafted", "draft_levels": "levels", "accepted_tokens": "accepted"}.get(rest)


def from_counters(before: Counters, after: Counters, emitted: int | None) -> Acceptance | None:
    """Return the acceptance between two readings; None if one of them failed or says nothing of it, or the
    server began to count anew.

    emitted: tokens in between where the server does not count them; None: not all of them are known.
    """
    if {"drafted", "accepted"} <= before.keys() & after.keys():
        grown = {key: int(after[key] - before.get(key, 0.0)) for key in after}
        emitted = grown.get("emitted", emitted)
        if emitted is None or min(grown["drafted"], grown["accepted"]) < 0:
            return None
        depths = sorted(int(key.split(".")[1]) for key in grown if key.startswith("accepted_at."))
        reached = [grown[f"accepted_at.{depth}"] for depth in depths]
        while "levels" in grown and reached and not reached[-1]:  # ours are there before they are reached
            reached.pop()
        rate = "accepted / levels" if "levels" in grown else "accepted / drafted (a chain)"
        return Acceptance(
            source=f"counters of /metrics; accept_rate = {rate}, steps = tokens - accepted",
            steps=max(emitted - grown["accepted"], 0),
            drafted=grown["drafted"],
            levels=grown.get("levels", grown["drafted"]),
            accepted=grown["accepted"],
            emitted=emitted,
            accepted_at=tuple(reached),
        )
    if emitted is not None and after.get("gauge.mean_emitted", 0.0) >= 1.0:
        return _from_means(after["gauge.mean_emitted"], after.get("gauge.accept_rate", 0.0), emitted)
    return None


def _from_means(mean_emitted: float, accept_rate: float, emitted: int) -> Acceptance:
    steps = round(emitted / mean_emitted)
    accepted = emitted - steps
    levels = round(accepted / accept_rate) if accept_rate else None
    return Acceptance(
        source="gauges of /metrics (the server's own recent means, not this run's counts); the accept length "
        "includes the bonus, as mean_emitted does",
        steps=steps,
        drafted=levels,
        levels=levels,
        accepted=accepted,
        emitted=emitted,
    )


def from_response(answer: Mapping[str, Any], emitted: int) -> Acceptance | None:
    """Return the acceptance that a response (or its last chunk) tells of itself, or None."""
    try:
        return _from_response(answer, emitted)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return None


def _from_response(answer: Mapping[str, Any], emitted: int) -> Acceptance | None:
    metrics = answer.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    told = metrics.get("foredraft")
    if isinstance(told, Mapping) and "levels" in told:
        return _from_ours(told)
    told = metrics.get("speculative_decoding")
    if isinstance(told, Mapping) and "num_accepted_draft_tokens" in told:
        return _from_vllm(told, emitted)
    timings = answer.get("timings")
    if isinstance(timings, Mapping) and "predicted_n" in timings:
        drafted, accepted = (int(timings.get(key) or 0) for key in ("draft_n", "draft_n_accepted"))
        source = "timings of each response (llama.cpp): draft_n, draft_n_accepted; steps = tokens - accepted"
        return _chain(source, drafted, accepted, emitted)
    meta = answer.get("meta_info")
    if isinstance(meta, Mapping) and "spec_num_correct_drafts" in meta:
        drafted = int(meta["spec_num_proposed_drafts"])
        source = "meta_info of each response (SGLang): correct and proposed drafts; steps = tokens - accepted"
        return _chain(source, drafted, int(meta["spec_num_correct_drafts"]), emitted)
    return None


def _chain(source: str, drafted: int, accepted: int, emitted: int) -> Acceptance:
    return Acceptance(
        source=source,
        steps=max(emitted - accepted, 0),
        drafted=drafted,
        levels=drafted,
        accepted=accepted,
        emitted=emitted,
    )


def _from_ours(told: Mapping[str, Any]) -> Acceptance:
    counts = {name: int(told[name]) for name in ("steps", "drafted", "levels", "accepted", "emitted")}
    at = tuple(int(count) for count in told["accepted_at"])
    return Acceptance(source="metrics.foredraft of each response", accepted_at=at, **counts)


def _from_vllm(told: Mapping[str, Any], emitted: int) -> Acceptance:
    accepted = int(told["num_accepted_draft_tokens"])
    histogram = told.get("acceptance_histogram") or ()
    if isinstance(histogram, Mapping):
        sizes = {int(key): int(value) for key, value in histogram.items()}
    else:
        sizes = dict(enumerate(int(value) for value in histogram))
    longest = max((size for size, steps in sizes.items() if steps), default=0)
    reached = tuple(sum(n for size, n in sizes.items() if size > depth) for depth in range(longest))
    return Acceptance(
        source="metrics.speculative_decoding of each response; steps = tokens - accepted",
        steps=max(emitted - accepted, 0),
        drafted=int(told.get("num_draft_tokens", 0)),
        levels=int(told.get("num_draft_tokens", 0)),
        accepted=accepted,
        emitted=emitted,
        accepted_at=reached,
    )


def total(parts: Iterable[Acceptance]) -> Acceptance | None:
    """Return the sum of several; None of none. What one of them does not know stays unknown."""
    parts = list(parts)
    if not parts:
        return None
    sums: dict[str, Any] = {}
    for name in ("steps", "drafted", "levels", "accepted", "emitted"):
        values = [getattr(part, name) for part in parts]
        sums[name] = None if None in values else sum(values)
    at = tuple(map(sum, zip_longest(*(part.accepted_at for part in parts), fillvalue=0)))
    return Acceptance(source=parts[0].source, accepted_at=at, **sums)
