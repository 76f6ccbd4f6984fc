"""What a model or head that drafts does at a node: the request's own processors, and a draw from its law."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft import sampling
from foredraft.engine.sequence import Sequence
from foredraft.models import kernels
from foredraft.noise import exponentials
from foredraft.types import Draw, SamplingParams

_WHOLE, _TRUNCATED = 0.75, 0.55  # measured: docs/drafting.md


def is_processed(seq: Sequence) -> bool:
    """True if a request's logits depend on what stands before a node."""
    return seq.grammar is not None or sampling.needs_history(seq.params, len(seq.tokens) - seq.prompt_len)


def at_nodes(seq: Sequence, logits: Tensor, paths: Seq[list[int]]) -> Tensor:
    """Apply the request's grammar and penalties to logits [nodes, vocab]; paths: the guesses up to each."""
    if not is_processed(seq):
        return logits
    if seq.grammar is not None:
        logits = sampling.forbid(logits, seq.grammar.allowed(paths))
    outputs = [seq.output + path for path in paths]
    return sampling.penalize(logits, seq.params, seq.tokens[: seq.prompt_len], outputs, frozenset())


def is_stuck(seq: Sequence, logits: Tensor) -> bool:
    """True if nothing may follow by processed logits: a grammar asks for what this draft cannot say."""
    return is_processed(seq) and not bool((logits > -torch.inf).any())


def luck(params: SamplingParams) -> float:
    """Return how much the noise of a draw counts beside a draft's logits; 0 for greedy requests.

    The target takes the token with the largest logit plus the temperature times Gumbel noise. Less than that
    finds it more often, since a draft's logits are not the target's, and with top-k, top-p or min-p, which
    tokens that only luck brings forward do not survive, less again.
    """
    truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return params.temperature * (_TRUNCATED if truncated else _WHOLE)


def draw_of(params: SamplingParams) -> Draw:
    """Return how siblings that `foreseen` ranked were chosen."""
    return "fixed" if params.greedy else "coupled"


def future(seq: Sequence, at: Iterable[int]) -> list[int]:
    """Return the keys of the noise with which the target will draw; at: how many guesses after the root."""
    return [seq.noise.key(len(seq.tokens) + depth) for depth in at]


def foreseen(seq: Sequence, logits: Tensor, at: Iterable[int], token_ids: Tensor) -> Tensor:
    """Return what is largest, and by how much, where the target will likely draw; [rows, tokens].

    logits: [rows, tokens] under the request's processors; token_ids: int64 [tokens], which of the target's
    they are; at: of each row, or of all, how many guesses stand between it and the root. With the noise that
    the target will draw with (the coupling of arXiv 2408.07978, here for as many guesses as a tree has) a
    sampled request is drafted as a greedy one is.
    """
    if seq.params.greedy:
        return logits
    keys = future(seq, at)
    if logits.device.type == "cpu":
        noise = torch.empty(len(keys), len(token_ids))
        for row, key in zip(noise.numpy(), keys, strict=True):
            kernels.gumbels(key, token_ids.numpy(), row)
    else:
        noise = -exponentials(torch.tensor(keys, device=logits.device)[:, None], token_ids).log().float()
    return logits + luck(seq.params) * noise


def drawn(seq: Sequence, logits: Tensor, depth: int) -> tuple[Tensor, int]:
    """Return the law of processed logits [vocab] and a token drawn from it, `depth` guesses below the root.

    With `reproducible` it is drawn with the very noise that the target will use there.
    """
    law = sampling.to_laws(logits, seq.params)
    noise = seq.noise if seq.params.reproducible else seq.noise.fork("draft")
    return law, sampling.draw(law, noise, len(seq.tokens) + depth)
