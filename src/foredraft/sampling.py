"""Logits to law, and law to token. The only place that knows the order of the processors.

Penalties and min_tokens (history dependent), logit bias, temperature, top-k, top-p, min-p: the order and the
meaning of Hugging Face's processors, so that the same settings give the same law. All noise is keyed by
(seed, stream, purpose, position, sibling): no state, so nothing depends on what else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.types import SamplingParams, TokenLogprob

_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment and its two multipliers
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ACCEPT, _DRAW = 1, 2  # purposes: what decides acceptance never decides which token is drawn
_CHUNK = 64


def _signed(word: int) -> int:
    """Read 64 bits as the int64 that torch computes with."""
    return word - 2**64 if word >= 2**63 else word


def _mix(word: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    word = ((word ^ (word >> 30)) * _MULTIPLIERS[0]) & _WORD
    word = ((word ^ (word >> 27)) * _MULTIPLIERS[1]) & _WORD
    return word ^ (word >> 31)


def _absorb(key: int, value: int) -> int:
    return _mix((((key ^ value) & _WORD) + _STEP) & _WORD)


def _mix_tensor(words: Tensor) -> Tensor:
    """`_mix` of every element, in place. int64 arithmetic wraps; its right shift must be made logical."""
    for shift, factor in zip((30, 27), _MULTIPLIERS, strict=True):
        words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        words *= _signed(factor)
    words ^= (words >> 31).bitwise_and_(2**33 - 1)
    return words


@lru_cache(maxsize=8)
def _offsets(vocab: int, device: torch.device) -> Tensor:
    """What a key is advanced by for each token; int64 [vocab], never written to."""
    return torch.arange(1, vocab + 1, device=device) * _signed(_STEP)


def exponentials(keys: Tensor | int, offsets: Tensor) -> Tensor:
    """Return unit exponentials, float64 of the broadcast shape of keys and offsets (both int64).

    The uniform below the logarithm is an odd multiple of 2**-53: never 0 or 1, symmetric, and fine enough
    that the tails of a race over a whole vocabulary are right.
    """
    words = _mix_tensor(offsets + keys)
    words >>= 11
    words |= 1
    return words.to(torch.float64).mul_(2.0**-53).add_(0.5).log_().neg_()


def exponential_rows(keys: Tensor, vocab: int) -> Tensor:
    """Return `Noise.exponential` for many keys at once: int64 [...] gives float64 [..., vocab]."""
    return exponentials(keys.unsqueeze(-1), _offsets(vocab, keys.device))


class Noise:
    """Random numbers as a pure function of (seed, stream, purpose, pos, sibling, token).

    Acceptance reads `uniform`, the target's own draws read `exponential`, and drafts are drawn from
    `fork("draft")`: three sets that share no number. `pos` is the position in the text of the token decided.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int) -> None:
        self._key = _absorb(0, seed)

    def fork(self, stream: str) -> Noise:
        """Return an independent source, named by `stream`."""
        child = Noise(0)
        digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
        child._key = _absorb(self._key, int.from_bytes(digest, "little"))
        return child

    def _keyed(self, purpose: int, pos: int, sibling: int) -> int:
        return _absorb(_absorb(_absorb(self._key, purpose), pos), sibling)

    def uniform(self, pos: int, sibling: int = 0) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        return (self._keyed(_ACCEPT, pos, sibling) >> 11) * 2.0**-53

    def draw_key(self, pos: int, sibling: int = 0) -> int:
        """Return the key of `exponential(pos, ...)` for `exponential_rows`."""
        return _signed(self._keyed(_DRAW, pos, sibling))

    def exponential(self, pos: int, vocab: int, sibling: int = 0) -> Tensor:
        """Return one unit exponential a token, float64 [vocab], on the CPU."""
        return exponentials(self.draw_key(pos, sibling), _offsets(vocab, torch.device("cpu")))

    def exponential_at(self, pos: int, tokens: Tensor, sibling: int = 0) -> Tensor:
        """Return `exponential(pos, vocab, sibling)[tokens]`, computing no others; on the tokens' device."""
        return exponentials(self.draw_key(pos, sibling), (tokens + 1) * _signed(_STEP))


def needs_history(params: SamplingParams) -> bool:
    """True when the law depends on more of the text than the logits show."""
    return params.repetition_penalty != 1 or _counts_output(params) or params.min_tokens > 0


