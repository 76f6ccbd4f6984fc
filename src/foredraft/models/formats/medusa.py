"""Medusa heads as the Medusa project writes them: `{head}.{layer}.linear.weight` and `.bias`, and, in newer
files, `{head}.{layers}.weight`, a projection to the vocabulary of the head's own.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

FILE = "medusa_lm_head.safetensors"
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PREFIXES = ("medusa_head.", "heads.")


def looks_like_medusa(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """True if a directory holds Medusa heads."""
    return "medusa_num_heads" in config or any(_BLOCK.fullmatch(_bare(name)) for name in tensors)


def from_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take a directory's config and tensors to the names used here, filling in the class's defaults."""
    config = {"medusa_num_heads": 5, "medusa_num_layers": 1} | config
    own = {"kind": "medusa"} | (config.get("foredraft") or {})
    return config | {"foredraft": own}, {_bare(name): tensor for name, tensor in tensors.items()}


def found_heads(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Return how many heads, and residual blocks in each, the tensors make."""
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        return 0, 0
    return max(int(m[1]) for m in blocks) + 1, max(int(m[2]) for m in blocks) + 1


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
