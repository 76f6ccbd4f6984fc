"""The run: arms alternate over blocks of the same requests, at every load."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from foredraft.errors import ConfigError
from foredraft.measure.records import (
    Acceptance,
    ArmInfo,
    BlockCounters,
    Header,
    Record,
    RecordFile,
    Result,
    without_user,
)
from foredraft.measure.workload import Ask, Load, how_many, in_blocks, repeated

_WARM_UPS = 8
_SETTLED = 0.2  # warm when two requests in a row take times this near
_PLAIN_PROBES = 4
_PLAIN_CHARS = 12
_WAY_OUT = "lower the load, or raise the server's limit"


class Arm(Protocol):
    """Something that answers requests at a load."""

    name: str
    counter: str

    @property
    def info(self) -> ArmInfo:
        """How the header names it."""

    def connect(self, endpoint: str) -> None:
        """Make sure it is there; raises ConfigError."""

    def warm_up(self, asks: Sequence[Ask], enough: Callable[[float], bool]) -> None:
        """Answer requests until it is warm."""

    def begin(self) -> None:
        """Prepare for a block."""

    def end(self, results: Sequence[Result]) -> Acceptance | None:
        """Return what was counted over the block apart from its results."""

    def run(
        self, asks: Sequence[Ask], load: Load, block: int, origin: float, keep: Callable[[Result], None]
    ) -> None:
        """Answer requests."""

    def close(self) -> None:
        """Let go of what is open."""


def make_header(arms: Sequence[Arm], loads: Sequence[Load], asks: Sequence[Ask], seed: int) -> Header:
    """Describe machine, versions and command."""
    return Header(
        command=_command(sys.argv),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=machine(),
        versions=_versions(),
        arms=tuple(arm.info for arm in arms),
        loads=tuple(load.label for load in loads),
        requests=len(asks),
        seed=seed,
        max_tokens=max(ask.max_tokens for ask in asks),
    )


def _command(argv: Sequence[str]) -> str:
    """Return a command without the keys and passwords in it."""
    shown = []
    for before, word in zip(["", *argv], argv, strict=False):
        key, given, _ = word.partition("=")
        if before == "--api-key":
            word = "…"
        elif given and key == "--api-key":
            word = "--api-key=…"
        shown.append(without_user(word))
    return shlex.join(shown)


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            cpu = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
            )
    except OSError:
        pass
    memory = psutil.virtual_memory().total / 1e9
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory, 1), "system": platform.platform()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("foredraft", "torch", "transformers", "httpx2"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_same_model(arms: Sequence[Arm], asks: Sequence[Ask]) -> None:
    """Refuse arms that greedily begin most plain requests with other words: they run different models."""
    some = [Ask(ask.id, ask.category, plain_body(ask, 8), ask.where) for ask in asks[:_PLAIN_PROBES]]
    begun: list[list[str]] = []
    for arm in arms:
        results: list[Result] = []
        arm.run(some, Load(concurrency=1), 0, 0.0, results.append)
        failed = next((r.error for r in results if r.error), None)
        if failed:
            raise ConfigError(f"{arm.name} does not answer a plain request: {failed}")
        begun.append([r.text[:_PLAIN_CHARS] for r in results])
    for arm, mine in zip(arms[1:], begun[1:], strict=True):
        other = sum(a != b for a, b in zip(mine, begun[0], strict=True))
        if other > len(some) / 2:
            raise ConfigError(
                f"{arm.name} and {arms[0].name} begin {other} of {len(some)} plain greedy requests "
                f"differently ({mine[0]!r}, {begun[0][0]!r}): do they serve the same model?"
            )


def plain_body(ask: Ask, max_tokens: int) -> dict[str, Any]:
    """Return what the request says, greedily and shortly answered, without any other parameter."""
    said: dict[str, Any] = {name: ask.body[name] for name in ("messages", "prompt") if name in ask.body}
    return {**said, "max_tokens": max_tokens, "temperature": 0}


def blocks(asks: Sequence[Ask], load: Load) -> list[list[Ask]]:
    """Cut the requests into what one arm answers before it is another's turn."""
    if load.rate is not None:
        return [list(asks)]
    assert load.concurrency is not None
    return in_blocks(repeated(asks, how_many(len(asks), load.concurrency)), load.concurrency)


def warm_up(arm: Arm, asks: Sequence[Ask]) -> None:
    """Answer requests until their time per token settles."""
    seen: list[float] = []

    def settled(token_s: float) -> bool:
        seen.append(token_s)
        return len(seen) > 1 and abs(seen[-1] / seen[-2] - 1) < _SETTLED

    arm.warm_up(repeated(asks, _WARM_UPS), settled)


def measure(
    arms: Sequence[Arm],
    asks: Sequence[Ask],
    loads: Sequence[Load],
    file: RecordFile,
    on_result: Callable[[Result], None] = lambda result: None,
) -> None:
    """Answer all requests by every arm at every load, arms in turn; the file keeps each result at once."""
    origin = time.perf_counter()
    number = 0
    for load in loads:
        for part in blocks(asks, load):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                _block(arm, part, load, number, origin, file, on_result)
            number += 1
        _refuse_hopeless(file, load)


def _block(
    arm: Arm,
    asks: Sequence[Ask],
    load: Load,
    number: int,
    origin: float,
    file: RecordFile,
    on_result: Callable[[Result], None],
) -> None:
    results: list[Result] = []

    def keep(result: Result) -> None:
        results.append(result)
        file.add(result)
        on_result(result)

    arm.begin()
    arm.run(asks, load, number, origin, keep)
    counted = arm.end(results)
    if counted is not None:
        file.add_counters(BlockCounters(arm.name, load.label, number, counted))


def _refuse_hopeless(file: RecordFile, load: Load) -> None:
    """End the run when an arm answers nothing at a load; what was measured is in the file."""
    for arm in file.record.arms:
        results = file.record.pick(arm, load.label)
        errors = [r.error for r in results if r.error]
        if results and len(errors) == len(results):
            raise ConfigError(
                f"{arm} answered none of {len(results)} requests at load {load.label}: {errors[0]}; "
                f"{_WAY_OUT}"
            )


def refusals(record: Record) -> list[str]:
    """Return a line for each arm and load where requests failed."""
    lines = []
    for load in record.header.loads:
        for arm in record.arms:
            results = record.pick(arm, load)
            errors = [r.error for r in results if r.error]
            if errors:
                line = f"{arm} at load {load}: {len(errors)} of {len(results)} failed, as: {errors[0]}"
                busy = any("HTTP 429" in error for error in errors)
                lines.append(line + (f"; {_WAY_OUT}" if busy else ""))
    return lines
