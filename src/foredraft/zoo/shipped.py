"""Drafts that come with the package: heads/<kind>/<target>, each a directory with its provenance."""

from __future__ import annotations

from pathlib import Path

SHIPPED_KINDS = ("eagle", "medusa", "distilled")
_HOME = Path(__file__).parent / "heads"


def shipped(kind: str) -> list[Path]:
    """Return the directories of all shipped drafts of one kind."""
    return sorted(path.parent for path in (_HOME / kind).glob("*/config.json"))
