"""Where foredraft keeps what it fetches and compiles."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $FOREDRAFT_CACHE, or foredraft below $XDG_CACHE_HOME, or ~/.cache/foredraft. Not created."""
    if own := os.environ.get("FOREDRAFT_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "foredraft"
