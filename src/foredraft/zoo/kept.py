"""Small facts that were found out once and are kept in the user's cache, as JSON. A cache that cannot be read
or written is done without.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foredraft.cache import cache_dir, kernel_sources

LEAST_BYTES = 1 << 24
_LIBRARIES = ("foredraft", "torch", "transformers", "tokenizers", "numba")


def key(facts: Iterable[object]) -> str:
    """Return the name of what was found out under these facts and these versions of the libraries."""
    lines = [str(fact) for fact in facts] + [version(library) for library in _LIBRARIES] + [kernel_sources()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def model_key(path: Path, *facts: object) -> str | None:
    """Return the same for facts of a model directory, as long as its files stay as they are; None for one
    that cannot be read, and for a small one, of which nothing is kept: it loads at once.
    """
    try:
        stats = [(file.name, file.stat()) for file in sorted(path.glob("*"))]
    except OSError:
        return None
    if sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return None
    return key([path.resolve(), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats), *facts])


def recall(kind: str, name: str | None, where: Path | None = None) -> Any:
    """Return what was kept, or None."""
    if name is None:
        return None
    try:
        return json.loads(_file(kind, name, where).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep(kind: str, name: str | None, value: Any, where: Path | None = None) -> None:
    """Keep a JSON value, under a name if it has one."""
    if name is None:
        return
    file = _file(kind, name, where)
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value), encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        pass


def _file(kind: str, name: str, where: Path | None) -> Path:
    return (where or cache_dir() / kind) / f"{name}.json"
