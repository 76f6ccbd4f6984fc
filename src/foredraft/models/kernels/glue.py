"""Norms, activations and rotary angles of a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from foredraft.engine.kv import BLOCK
from foredraft.models.kernels.numbers import (
    F32,
    LOG2E,
    OPTIONS,
    STEADY,
    UINT,
    exp2,
    halves,
    ints,
    load,
    to_half,
)


@njit(fastmath=True, **OPTIONS)
def add_norm(x: Any, y: Any, weight: Any, out: Any, rows: Any, width: Any, eps: Any) -> None:
    """y += x, and out = y / rms(y) * weight; x, y, out: [rows, width], weight: [width]."""
    size, n = UINT(rows) * UINT(width), UINT(width)
    a, b, o = carray(halves(x), (size,)), carray(halves(y), (size,)), carray(halves(out), (size,))
    w = carray(halves(weight), (n,))
    for row in range(UINT(rows)):
        base, total = row * n, F32(0)
        for i in range(n):
            both = to_half(load(a[base + i]) + load(b[base + i]))
            b[base + i] = both
            total += load(both) * load(both)
        scale = F32(1) / np.sqrt(total / F32(width) + F32(eps))
        for i in range(n):
            o[base + i] = to_half(load(b[base + i]) * scale * load(w[i]))


@njit(fastmath=STEADY, **OPTIONS)
def swiglu(gate_up: Any, out: Any, rows: Any, width: Any) -> None:
    """out = silu(gate) * up; gate_up: [rows, 2 * width], the gate in the first half; out: [rows, width]."""
    n = UINT(width)
    both = carray(halves(gate_up), (UINT(rows) * n * UINT(2),))
    o = carray(halves(out), (UINT(rows) * n,))
    for row in range(UINT(rows)):
        base = row * n * UINT(2)
        for i in range(n):
            gate = load(both[base + i])
            silu = gate / (F32(1) + exp2(gate * F32(-LOG2E)))
            o[row * n + i] = to_half(silu * load(both[base + n + i]))


@njit(fastmath=STEADY, **OPTIONS)
def turn_and_write(
    qkv: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    rows: Any,
    queries: Any,
    kv: Any,
    dim: Any,
) -> None:
    """Turn queries and keys in place by their rotary angles, then write keys and values to the cache.

    qkv: [rows, queries + 2 * kv, dim]; cos, sin: [rows, dim], the first half of sin negated; slots: int64
    [rows]; keys: [blocks, kv, dim / 2, BLOCK, 2]; values: [blocks, kv, BLOCK / 2, dim, 2].
    """
    n, half, heads = UINT(dim), UINT(dim) // UINT(2), UINT(queries) + UINT(2) * UINT(kv)
    x = carray(halves(qkv), (UINT(rows) * heads * n,))
    c, s = carray(halves(cos), (UINT(rows) * n,)), carray(halves(sin), (UINT(rows) * n,))
    at = carray(ints(slots), (UINT(rows),))
    k, v = carray(halves(keys), (UINT(1) << UINT(40),)), carray(halves(values), (UINT(1) << UINT(40),))
    two, block = UINT(2), UINT(BLOCK)
    for row in range(UINT(rows)):
        angle = row * n
        for head in range(UINT(queries) + UINT(kv)):
            base = (row * heads + head) * n
            for i in range(half):
                low, high = load(x[base + i]), load(x[base + half + i])
                x[base + i] = to_half(low * load(c[angle + i]) + high * load(s[angle + i]))
                x[base + half + i] = to_half(
                    high * load(c[angle + half + i]) + low * load(s[angle + half + i])
                )
        source, slot = (row * heads + UINT(queries)) * n, UINT(at[row])
        place = slot % block
        for head in range(UINT(kv)):
            held = (slot // block * UINT(kv) + head) * block * n
            key_at, value_at = source + head * n, source + (UINT(kv) + head) * n
            for i in range(half):
                k[held + (i * block + place) * two] = x[key_at + two * i]
                k[held + (i * block + place) * two + UINT(1)] = x[key_at + two * i + UINT(1)]
            held += place // two * two * n + place % two
            for i in range(n):
                v[held + two * i] = x[value_at + i]