def _counts_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def penalize(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    outputs: Sequence[Sequence[int]],
    eos_ids: Collection[int],
) -> Tensor:
    """Apply penalties and min_tokens to logits [rows, vocab]; outputs[row] is what was emitted before it.

    Repetition penalty: tokens of prompt and output, once each (CTRL, arXiv 1909.05858, section 4.1). Presence
    and frequency: tokens of the output. min_tokens bans whatever would end the answer too early. Returns a
    float32 copy, or the very same tensor when no row needs a change.
    """
    short = [row for row, output in enumerate(outputs) if len(output) < params.min_tokens]
    if params.repetition_penalty == 1 and not _counts_output(params) and not short:
        return logits
    logits = logits.to(torch.float32, copy=True)
    device, vocab = logits.device, logits.shape[-1]
    rows = torch.tensor([row for row, output in enumerate(outputs) for _ in output], device=device).long()
    tokens = torch.tensor([token for output in outputs for token in output], device=device).long()
    if params.repetition_penalty != 1:
        prompt = torch.tensor(prompt_ids, device=device).long()
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        seen[:, prompt[prompt < vocab]] = True  # a tokenizer may know ids that the head does not
        seen[rows, tokens] = True
        scaled = torch.where(
            logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty
        )
        logits = torch.where(seen, scaled, logits)
    if _counts_output(params):
        counts = torch.zeros_like(logits)
        counts.index_put_((rows, tokens), counts.new_ones(()), accumulate=True)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if short:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        banned = torch.tensor([token for token in ends if token < vocab], device=device).long()
        logits[torch.tensor(short, device=device)[:, None], banned] = -torch.inf
    return logits


def add_bias(logits: Tensor, params: SamplingParams) -> Tensor:
    """Add the logit bias to logits [..., vocab]: float32, or the very same tensor when there is none.

    Raises ConfigError when the bias names a token that the model does not have.
    """
    if not params.logit_bias:
        return logits
    vocab = logits.shape[-1]
    if (largest := max(params.logit_bias)) >= vocab:
        raise ConfigError(f"logit_bias names token {largest}, but the model's vocabulary has {vocab} tokens")
    logits = logits.to(torch.float32, copy=True)
    tokens = torch.tensor(list(params.logit_bias), device=logits.device)
    logits[..., tokens] += logits.new_tensor(list(params.logit_bias.values()))
    return logits


