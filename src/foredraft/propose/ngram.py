"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena 2023, prompt lookup
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft, Needs, Source, Verdict, chain

LOOKUP = "lookup"  # the method of sources that look up what the text repeats
LONGEST = 15  # nodes of a lookup's draft that are ever worth their rows


@dataclass(slots=True)
class _Index:
    """Where every n-gram of a request's text last ended, grown as the text grows.

    ends[n][gram] is the position after the gram's latest occurrence that is followed by a token.
    """

    ends: dict[int, dict[tuple[int, ...], int]]
    length: int = 0  # grams ending at positions up to `length` are in

    def extend(self, tokens: Seq[int]) -> None:
        """Take in the grams that end before the last token: what ends the text is followed by nothing yet."""
        for stop in range(max(self.length, 1), len(tokens)):
            for size, known in self.ends.items():
                if stop >= size:
                    known[tuple(tokens[stop - size : stop])] = stop
        self.length = max(self.length, len(tokens))


class NgramProposer:
    """Drafts a chain by looking up the text's last tokens in prompt and output, longest match first."""

    needs = Needs()

    def __init__(self, *, min_size: int = 1, max_size: int = 4) -> None:
        if not 1 <= min_size <= max_size:
            raise ConfigError(
                f"n-gram sizes {min_size} to {max_size} are no range: use 1 <= min_size <= max_size"
            )
        self.sizes = range(max_size, min_size - 1, -1)
        self._indexes: dict[str, _Index] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one chain a sequence, empty where nothing matches."""
        return [
            self._one(seq, min(budget, seq.levels_left)) for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        """Return the lookup, graded by the size of the match; none without one."""
        size, _ = longest_match(seq.tokens, self._ends(seq))
        return (Source(LONGEST, prior=size / (size + 1), method=LOOKUP, grade=size),) if size else ()

    def _ends(self, seq: Sequence) -> dict[int, dict[tuple[int, ...], int]]:
        index = self._indexes.setdefault(seq.request_id, _Index({size: {} for size in self.sizes}))
        index.extend(seq.tokens)
        return index.ends

    def _one(self, seq: Sequence, length: int) -> Draft:
        ends = self._ends(seq)
        guess = continuation(seq.tokens, ends, length) if length > 0 else []
        return chain(guess) if guess else NO_DRAFT

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Learn nothing: the text itself is all there is."""

    def forget(self, request_id: str) -> None:
        """Drop the request's index."""
        self._indexes.pop(request_id, None)


def longest_match(tokens: Seq[int], ends: dict[int, dict[tuple[int, ...], int]]) -> tuple[int, int]:
    """Return the size of the longest known gram that ends the text, and where it last ended; zeros if none
    does.
    """
    for size, known in ends.items():
        stop = known.get(tuple(tokens[-size:])) if len(tokens) > size else None
        if stop is not None:
            return size, stop
    return 0, 0


def continuation(tokens: Seq[int], ends: dict[int, dict[tuple[int, ...], int]], length: int) -> list[int]:
    """Return up to `length` tokens that followed the longest known gram that ends the text.

    A copy that runs into the end of the text goes on with its own beginning, so a loop is drafted whole.
    """
    _, stop = longest_match(tokens, ends)
    period = len(tokens) - stop
    return [tokens[stop + i % period] for i in range(length)] if stop else []
