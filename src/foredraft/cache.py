"""Where foredraft keeps what it fetches and compiles."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


def cache_dir() -> Path:
    """Return $FOREDRAFT_CACHE, or foredraft below $XDG_CACHE_HOME, or ~/.cache/foredraft. Not created."""
    if own := os.environ.get("FOREDRAFT_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "foredraft"


@cache
def kernel_sources() -> str:
    """Return a digest of what kernels are compiled from. numba looks at the file of a function alone, and not
    at those it calls.
    """
    here = Path(__file__).parent
    names = ("race.py", "noise.py", "jit.py", "engine/pool.py")
    digest = hashlib.sha256()
    for file in sorted([*(here / name for name in names), *here.glob("models/kernels/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
