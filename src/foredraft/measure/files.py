"""Files that are written, and the JSON in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError

# Servers may cut between the two halves of a character beyond 16 bits: alone these are no UTF-8, and are
# written as the escapes that JSON has for them.
HALVES = "backslashreplace"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make room for a file; raises ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise unwritten(path, error) from error


def unwritten(path: Path, error: OSError) -> ConfigError:
    """Return what tells of a file that cannot be written."""
    return ConfigError(f"{path} cannot be written ({error.strerror or error}): name another file")


def check_place(path: Path) -> None:
    """Raise ConfigError, before the work, if a file cannot be written there; what is there stays."""
    with writing(path):
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file; raises ConfigError."""
    with writing(path):
        path.write_text(text, encoding="utf-8", errors=HALVES)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON, in which a number that is not finite is null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
