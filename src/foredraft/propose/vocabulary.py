"""Do two tokenizers give every token the same id? Then a draft model speaks its target's vocabulary."""

from __future__ import annotations

from typing import Any


def difference(draft: Any, target: Any) -> str | None:
    """Return in what the vocabularies differ, naming the first token that does; None if they are the same."""
    mine: dict[str, int] = draft.get_vocab()
    theirs: dict[str, int] = target.get_vocab()
    if mine == theirs:
        return None
    different = sorted((i, token) for token, i in theirs.items() if mine.get(token) != i)
    extra = sorted((i, token) for token, i in mine.items() if token not in theirs)
    where, token = (different or extra)[0]
    return f"{len(mine)} tokens, the target {len(theirs)}; token {where}, {token!r}, differs"
