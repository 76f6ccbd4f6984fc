"""What a measurement leaves behind: JSONL with one header, one line a request, one line of server counters a
block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TextIO, TypeVar

from foredraft.errors import ConfigError
from foredraft.measure.files import HALVES, to_json, unwritten, writing
from foredraft.rows import read_rows

FORMAT = 1
_T = TypeVar("_T")
_USER = re.compile(r"://[^/@\s]+@")  # of a URL


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of drafts, in the words of docs/architecture.md. None: the engine does not tell.

    `emitted` are the tokens of the same requests. `source` says where the figures come from and how they were
    converted.
    """

    source: str
    steps: int | None = None
    drafted: int | None = None
    levels: int | None = None
    accepted: int | None = None
    emitted: int | None = None
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One request under one arm and load. Times in seconds; start_s since the run began, the others since
    the request was sent. `emitted` counts tokens; `first_tokens` of them came with the first. `reported` is
    the usage that a server claims. `ids` where they are known.
    """

    id: str
    category: str
    arm: str
    load: str
    block: int
    start_s: float
    total_s: float
    ttft_s: float | None = None
    emitted: int = 0
    first_tokens: float = 1.0
    chunks: int = 0
    reported: int | None = None
    finish: str | None = None
    error: str | None = None
    text: str = ""
    ids: tuple[int, ...] | None = None
    acceptance: Acceptance | None = None


@dataclass(frozen=True, slots=True)
class BlockCounters:
    """What a server's counters grew by while one arm served one block of requests."""

    arm: str
    load: str
    block: int
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """An arm as the header names it. counter: what tokens were counted from."""

    name: str
    kind: str
    model: str
    draft: str
    where: str
    counter: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """What a reader needs to repeat the run. The first arm is the baseline."""

    command: str
    time: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    arms: tuple[ArmInfo, ...]
    loads: tuple[str, ...]
    requests: int
    seed: int
    max_tokens: int
    format: int = FORMAT


@dataclass(slots=True)
class Record:
    """A whole measurement."""

    header: Header
    results: list[Result] = field(default_factory=list)
    counters: list[BlockCounters] = field(default_factory=list)

    @property
    def arms(self) -> list[str]:
        """The names of the arms, the baseline first."""
        return [arm.name for arm in self.header.arms]

    def pick(self, arm: str, load: str, category: str | None = None) -> list[Result]:
        """Return the results of an arm at a load, of one category or all."""
        return [
            r
            for r in self.results
            if (r.arm, r.load) == (arm, load) and (category is None or r.category == category)
        ]

    @property
    def categories(self) -> list[str]:
        """The categories in the order they were met."""
        return list(dict.fromkeys(r.category for r in self.results))


class RecordFile:
    """Writes a measurement line by line, so that an interrupt loses nothing. A disk that is full ends the
    file and not the measurement: `fault` then says so.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.record = Record(header)
        self.fault: ConfigError | None = None
        self._path = path
        self._file: TextIO | None = None
        if path is not None:
            with writing(path):
                self._file = path.open("w", encoding="utf-8", errors=HALVES)
        self._write("header", header)

    def add(self, result: Result) -> None:
        """Keep one request."""
        self.record.results.append(result)
        self._write("request", result)

    def add_counters(self, counters: BlockCounters) -> None:
        """Keep what a server counted over one block."""
        self.record.counters.append(counters)
        self._write("counters", counters)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # what could not be written is tried once more, and told of already
                self._file.close()

    def _write(self, kind: str, value: Header | Result | BlockCounters) -> None:
        if self._path is None or self._file is None or self.fault is not None:
            return
        try:
            self._file.write(to_json({"kind": kind, **asdict(value)}) + "\n")
            self._file.flush()
        except OSError as error:
            self.fault = unwritten(self._path, error)


def without_user(text: str) -> str:
    """Return a text without the names and passwords in its URLs: records and reports are passed on."""
    return _USER.sub("://…@", text)


def read_record(paths: Iterable[Path]) -> Record:
    """Read one measurement, or several that differ in their arms or loads, as one; raises ConfigError."""
    found: list[Record] = []
    for path in paths:
        for where, row in read_rows(path):
            try:
                _take(row, found)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{where} is no line of a measurement: {error}") from error
    if not any(record.results for record in found):
        raise ConfigError(
            "there is no measured request in the file: give what `foredraft measure --out` wrote"
        )
    return reduce(_joined, found)


def _take(row: dict[str, Any], found: list[Record]) -> None:
    """Add a line to the newest measurement; a header begins one."""
    kind = row.pop("kind", None)
    if kind == "header":
        if row.get("format") != FORMAT:
            raise ValueError(f"format {row.get('format')!r} is not {FORMAT}, which this version reads")
        arms = tuple(_make(ArmInfo, arm) for arm in row["arms"])
        found.append(Record(_make(Header, row | {"arms": arms})))
        return
    if not found:
        raise ValueError("the header is missing")
    if row.get("acceptance") is not None:
        row["acceptance"] = _make(Acceptance, row["acceptance"])
    if kind == "request":
        found[-1].results.append(_make(Result, row))
    elif kind == "counters":
        found[-1].counters.append(_make(BlockCounters, row))
    else:
        raise ValueError(f"kind {kind!r} is unknown")


def _joined(record: Record, other: Record) -> Record:
    """Unite arms and loads; the first one's baseline stays.

    An arm at a load belongs to one run: its requests are paired with those of the baseline by their ids, and
    its times begin with the run.
    """
    twice = {(r.arm, r.load) for r in record.results} & {(r.arm, r.load) for r in other.results}
    if twice:
        arm, load = min(twice)
        raise ConfigError(
            f"arm {arm!r} at load {load} was measured in two of these runs, and figures of different runs "
            "are not to be mixed: give each file alone, or measure all arms in one run"
        )
    mine, its = record.header, other.header
    arms = mine.arms + tuple(arm for arm in its.arms if arm.name not in record.arms)
    header = replace(mine, arms=arms, loads=tuple(dict.fromkeys(mine.loads + its.loads)))
    return Record(header, record.results + other.results, record.counters + other.counters)


def _make(kind: type[_T], row: Mapping[str, Any]) -> _T:
    """Return a record from JSON values, lists as tuples; raises TypeError on names that do not fit."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
