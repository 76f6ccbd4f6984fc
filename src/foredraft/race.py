"""A race of all tokens of a vocabulary, on a CPU: who arrives first by the exponentials of noise.py, found
without looking at most of them closely.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foredraft.jit import OPTIONS, njit, types
from foredraft.noise import MULTIPLIERS, STEP

_STEP, _FIRST, _SECOND = (np.uint64(word) for word in (STEP, *MULTIPLIERS))
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31))
_BLOCK = 128  # tokens that are looked at together, roughly, before any is looked at closely
_NEAR = np.float32(2.0**-20)  # more than the rough look is wrong by
F32: Any = np.float32
_LAWS = [types.Array(kind, 1, "C", readonly=True) for kind in (types.float32, types.float64)]
_SIGNATURES = [types.int64(law, types.int64, types.int64) for law in _LAWS]


@njit(inline="always")
def word(key: Any, token: Any) -> Any:
    """The 64 bits of a token; see noise.exponentials."""
    word = np.uint64(key) + np.uint64(token + 1) * _STEP
    word = (word ^ (word >> _SHIFTS[0])) * _FIRST
    word = (word ^ (word >> _SHIFTS[1])) * _SECOND
    return word ^ (word >> _SHIFTS[2])


@njit(inline="always")
def _exponential(key: Any, token: Any) -> Any:
    bits = (np.int64(word(key, token)) >> np.int64(11)) | np.int64(1)
    return -np.log(bits * 2.0**-53 + 0.5)


@njit(inline="always")
def _missing(key: Any, token: Any) -> Any:
    """1 - the token's uniform, float32 within 2**-24: the exponential is at least that."""
    top = np.int32(word(key, token) >> np.uint64(32))
    return F32(0.5) - F32(top) * F32(2.0**-32)


@njit(**OPTIONS)
def _in_time(part: Any, key: Any, begin: Any, time: Any) -> Any:
    """How many tokens of part, the law from `begin` on, may arrive before `time`."""
    count = np.int32(0)
    for place in range(len(part)):
        count += np.int32(_missing(key, begin + place) <= F32(part[place]) * time + _NEAR)
    return count


@njit(_SIGNATURES, **OPTIONS)
def first_to_arrive(law: Any, key: Any, likeliest: Any) -> Any:
    """Return the token of a law [vocab] whose exponential over its probability is least, the first of equals.

    -log(u) is at least 1 - u, so only tokens for which that is early enough need a logarithm.
    """
    winner = likeliest
    best = _exponential(key, winner) / law[winner]
    for begin in range(0, len(law), _BLOCK):
        part = law[begin : begin + _BLOCK]
        if _in_time(part, key, begin, F32(best)) == 0:
            continue
        for place in range(len(part)):
            if part[place] > 0 and _missing(key, begin + place) <= F32(part[place]) * F32(best) + _NEAR:
                time = _exponential(key, begin + place) / part[place]
                if time < best or (time == best and begin + place < winner):
                    winner, best = begin + place, time
    return winner
