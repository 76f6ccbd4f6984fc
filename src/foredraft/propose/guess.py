"""What a model or head that drafts does at a node: the request's own processors, and a draw from its law."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from foredraft import sampling
from foredraft.engine.sequence import Sequence


def is_processed(seq: Sequence) -> bool:
    """True if a request's logits depend on what stands before a node."""
    return seq.grammar is not None or sampling.needs_history(seq.params)


def at_nodes(seq: Sequence, logits: Tensor, paths: Seq[list[int]]) -> Tensor:
    """Apply the request's grammar and penalties to logits [nodes, vocab]; paths: the guesses up to each."""
    if not is_processed(seq):
        return logits
    if seq.grammar is not None:
        logits = sampling.forbid(logits, seq.grammar.allowed(paths))
    outputs = [seq.output + path for path in paths]
    return sampling.penalize(logits, seq.params, seq.tokens[: seq.prompt_len], outputs, frozenset())


def drawn(seq: Sequence, logits: Tensor, depth: int) -> tuple[Tensor, int]:
    """Return the law of processed logits [vocab] and a token drawn from it, `depth` guesses below the root.

    With `reproducible` it is drawn with the very noise that the target will use there.
    """
    law = sampling.to_laws(logits, seq.params)
    noise = seq.noise if seq.params.reproducible else seq.noise.fork("draft")
    return law, sampling.draw(law, noise, len(seq.tokens) + depth)
