"""The zoo: names -> where weights come from. Light to import; torch is loaded only to convert a model."""

from __future__ import annotations

from foredraft.cache import cache_dir
from foredraft.zoo.api import pull, resolve
from foredraft.zoo.entries import MODELS, Entry
from foredraft.zoo.shipped import SHIPPED_KINDS, shipped

__all__ = ["MODELS", "SHIPPED_KINDS", "Entry", "cache_dir", "pull", "resolve", "shipped"]