def to_laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """Turn (penalized) logits [..., vocab] into laws, float32 [..., vocab], rows that sum to 1.

    Logit bias, temperature, top-k, top-p, min-p, with Hugging Face's rules for ties: top-k keeps all that tie
    with the k-th, top-p keeps of the tied tokens at its edge those with the largest ids. Temperature 0 puts
    all mass on the argmax.
    """
    logits = add_bias(logits, params).float()
    if params.greedy:
        return F.one_hot(argmax(logits), logits.shape[-1]).float()
    if params.temperature != 1:
        # Below 1e-30 every law is the same, and a quotient could overflow.
        logits = logits / max(params.temperature, 1e-30)
    vocab = logits.shape[-1]
    if (params.top_k == 0 or params.top_k >= vocab) and params.top_p == 1 and params.min_p == 0:
        return torch.softmax(logits, dim=-1)
    width = max(_CHUNK, params.top_k * 5 // 4)
    return _truncated(logits.reshape(-1, vocab), params, width).view(logits.shape)


def _truncated(logits: Tensor, params: SamplingParams, width: int) -> Tensor:
    """Return the laws of logits [rows, vocab] after top-k, top-p and min-p, sorting `width` tokens a row.

    What is kept is a prefix of the sorted row. It is known for good once the last token looked at is less
    likely than the last one kept; rows where it is not are done again with more tokens.
    """
    vocab = logits.shape[-1]
    width = min(width, vocab)
    values, tokens = _top(logits, width)
    kept = values > -torch.inf
    weights = (values - values[:, :1]).double().exp_()  # relative to the most likely token
    if 0 < params.top_k < vocab:
        kept &= values >= values[:, params.top_k - 1, None]
        probs = weights * kept
        probs /= probs.sum(-1, keepdim=True)
    elif params.top_p < 1:
        probs = torch.softmax(logits, dim=-1).gather(1, tokens).double()
    if params.top_p < 1:
        kept &= probs.cumsum(-1) - probs < params.top_p  # the mass before each token
    if params.min_p > 0:
        kept &= weights >= params.min_p
    weights *= kept
    weights /= weights.sum(-1, keepdim=True)
    laws = torch.zeros_like(logits).scatter_(1, tokens, weights.float())
    if width < vocab:
        open_ended = values.masked_fill(~kept, torch.inf).amin(-1) <= values[:, -1]
        if bool(open_ended.any()):
            laws[open_ended] = _truncated(logits[open_ended], params, width * 8)
    return laws


def _top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row and their tokens, both [rows, width], best first, then by token.

    The width largest tokens lie in the width chunks with the largest maxima, and those are found in one quick
    pass. Which of the tokens that tie with the last one are returned is left open.
    """
    vocab = logits.shape[-1]
    if 2 * _CHUNK * width < vocab:
        chunks = _chunks(logits)
        best = chunks.amax(-1).topk(width).indices
        near = chunks.gather(1, best.unsqueeze(-1).expand(-1, -1, _CHUNK)).flatten(1)
        places = near.topk(width).indices
        tokens = best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
    else:
        tokens = logits.topk(width).indices
    tokens = tokens.sort(descending=True).values
    values, order = logits.gather(1, tokens).sort(descending=True, stable=True)
    return values, tokens.gather(1, order)


def _chunks(values: Tensor, fill: float = -torch.inf) -> Tensor:
    """View [..., vocab] as [..., chunks, 64]; a vocabulary that does not divide is filled up."""
    missing = -values.shape[-1] % _CHUNK
    padded = F.pad(values, (0, missing), value=fill) if missing else values
    return padded.reshape(*values.shape[:-1], -1, _CHUNK)


def argmax(logits: Tensor) -> Tensor:
    """Return the first most likely token of each row, int64 [...]; far faster than torch on a CPU."""
    chunks = _chunks(logits)
    best = chunks.amax(-1).argmax(-1)
    index = best[..., None, None].expand(*best.shape, 1, _CHUNK)
    return best * _CHUNK + chunks.gather(-2, index).squeeze(-2).argmax(-1)


def draw(law: Tensor, noise: Noise, pos: int, sibling: int = 0) -> int:
    """Draw one token from a law [vocab]: the first to arrive when token t arrives at rate law[t].

    The winner has exactly that law (the Gumbel-max trick without its second logarithm). Two laws raced with
    the same noise give the same token about as often as they allow (arXiv 2408.07978).
    """
    times, tokens = _race(law, noise, pos, sibling)
    return int(tokens[times.argmin()])


def draw_siblings(
    law: Tensor, noise: Noise, pos: int, count: int, draw_as: Literal["iid", "distinct"]
) -> list[int]:
    """Draw `count` tokens from a law [vocab] to continue one node, in draw order.

    "iid": independently, sibling i with its own noise. "distinct": without replacement, the first to arrive
    in one race (Gumbel top-k, arXiv 1903.06059); fewer than `count` when the law has fewer tokens.
    """
    if draw_as == "iid":
        return [draw(law, noise, pos, sibling) for sibling in range(count)]
    times, tokens = _race(law, noise, pos, 0)
    first = times.topk(min(count, len(times)), largest=False)
    arrived: list[int] = tokens[first.indices[first.values.isfinite()]].tolist()
    return arrived


def _race(law: Tensor, noise: Noise, pos: int, sibling: int) -> tuple[Tensor, Tensor]:
    """Return arrival times (float64) and their tokens, [n] both; where there is no mass the time is inf.

    Only chunks of the vocabulary that hold some mass run: after top-k few do.
    """
    chunks = _chunks(law, fill=0.0)
    live = chunks.amax(-1).nonzero()
    tokens = (live * _CHUNK + torch.arange(_CHUNK, device=law.device)).flatten()
    return noise.exponential_at(pos, tokens, sibling) / chunks[live.squeeze(1)].flatten(), tokens


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of `token` and of the `top` most likely ones, from raw logits [vocab]."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    values, tokens = _top(logs.unsqueeze(0), min(top, len(logs)))
    best = zip(tokens[0].tolist(), values[0].tolist(), strict=True)
    return TokenLogprob(token, float(logs[token]), tuple(best))
