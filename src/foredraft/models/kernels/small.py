"""A drafting head's pass over a few rows, weights in bytes, in one call.

What a head guesses need not be exact, and reading its weights is what a pass takes: at 8 bits half as much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from foredraft.models.kernels.attend import attend
from foredraft.models.kernels.glue import add_norm, swiglu, turn_and_write
from foredraft.models.kernels.numbers import (
    F32,
    LOG2E,
    OPTIONS,
    STEADY,
    UINT,
    floats,
    halves,
    ints,
    load,
    to_half,
)
from foredraft.models.kernels.products import products

TILE, AT_ONCE = 64, 4  # columns and rows of a product that are summed together
_sums = products(AT_ONCE, TILE // 16, 16, fresh=True, of_bytes=True)


@njit(fastmath=STEADY, **OPTIONS)
def _product(
    x: Any, rows: Any, k: Any, weights: Any, scales: Any, n: Any, out: Any, half: Any, work: Any
) -> None:
    """out = x W, [rows, n], bfloat16 if `half`, else float32.

    x: float32 [rows up to whole AT_ONCE, k]; weights: int8 [tiles, k, TILE], times scales, float32 [n]. work:
    float32 [AT_ONCE, TILE].
    """
    far = UINT(1) << UINT(40)
    sums, s = carray(floats(work), (far,)), carray(floats(scales), (far,))
    small, full = carray(halves(out), (far,)), carray(floats(out), (far,))
    for c in range(UINT(0), n, UINT(TILE)):
        some = min(UINT(TILE), n - c)
        for r in range(UINT(0), rows, UINT(AT_ONCE)):
            _sums(x + r * k * UINT(4), k, weights + c * k, UINT(TILE), k, work, UINT(TILE))
            for g in range(min(UINT(AT_ONCE), rows - r)):
                to, at = (r + g) * n + c, g * UINT(TILE)
                if half:
                    for j in range(some):
                        small[to + j] = to_half(sums[at + j] * s[c + j])
                else:
                    for j in range(some):
                        full[to + j] = sums[at + j] * s[c + j]


@njit(fastmath=STEADY, **OPTIONS)
def _widened(source: Any, rows: Any, k: Any, out: Any) -> None:
    """bfloat16 [rows, k] as float32."""
    x, o = carray(halves(source), (rows * k,)), carray(floats(out), (rows * k,))
    for i in range(rows * k):
        o[i] = load(x[i])


@njit(fastmath=True, **OPTIONS)
def _normed(source: Any, weight: Any, k: Any, eps: Any, out: Any) -> None:
    """One row [k] of bfloat16 under a norm, as float32."""
    x, w, o = carray(halves(source), (k,)), carray(halves(weight), (k,)), carray(floats(out), (k,))
    total = F32(0)
    for i in range(k):
        total += load(x[i]) * load(x[i])
    scale = F32(1) / np.sqrt(total / F32(k) + F32(eps))
    for i in range(k):
        o[i] = load(x[i]) * scale * load(w[i])


@njit(**OPTIONS)
def head_pass(
    weights: Any,
    sizes: Any,
    eps: Any,
    token_ids: Any,
    rows: Any,
    features: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    seen: Any,
    wanted: Any,
    found: Any,
    logits: Any,
    work: Any,
) -> None:
    """Run an EAGLE head over rows: their tokens, int64 [rows], and features [rows, hidden].

    weights: addresses of the embedding, of the norms of it, of features, before the MLP and of the output,
    then of each product and its scales. sizes: hidden, inner, query heads, key heads, dim, vocabulary. cos,
    sin: as turn_and_write has them; cache: keys and values. seen: where rows are written, then what attend is
    told of them: spans, their number, slots, prefix, tail_at, tails, cap, most. wanted: rows whose logits are
    wanted, and their number. found: bfloat16 [rows, hidden]; logits: float32 [wanted, vocabulary]. work:
    bytes, as work_size says, and attend's scratch.
    """
    count, hidden, inner = UINT(rows), UINT(sizes[0]), UINT(sizes[1])
    queries, kv, dim, vocab = UINT(sizes[2]), UINT(sizes[3]), UINT(sizes[4]), UINT(sizes[5])
    two, four = UINT(2), UINT(4)
    whole = (count + UINT(AT_ONCE - 1)) // UINT(AT_ONCE) * UINT(AT_ONCE)
    widest = max(two * hidden, max(inner, queries * dim))
    x = UINT(work[0])
    temp = x + whole * widest * four
    qkv = temp + UINT(AT_ONCE * TILE) * four
    attended = qkv + count * (queries + two * kv) * dim * two
    between = attended + count * queries * dim * two
    normed = between + count * hidden * two
    gate_up = normed + count * hidden * two
    gated = gate_up + count * inner * four

    ids, which = carray(ints(token_ids), (count,)), carray(ints(wanted[0]), (UINT(wanted[1]),))
    for row in range(count):
        to = x + row * two * hidden * four
        _normed(UINT(weights[0]) + UINT(ids[row]) * hidden * two, weights[1], hidden, eps, to)
        _normed(UINT(features) + row * hidden * two, weights[2], hidden, eps, to + hidden * four)
    columns = (queries + two * kv) * dim
    _product(x, count, two * hidden, UINT(weights[5]), UINT(weights[6]), columns, qkv, True, temp)
    turn_and_write(qkv, cos, sin, seen[0], cache[0], cache[1], rows, queries, kv, dim)
    attend(
        qkv,
        columns,
        dim,
        cache[0],
        cache[1],
        attended,
        seen[1],
        seen[2],
        seen[3],
        seen[4],
        seen[5],
        seen[6],
        queries,
        kv,
        0,
        kv,
        dim,
        dim,
        LOG2E / np.sqrt(float(sizes[4])),
        0,
        work[1],
        seen[7],
        seen[8],
    )
    _widened(attended, count, queries * dim, x)
    _product(x, count, queries * dim, UINT(weights[7]), UINT(weights[8]), hidden, between, True, temp)
    add_norm(features, between, weights[3], normed, rows, hidden, eps)
    _widened(normed, count, hidden, x)
    _product(x, count, hidden, UINT(weights[9]), UINT(weights[10]), two * inner, gate_up, True, temp)
    swiglu(gate_up, gated, rows, inner)
    _widened(gated, count, inner, x)
    _product(x, count, inner, UINT(weights[11]), UINT(weights[12]), hidden, UINT(found), True, temp)
    add_norm(between, found, weights[4], normed, rows, hidden, eps)
    for i in range(len(which)):
        _widened(normed + UINT(which[i]) * hidden * two, UINT(1), hidden, x + UINT(i) * hidden * four)
    _product(
        x, UINT(wanted[1]), hidden, UINT(weights[13]), UINT(weights[14]), vocab, UINT(logits), False, temp
    )


def work_size(rows: int, hidden: int, inner: int, queries: int, kv: int, dim: int) -> int:
    """Return how many bytes `head_pass` works in for so many rows."""
    whole = -(-rows // AT_ONCE) * AT_ONCE
    numbers = whole * max(2 * hidden, inner, queries * dim) + AT_ONCE * TILE
    return 4 * numbers + 2 * rows * ((2 * queries + 2 * kv) * dim + 2 * hidden + 3 * inner)
