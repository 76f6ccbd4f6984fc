"""Two ways to draft in one: look up what the text repeats, and elsewhere let a head or model guess."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from foredraft.engine.protocols import Proposer, Sourced
from foredraft.engine.sequence import Sequence
from foredraft.propose.ngram import LOOKUP, NgramProposer
from foredraft.propose.suffix import SuffixProposer
from foredraft.types import Draft, Needs, Source, Verdict


class EitherProposer:
    """Drafts by lookup or by another proposer, for each sequence and step as seq.source says.

    source: how the other one drafts. It is told of every step, so that it can go on at any.
    """

    def __init__(self, lookup: NgramProposer | SuffixProposer, other: Proposer, source: Source) -> None:
        assert source.method != LOOKUP
        assert not isinstance(other, Sourced)
        self.lookup, self.other, self.source = lookup, other, source

    @property
    def needs(self) -> Needs:
        """What the other proposer wants; a lookup's guesses are verified as what they are, not drawn."""
        return self.other.needs

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        """Return the lookup first, if the text repeats itself."""
        return (*self.lookup.sources(seq), self.source)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one draft a sequence."""
        looked_up = [seq.source is not None and seq.source.method == LOOKUP for seq in seqs]
        rows = list(zip(budgets, looked_up, strict=True))
        found = self.lookup.propose(seqs, [budget if here else 0 for budget, here in rows])
        guessed = self.other.propose(seqs, [0 if here else budget for budget, here in rows])
        drafts = zip(found, guessed, looked_up, strict=True)
        return [one if here else other for one, other, here in drafts]

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Tell the other proposer; a lookup learns nothing but the text."""
        self.other.observe(seqs, verdicts, hidden)

    def forget(self, request_id: str) -> None:
        """Drop what both keep for a request."""
        self.lookup.forget(request_id)
        self.other.forget(request_id)
