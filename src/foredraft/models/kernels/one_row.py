"""What is done to one row, in bfloat16, by address: norm, sum, copy, rotary angles and the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from foredraft.engine.pool import BLOCK
from foredraft.models.kernels.numbers import F32, OPTIONS, STEADY, UINT, floats, halves, load, to_half

_FAR = UINT(1) << UINT(40)


@njit(fastmath=True, **OPTIONS)
def normed_row(x: Any, weight: Any, width: Any, eps: Any, out: Any) -> None:
    """One row of bfloat16 [width] under a norm of float32 weights, by address; out may be x."""
    a, w, o = carray(halves(x), (width,)), carray(floats(weight), (width,)), carray(halves(out), (width,))
    total = F32(0)
    for i in range(width):
        total += load(a[i]) * load(a[i])
    scale = F32(1) / np.sqrt(total / F32(width) + F32(eps))
    for i in range(width):
        o[i] = to_half(load(a[i]) * scale * w[i])


@njit(fastmath=STEADY, **OPTIONS)
def grown(x: Any, more: Any, width: Any) -> None:
    """x += more, bfloat16 [width], by address."""
    a, b = carray(halves(x), (width,)), carray(halves(more), (width,))
    for i in range(width):
        a[i] = to_half(load(a[i]) + load(b[i]))


@njit(**OPTIONS)
def copied(source: Any, target: Any, width: Any) -> None:
    a, b = carray(halves(source), (width,)), carray(halves(target), (width,))
    for i in range(width):
        b[i] = a[i]


@njit(fastmath=STEADY, **OPTIONS)
def widened(x: Any, width: Any, out: Any) -> None:
    """out = x in float32, so many numbers, by address."""
    a, o = carray(halves(x), (width,)), carray(floats(out), (width,))
    for i in range(width):
        o[i] = load(a[i])


@njit(fastmath=STEADY, **OPTIONS)
def turn_and_write(
    qkv: Any, cos: Any, sin: Any, slot: Any, keys: Any, values: Any, queries: Any, kv: Any, dim: Any
) -> None:
    """Turn queries and keys in place by their rotary angles, then write keys and values to a slot.

    qkv: [queries + 2 * kv, dim]; cos, sin: [dim], the first half of sin negated; keys: [blocks, kv, dim / 2,
    BLOCK, 2]; values: [blocks, kv, BLOCK / 2, dim, 2].
    """
    half, two, block = dim // UINT(2), UINT(2), UINT(BLOCK)
    x = carray(halves(qkv), ((queries + two * kv) * dim,))
    c, s = carray(halves(cos), (dim,)), carray(halves(sin), (dim,))
    k, v = carray(halves(keys), (_FAR,)), carray(halves(values), (_FAR,))
    for head in range(queries + kv):
        base = head * dim
        for i in range(half):
            low, high = load(x[base + i]), load(x[base + half + i])
            x[base + i] = to_half(low * load(c[i]) + high * load(s[i]))
            x[base + half + i] = to_half(high * load(c[half + i]) + low * load(s[half + i]))
    place = slot % block
    for head in range(kv):
        held = (slot // block * kv + head) * block * dim
        key_at, value_at = (queries + head) * dim, (queries + kv + head) * dim
        for i in range(half):
            k[held + (i * block + place) * two] = x[key_at + two * i]
            k[held + (i * block + place) * two + UINT(1)] = x[key_at + two * i + UINT(1)]
        held += place // two * two * dim + place % two
        for i in range(dim):
            v[held + two * i] = x[value_at + i]
