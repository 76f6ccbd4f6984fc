"""Logits to law, and law to token. The only place that knows the order of the processors.

Penalties and min_tokens (history dependent), logit bias, temperature, top-k, top-p, min-p: the order and the
meaning of Hugging Face's processors, so that the same settings give the same law.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.noise import Noise as Noise
from foredraft.noise import exponentials
from foredraft.race import first_to_arrive
from foredraft.types import SamplingParams, TokenLogprob

_CHUNK = 64  # tokens that are looked at together before any of them is looked at alone


def needs_history(params: SamplingParams, emitted: int) -> bool:
    """True when the law behind so many tokens depends on more of the text than the logits show."""
    return params.repetition_penalty != 1 or _counts_output(params) or emitted < params.min_tokens


def _counts_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def widen(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return logits [rows, vocab_size] of which only those of token_ids, [rows, tokens], are possible."""
    full = logits.new_full((len(logits), vocab_size), -torch.inf)
    return full.index_copy_(1, token_ids, logits)


def forbid(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits [rows, vocab] in float32 with what is not `allowed` (bool, the same shape) ruled out."""
    return logits.float().masked_fill(~allowed.to(logits.device), -torch.inf)


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
    vocab = logits.shape[-1]
    if params.repetition_penalty != 1:
        # A tokenizer may know ids that the head does not.
        prompt = [token for token in prompt_ids if token < vocab]
        tokens, counts = _counted(prompt, outputs, logits.device)
        old = logits[:, tokens]
        less = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
        logits[:, tokens] = torch.where(counts > 0, less, old)
    if _counts_output(params):
        tokens, counts = _counted([], outputs, logits.device)
        less = params.frequency_penalty * counts + params.presence_penalty
        logits[:, tokens] -= torch.where(counts > 0, less, 0.0)
    if short:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        ids = partial(torch.tensor, dtype=torch.int64, device=logits.device)
        logits[ids(short)[:, None], ids([token for token in ends if token < vocab])] = -torch.inf
    return logits


def _counted(
    before: Sequence[int], outputs: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tokens of all texts, int64 [tokens], and how often each text has each, float32 [outputs,
    tokens]. A text is `before` and an output; what the outputs begin with alike is counted once for all.
    """
    length = min(map(len, outputs))
    first = list(outputs[0][:length])
    if any(list(output[:length]) != first for output in outputs):
        first = []
    rest = [output[len(first) :] for output in outputs]
    shared = [*before, *first]
    tokens, places = np.unique(np.array([*shared, *chain(*rest)], dtype=np.int64), return_inverse=True)
    counts = np.zeros((len(outputs), len(tokens)), dtype=np.float32)
    counts += np.bincount(places[: len(shared)], minlength=len(tokens))
    rows = np.repeat(np.arange(len(outputs)), [len(tail) for tail in rest])
    np.add.at(counts, (rows, places[len(shared) :]), 1)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(counts).to(device)


def add_bias(logits: Tensor, params: SamplingParams) -> Tensor:
    """Add the logit bias to logits [..., vocab]: float32, or the very same tensor when there is none.

    Raises ConfigError when the bias names a token that the model does not have.
    """
    if not params.logit_bias:
        return logits
    return (logits + params.bias_row(logits.shape[-1], logits.device)).float()


def to_laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """Turn (penalized) logits [..., vocab] into laws, float32 [..., vocab], rows that sum to 1.

    Logit bias, temperature, top-k, top-p, min-p, with Hugging Face's rules: top-k keeps all that tie with the
    k-th; top-p keeps no more of the ties at its edge than it needs, here those with the largest ids.
    Temperature 0 puts all mass on the argmax.
    """
    logits = add_bias(logits, params).float()
    vocab = logits.shape[-1]
    if not logits.numel():
        return logits
    if params.greedy:
        return torch.zeros_like(logits).scatter_(-1, argmax(logits).unsqueeze(-1), 1.0)
    if params.temperature != 1:
        # Below 1e-30 every law is the same, and a quotient could overflow.
        logits = logits / max(params.temperature, 1e-30)
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return torch.softmax(logits, dim=-1)
    return _truncated(logits.reshape(-1, vocab), params).view(logits.shape)


def _truncated(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the laws of logits [rows, vocab] after top-k, top-p and min-p.

    Sorts candidates only: all that reach a bound which no kept token is below, far fewer than the vocabulary.
    """
    vocab = logits.shape[-1]
    best = logits.amax(-1, keepdim=True)
    top_k = params.top_k if params.top_k < vocab else 0
    bound, mass = torch.full_like(best, torch.finfo(torch.float32).min), torch.ones_like(best)
    slack = 1e-3 + 1e-6 * best.abs()  # in nats, far above the rounding of a bound
    if top_k:
        bound = _kth_bound(logits, top_k).clamp(min=bound)
    elif params.top_p < 1:
        probs = torch.softmax(logits, dim=-1)
        mass = 1 / probs.amax(-1, keepdim=True)
        bound = best + torch.log(_nucleus_bound(probs, params.top_p) * mass) - slack
    if params.min_p > 0 and not top_k:
        bound = bound.clamp(min=best + math.log(params.min_p) - slack)
    flat, counts = _candidates(logits, bound)
    row = torch.arange(len(logits), device=flat.device).repeat_interleave(counts)
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[row]
    # One column at least: a row in which nothing is possible has no candidate, and no mass either.
    values = logits.new_full((len(logits), max(1, int(counts.max()))), -torch.inf)
    values[row, place] = logits.flatten()[flat]
    weights = (values - best).double().exp_() * _kept(values, best, mass, top_k, params)
    weights /= weights.sum(-1, keepdim=True)
    return torch.zeros_like(logits).put_(flat, weights[row, place].float())


def _kth_bound(logits: Tensor, k: int) -> Tensor:
    """Return a value that at least k logits of each row reach, [rows, 1]: the k-th largest chunk maximum."""
    maxima = _chunks(logits).amax(-1)
    return (maxima if k <= maxima.shape[-1] else logits).topk(k).values[:, -1:]


def _nucleus_bound(probs: Tensor, top_p: float) -> Tensor:
    """Return probabilities [rows, 1] that only tokens outside the top-p nucleus are below.

    Tokens less likely than (1 - top_p) / vocab are outside, as even all of them have less than 1 - top_p
    together. Bisection raises that while the excess over the bound, which is less than the mass above it,
    still makes a nucleus.
    """
    low = torch.full_like(probs[:, :1], (1 - top_p) / probs.shape[-1])
    high = probs.amax(-1, keepdim=True)
    excess = torch.empty_like(probs)
    for _ in range(5):
        middle = (low * high).sqrt()
        enough = torch.sub(probs, middle, out=excess).relu_().sum(-1, keepdim=True) > top_p + 1e-5
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def _candidates(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return where logits [rows, vocab] reach bound [rows, 1]: flat indices [n], and how many a row [rows].

    On a CPU numpy compares and searches several times as fast as torch.
    """
    if logits.device.type != "cpu":
        reached = logits >= bound
        return reached.flatten().nonzero().squeeze(1), reached.sum(-1)
    mask = logits.numpy() >= bound.numpy()
    return torch.from_numpy(np.flatnonzero(mask)), torch.from_numpy(np.count_nonzero(mask, axis=-1))


def _kept(values: Tensor, best: Tensor, mass: Tensor, top_k: int, params: SamplingParams) -> Tensor:
    """Return which candidates survive, bool [rows, width]. values: [rows, width], filled up with -inf.

    mass: of the whole row relative to its best token, [rows, 1], unless top_k decides it. Each cut keeps a
    suffix of the ascending row, so all follows from the last value kept and how many of its ties are.
    """
    ranked = _sorted(values)
    weights = (ranked - best).double().exp_()
    kept = ranked > -torch.inf
    if top_k:
        kept &= ranked >= ranked[:, -min(top_k, ranked.shape[-1]), None]
        mass = (weights * kept).sum(-1, keepdim=True)
    if params.top_p < 1:
        better = weights.flip(-1).cumsum(-1).flip(-1) - weights  # mass of the tokens ranked above
        kept &= better < params.top_p * mass.double()  # in float32 a tiny top_p would keep nothing
    if params.min_p > 0:
        kept &= weights >= params.min_p
    width = ranked.shape[-1]
    edge = ranked.gather(1, (width - kept.sum(-1, keepdim=True)).clamp_(max=width - 1))
    ties = (kept & (ranked == edge)).sum(-1, keepdim=True)
    at_edge = values == edge
    return (values > edge) | (at_edge & (at_edge.flip(-1).cumsum(-1).flip(-1) <= ties))


def _sorted(values: Tensor) -> Tensor:
    """Sort each row, ascending; on a CPU several times as fast as torch, which sorts indices along."""
    if values.device.type != "cpu":
        return values.sort().values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def _chunks(values: Tensor) -> Tensor:
    """View [..., vocab] as [..., chunks, 64]; a vocabulary that does not divide is filled up."""
    missing = -values.shape[-1] % _CHUNK
    padded = F.pad(values, (0, missing), value=-torch.inf) if missing else values
    return padded.reshape(*values.shape[:-1], -1, _CHUNK)


def argmax(logits: Tensor) -> Tensor:
    """Return the first most likely token of each row, int64 [...]; far faster than torch on a CPU."""
    if logits.device.type == "cpu" and logits.dtype == torch.bfloat16:
        # Of numbers above zero the largest has the largest bits.
        bits = logits.view(torch.int16).numpy().reshape(-1, logits.shape[-1])
        found = bits.argmax(-1)
        if (bits[np.arange(len(found)), found] > 0).all():
            return torch.from_numpy(found).view(logits.shape[:-1])
    chunks = _chunks(logits)
    best = chunks.amax(-1).argmax(-1)
    index = best[..., None, None].expand(*best.shape, 1, _CHUNK)
    return best * _CHUNK + chunks.gather(-2, index).squeeze(-2).argmax(-1)


def draw(law: Tensor, noise: Noise, pos: int, sibling: int = 0) -> int:
    """Draw one token from a law [vocab] with the noise of `pos`, as `draw_rows` does; far faster on a CPU."""
    if type(noise) is not Noise:  # a caller's own, which need not be keyed as ours is
        return int((noise.exponential(pos, len(law)).to(law.device) / law).argmin())
    key = noise.key(pos, sibling)
    if law.device.type != "cpu":
        return int(draw_rows(law.unsqueeze(0), torch.tensor([key], device=law.device)))
    chances = np.ascontiguousarray((law if law.dtype == torch.float64 else law.float()).numpy())
    return int(first_to_arrive(chances, key, int(chances.argmax())))


def draw_rows(laws: Tensor, keys: Tensor) -> Tensor:
    """Draw a token from each law [rows, vocab] with the noise of its key (int64 [rows]); int64 [rows].

    A race: of several arrivals at given rates each comes first with probability proportional to its rate, so
    the winner has exactly the law (the Gumbel-max trick without its second logarithm). Two laws raced with
    the same noise agree about as often as any coupling lets them (arXiv 2408.07978).
    """
    tokens = torch.arange(laws.shape[-1], device=laws.device)
    return (exponentials(keys.unsqueeze(-1), tokens) / laws).argmin(-1)


def draw_siblings(
    law: Tensor, noise: Noise, pos: int, count: int, draw_as: Literal["iid", "distinct"]
) -> list[int]:
    """Draw `count` tokens from a law [vocab] to continue one node, in draw order.

    "iid": independently, sibling i with its own noise. "distinct": without replacement, the first to arrive
    in one race of all tokens (Gumbel top-k, arXiv 1903.06059); fewer when the law has fewer tokens.
    """
    if draw_as == "iid":
        return [draw(law, noise, pos, sibling) for sibling in range(count)]
    tokens = law.nonzero().squeeze(1)
    times = noise.exponential_at(pos, tokens) / law[tokens]
    first: list[int] = tokens[times.topk(min(count, len(tokens)), largest=False).indices].tolist()
    return first


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of `token` and of the `top` most likely ones, from raw logits [vocab]."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    best = logs.topk(min(top, len(logs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logs[token]), tuple(pairs))
