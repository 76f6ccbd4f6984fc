"""Random numbers as a pure function of what they decide: no state, so nothing depends on what else runs."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # splitmix64's increment and its two multipliers
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ACCEPT, _DRAW = 1, 2  # purposes: what decides acceptance never decides which token is drawn


def _signed(word: int) -> int:
    """Read 64 bits as the int64 that torch computes with."""
    return word - 2**64 if word >= 2**63 else word


def _mix(word: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & _WORD
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & _WORD
    return word ^ (word >> 31)


def _absorb(key: int, value: int) -> int:
    return _mix((((key ^ value) & _WORD) + STEP) & _WORD)


def _mix_tensor(words: Tensor) -> Tensor:
    """`_mix` of every element, in place. int64 arithmetic wraps; its right shift must be made logical."""
    for shift, factor in zip((30, 27), MULTIPLIERS, strict=True):
        words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        words *= _signed(factor)
    words ^= (words >> 31).bitwise_and_(2**33 - 1)
    return words


def exponentials(keys: Tensor | int, tokens: Tensor) -> Tensor:
    """Return `Noise.exponential_at` for many keys: both int64, float64 of their broadcast shape.

    The uniform below the logarithm is an odd multiple of 2**-53: never 0 or 1, symmetric, and fine enough
    that the tails of a race over a whole vocabulary are right.
    """
    words = _mix_tensor((tokens + 1) * _signed(STEP) + keys)
    words >>= 11
    words |= 1
    return words.to(torch.float64).mul_(2.0**-53).add_(0.5).log_().neg_()


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

    def key(self, pos: int, sibling: int = 0) -> int:
        """Return what `exponentials` needs to know of seed, stream, position and sibling; an int64."""
        return _signed(self._keyed(_DRAW, pos, sibling))

    def exponential(self, pos: int, vocab: int, sibling: int = 0) -> Tensor:
        """Return one unit exponential a token, float64 [vocab], on the CPU."""
        return exponentials(self.key(pos, sibling), torch.arange(vocab))

    def exponential_at(self, pos: int, tokens: Tensor, sibling: int = 0) -> Tensor:
        """Return `exponential(pos, vocab, sibling)[tokens]`, computing no others; on the tokens' device."""
        return exponentials(self.key(pos, sibling), tokens)
