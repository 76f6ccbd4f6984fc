"""Do two tokenizers give every token the same id? A draft model must speak its target's vocabulary."""

from __future__ import annotations

from typing import Any

from foredraft.errors import ConfigError


def check_same_vocabulary(draft: Any, target: Any, name: str) -> None:
    """Raise ConfigError, naming the first token that differs, unless the vocabularies are the same."""
    mine: dict[str, int] = draft.get_vocab()
    theirs: dict[str, int] = target.get_vocab()
    if mine == theirs:
        return
    different = sorted((i, token) for token, i in theirs.items() if mine.get(token) != i)
    extra = sorted((i, token) for token, i in mine.items() if token not in theirs)
    where, token = (different or extra)[0]
    raise ConfigError(
        f"draft {name!r} has another vocabulary ({len(mine)} tokens, the target {len(theirs)}; "
        f"token {where}, {token!r}, differs): use a draft model of the same family, or draft='ngram'"
    )
