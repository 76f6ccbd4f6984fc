"""foredraft: exact speculative decoding. The same text, in fewer passes of the model.

>>> from foredraft import LLM, SamplingParams
>>> llm = LLM("smollm2-135m", draft="ngram")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

from foredraft.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DownloadError,
    ForedraftError,
    ModelError,
)

if TYPE_CHECKING:
    from foredraft import zoo
    from foredraft.llm import LLM
    from foredraft.types import Completion, Draft, Piece, SamplingParams, SpecStats, Verdict

__version__ = metadata.version("foredraft")

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DownloadError",
    "Draft",
    "ForedraftError",
    "ModelError",
    "Piece",
    "SamplingParams",
    "SpecStats",
    "Verdict",
    "__version__",
    "zoo",
]


def __getattr__(name: str) -> object:
    """Import what needs torch or transformers when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "zoo":
        return import_module("foredraft.zoo")
    home = "foredraft.llm" if name == "LLM" else "foredraft.types"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
