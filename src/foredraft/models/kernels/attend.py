"""Attention of a few rows: scores key by key in the order of the text, four queries at once."""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from foredraft.engine.kv import BLOCK
from foredraft.models.kernels.numbers import (
    F32,
    OPTIONS,
    STEADY,
    UINT,
    exp2,
    floats,
    halves,
    ints,
    load,
    to_half,
)
from foredraft.models.kernels.products import products

AT_ONCE = 4  # queries, as reading keys and values takes longer than multiplying
WIDE, LEAST = 32, 8  # numbers of a value that are mixed at once, and at least
_scores = products(AT_ONCE, BLOCK // 16, 16, fresh=True)
_mix_wide = products(AT_ONCE, WIDE // 16, 16, fresh=False)
_mix_least, _add_least = (products(queries, 1, LEAST, fresh=False) for queries in (AT_ONCE, 1))


@njit(fastmath=STEADY, **OPTIONS)
def _exponents(scores: Any, first: Any, last: Any, highest: Any) -> None:
    for j in range(first, last):
        scores[j] = exp2(scores[j] - highest)


@njit(fastmath=True, **OPTIONS)
def _softmax(scores: Any, first: Any, last: Any) -> Any:
    """scores = 2 ** (scores - highest), from first to last; returns their sum."""
    highest, total = F32(-3e38), F32(0)
    for j in range(first, last):
        highest = max(highest, scores[j])
    _exponents(scores, first, last, highest)
    for j in range(first, last):
        total += scores[j]
    return total


@njit(inline="always")
def _sight(ends: Any, begins: Any, row: Any, window: Any) -> Any:
    """Return what a row sees: from where on, how many positions in a row from the text's beginning, and where
    its tails begin and how many they are.
    """
    seen, begin = UINT(ends[row]), UINT(begins[row])
    extra = UINT(begins[row + UINT(1)]) - begin
    last = seen + extra
    return (last - UINT(window) if UINT(0) < UINT(window) < last else UINT(0)), seen, begin, extra


@njit(inline="always")
def _mix_block(values: Any, stride: Any, weights: Any, cap: Any, count: Any, out: Any, dim: Any) -> None:
    """Add `count` values to what AT_ONCE queries have; all by address."""
    wide = dim - dim % UINT(WIDE)
    for d in range(UINT(0), wide, UINT(WIDE)):
        _mix_wide(weights, cap, values + d * UINT(2), stride, count, out + d * UINT(4), dim)
    for d in range(wide, dim, UINT(LEAST)):
        _mix_least(weights, cap, values + d * UINT(2), stride, count, out + d * UINT(4), dim)


@njit(inline="always")
def _mix_one(value: Any, weight: Any, out: Any, dim: Any) -> None:
    """Add one value to what one query has."""
    for d in range(UINT(0), dim, UINT(LEAST)):
        _add_least(weight, UINT(0), value + d * UINT(2), UINT(0), UINT(1), out + d * UINT(4), UINT(0))


@njit(**OPTIONS)
def attend(
    q: Any,
    q_row: Any,
    q_head: Any,
    keys: Any,
    values: Any,
    out: Any,
    spans: Any,
    span_count: Any,
    slots: Any,
    prefix: Any,
    tail_at: Any,
    tails: Any,
    heads: Any,
    kv: Any,
    first_head: Any,
    last_head: Any,
    dim: Any,
    value_dim: Any,
    scale: Any,
    window: Any,
    scratch: Any,
    cap: Any,
    most: Any,
) -> None:
    """Attend from the rows of some spans to the slots that each sees.

    q: rows q_row apart, heads q_head apart; keys: [blocks, kv, dim, BLOCK]; values: [slots, kv, value_dim];
    out: [rows, heads, value_dim]. spans: int64 [span_count, 4], first row, rows, where its slots begin in
    `slots`, and how many they are. A row sees the first prefix[row] of them and then those that tails names
    from tail_at[row] to tail_at[row + 1], ascending; with a window > 0 only the last so many. Key heads
    first_head … last_head - 1 are done. scratch: float32, as scratch_size says, for lengths up to cap, whole
    blocks, and `most` queries a key head.
    """
    far = UINT(1) << UINT(40)
    x, o = carray(halves(q), (far,)), carray(halves(out), (far,))
    of, at = carray(ints(spans), (far,)), carray(ints(slots), (far,))
    ends, begins, others = (
        carray(ints(prefix), (far,)),
        carray(ints(tail_at), (far,)),
        carray(ints(tails), (far,)),
    )
    n, m, cap_, all_ = UINT(dim), UINT(value_dim), UINT(cap), UINT(most) + UINT(AT_ONCE - 1)
    share, block, four, two = UINT(heads) // UINT(kv), UINT(BLOCK), UINT(4), UINT(2)
    scores_at = UINT(scratch)
    query_at = scores_at + all_ * cap_ * four
    mixed_at = query_at + all_ * n * four
    scores, query = carray(floats(scores_at), (far,)), carray(floats(query_at), (far,))
    mixed, sums = carray(floats(mixed_at), (far,)), carray(floats(mixed_at + all_ * m * four), (far,))
    stride = UINT(kv) * m
    for span in range(UINT(span_count)):
        row0, rows = UINT(of[span * UINT(4)]), UINT(of[span * UINT(4) + UINT(1)])
        first_slot, length = UINT(of[span * UINT(4) + UINT(2)]), UINT(of[span * UINT(4) + UINT(3)])
        count = rows * share
        for head in range(UINT(first_head), UINT(last_head)):
            for g in range(count + UINT(AT_ONCE - 1)):  # the last one again, beside itself
                own = min(g, count - UINT(1))
                base = (row0 + own // share) * UINT(q_row) + (head * share + own % share) * UINT(q_head)
                for d in range(n):
                    query[g * n + d] = load(x[base + d]) * F32(scale)
            for c in range(UINT(0), length, block):
                keys_at = UINT(keys) + (UINT(at[first_slot + c]) // block * UINT(kv) + head) * n * block * two
                for g in range(UINT(0), count, UINT(AT_ONCE)):
                    to = scores_at + (g * cap_ + c) * four
                    _scores(query_at + g * n * four, n, keys_at, block, n, to, cap_)
            for g in range(count):
                first, seen, begin, extra = _sight(ends, begins, row0 + g // share, window)
                for t in range(extra):
                    scores[g * cap_ + seen + t] = scores[g * cap_ + UINT(others[begin + t])]
                sums[g] = _softmax(scores, g * cap_ + first, g * cap_ + seen + extra)
            for i in range((count + UINT(AT_ONCE - 1)) * m):
                mixed[i] = F32(0)
            values_at = UINT(values) + head * m * two
            for g0 in range(UINT(0), count, UINT(AT_ONCE)):
                low, high = UINT(0), length  # what all of these queries see
                for g in range(g0, min(g0 + UINT(AT_ONCE), count)):
                    first, seen, begin, extra = _sight(ends, begins, row0 + g // share, window)
                    low, high = max(low, first), min(high, seen)
                low = (low + block - UINT(1)) // block * block
                high = max(low, high)
                for g in range(g0, min(g0 + UINT(AT_ONCE), count)):
                    first, seen, begin, extra = _sight(ends, begins, row0 + g // share, window)
                    for j in range(first, min(low, seen)):
                        value = values_at + UINT(at[first_slot + j]) * stride * two
                        _mix_one(value, scores_at + (g * cap_ + j) * four, mixed_at + g * m * four, m)
                for c in range(low, high, block):
                    value = values_at + UINT(at[first_slot + c]) * stride * two
                    weights, to = scores_at + (g0 * cap_ + c) * four, mixed_at + g0 * m * four
                    _mix_block(value, stride, weights, cap_, min(block, high - c), to, m)
                for g in range(g0, min(g0 + UINT(AT_ONCE), count)):
                    first, seen, begin, extra = _sight(ends, begins, row0 + g // share, window)
                    for j in range(max(first, high), seen):
                        value = values_at + UINT(at[first_slot + j]) * stride * two
                        _mix_one(value, scores_at + (g * cap_ + j) * four, mixed_at + g * m * four, m)
                    for t in range(extra):
                        if seen + t >= first:
                            value = values_at + UINT(at[first_slot + UINT(others[begin + t])]) * stride * two
                            weight = scores_at + (g * cap_ + seen + t) * four
                            _mix_one(value, weight, mixed_at + g * m * four, m)
            for g in range(count):
                base = ((row0 + g // share) * UINT(heads) + head * share + g % share) * m
                inverse = F32(1) / sums[g]
                for d in range(m):
                    o[base + d] = to_half(mixed[g * m + d] * inverse)


def scratch_size(dim: int, value_dim: int, cap: int, most: int) -> int:
    """Return how many float32 `attend` works in."""
    return (most + AT_ONCE - 1) * (cap + dim + value_dim + 1)
