"""The tokenizer of a model directory."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from foredraft.errors import ModelError
from foredraft.zoo import kept

_KEPT, _LIBRARY, _AUTO = "tokenizers", "transformers.", "auto"
_ALIKE = ("vocab_size", "special_tokens_map", "chat_template", "padding_side", "model_max_length")


def load_tokenizer(path: Path) -> Any:
    """Return the transformers tokenizer of a model directory; raises ModelError.

    AutoTokenizer reads the model's config first, for which transformers imports most of what models are made
    of. So the class that it takes is kept, if that makes the same tokenizer by itself.
    """
    name = kept.model_key(path)
    known = kept.recall(_KEPT, name)
    own = _class(known)
    try:
        if own is not None:
            return own.from_pretrained(path)
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} has no tokenizer that can be loaded: {error}") from error
    if known != _AUTO:
        kept.keep(_KEPT, name, _name(type(found)) if _by_itself(found, path) else _AUTO)
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__name__}"


def _class(known: Any) -> Any:
    """Return the class of transformers that a name stands for, or None."""
    module, _, kind = str(known).partition(":")
    if not module.startswith(_LIBRARY):
        return None
    try:
        return getattr(import_module(module), kind)
    except (ImportError, AttributeError):
        return None


def _by_itself(found: Any, path: Path) -> bool:
    """True if the class of a tokenizer makes one like it without AutoTokenizer."""
    if not type(found).__module__.startswith(_LIBRARY):
        return False
    try:
        other = type(found).from_pretrained(path)
        same = found.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
        return same and all(getattr(found, name) == getattr(other, name) for name in _ALIKE)
    except Exception:
        return False
