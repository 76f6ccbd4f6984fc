"""Attention of a few rows: scores key by key in the order of the text, two queries at once."""

from __future__ import annotations

from typing import Any

from numba import carray, njit

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

COLUMNS = 512  # keys that are held as float32 at a time
STRIDE = COLUMNS + 16  # from one dimension of them to the next; a power of two would crowd the caches


@njit(fastmath=STEADY, **OPTIONS)
def _scores(
    turned: Any, query: Any, a: Any, b: Any, scores: Any, to_a: Any, to_b: Any, count: Any, dim: Any
) -> None:
    """Scores of the queries that begin at a and b for `count` keys, from to_a and to_b on, two places apart.

    turned: [dim, STRIDE], the keys. Two at once, as reading keys takes longer than multiplying.
    """
    for j in range(count):
        scores[to_a + j] = F32(0)
        scores[to_b + j] = F32(0)
    for d in range(UINT(0), dim, UINT(8)):
        a0, a1, a2, a3 = query[a + d], query[a + d + UINT(1)], query[a + d + UINT(2)], query[a + d + UINT(3)]
        a4, a5, a6, a7 = (
            query[a + d + UINT(4)],
            query[a + d + UINT(5)],
            query[a + d + UINT(6)],
            query[a + d + UINT(7)],
        )
        b0, b1, b2, b3 = query[b + d], query[b + d + UINT(1)], query[b + d + UINT(2)], query[b + d + UINT(3)]
        b4, b5, b6, b7 = (
            query[b + d + UINT(4)],
            query[b + d + UINT(5)],
            query[b + d + UINT(6)],
            query[b + d + UINT(7)],
        )
        at = d * UINT(STRIDE)
        for j in range(count):
            one, other = scores[to_a + j], scores[to_b + j]
            key = turned[at + UINT(0 * STRIDE) + j]
            one, other = one + a0 * key, other + b0 * key
            key = turned[at + UINT(1 * STRIDE) + j]
            one, other = one + a1 * key, other + b1 * key
            key = turned[at + UINT(2 * STRIDE) + j]
            one, other = one + a2 * key, other + b2 * key
            key = turned[at + UINT(3 * STRIDE) + j]
            one, other = one + a3 * key, other + b3 * key
            key = turned[at + UINT(4 * STRIDE) + j]
            one, other = one + a4 * key, other + b4 * key
            key = turned[at + UINT(5 * STRIDE) + j]
            one, other = one + a5 * key, other + b5 * key
            key = turned[at + UINT(6 * STRIDE) + j]
            one, other = one + a6 * key, other + b6 * key
            key = turned[at + UINT(7 * STRIDE) + j]
            one, other = one + a7 * key, other + b7 * key
            scores[to_a + j] = one
            scores[to_b + j] = other


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


@njit(fastmath=STEADY, **OPTIONS)
def _mix(
    scores: Any, a: Any, b: Any, count: Any, values: Any, row: Any, out: Any, to_a: Any, to_b: Any, dim: Any
) -> None:
    """Add `count` values from `row` on, by the scores from a and b on, to what begins at to_a and to_b; one
    value after another. values: [COLUMNS, dim].
    """
    whole = count - count % UINT(4)
    for j in range(UINT(0), whole, UINT(4)):
        a0, a1, a2, a3 = (
            scores[a + j],
            scores[a + j + UINT(1)],
            scores[a + j + UINT(2)],
            scores[a + j + UINT(3)],
        )
        b0, b1, b2, b3 = (
            scores[b + j],
            scores[b + j + UINT(1)],
            scores[b + j + UINT(2)],
            scores[b + j + UINT(3)],
        )
        at = (row + j) * dim
        for d in range(dim):
            v0, v1 = values[at + d], values[at + dim + d]
            v2, v3 = values[at + UINT(2) * dim + d], values[at + UINT(3) * dim + d]
            one, other = out[to_a + d], out[to_b + d]
            one = one + a0 * v0
            one = one + a1 * v1
            one = one + a2 * v2
            one = one + a3 * v3
            other = other + b0 * v0
            other = other + b1 * v1
            other = other + b2 * v2
            other = other + b3 * v3
            out[to_a + d] = one
            out[to_b + d] = other
    for j in range(whole, count):
        a0, b0, at = scores[a + j], scores[b + j], (row + j) * dim
        for d in range(dim):
            one, other = out[to_a + d] + a0 * values[at + d], out[to_b + d] + b0 * values[at + d]
            out[to_a + d] = one
            out[to_b + d] = other


@njit(**OPTIONS)
def _read_turned(
    store: Any, slots: Any, at: Any, count: Any, head: Any, heads: Any, dim: Any, out: Any
) -> None:
    for j in range(count):
        base = (UINT(slots[at + j]) * heads + head) * dim
        for d in range(dim):
            out[d * UINT(STRIDE) + j] = load(store[base + d])


@njit(**OPTIONS)
def _read(store: Any, slots: Any, at: Any, count: Any, head: Any, heads: Any, dim: Any, out: Any) -> None:
    for j in range(count):
        base = (UINT(slots[at + j]) * heads + head) * dim
        for d in range(dim):
            out[j * dim + d] = load(store[base + d])


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

    q: rows q_row apart, heads q_head apart; keys, values: [slots, kv, dim or value_dim]; out: [rows, heads,
    value_dim]. spans: int64 [span_count, 4], first row, rows, where its slots begin in `slots`, and how many
    they are. A row sees the first prefix[row] of them and then those that tails names from tail_at[row] to
    tail_at[row + 1], ascending; with a window > 0 only the last so many. Key heads first_head … last_head - 1
    are done. scratch: float32, as scratch_size says, for lengths up to cap and `most` queries a key head.
    """
    far = UINT(1) << UINT(40)
    x, k, v, o = (
        carray(halves(q), (far,)),
        carray(halves(keys), (far,)),
        carray(halves(values), (far,)),
        carray(halves(out), (far,)),
    )
    of, at = carray(ints(spans), (far,)), carray(ints(slots), (far,))
    ends, begins, others = (
        carray(ints(prefix), (far,)),
        carray(ints(tail_at), (far,)),
        carray(ints(tails), (far,)),
    )
    n, m, cap_, all_ = UINT(dim), UINT(value_dim), UINT(cap), UINT(most) + UINT(1)  # and a spare one
    share, columns = UINT(heads) // UINT(kv), UINT(COLUMNS)
    sizes = (UINT(STRIDE) * n, columns * m, all_ * cap_, all_ * n, all_ * m)
    at_ = UINT(scratch)
    turned = carray(floats(at_), (far,))
    at_ += sizes[0] * UINT(4)
    held = carray(floats(at_), (far,))
    at_ += sizes[1] * UINT(4)
    scores = carray(floats(at_), (far,))
    at_ += sizes[2] * UINT(4)
    query = carray(floats(at_), (far,))
    at_ += sizes[3] * UINT(4)
    mixed = carray(floats(at_), (far,))
    sums = carray(floats(at_ + sizes[4] * UINT(4)), (far,))
    for span in range(UINT(span_count)):
        row0, rows = UINT(of[span * UINT(4)]), UINT(of[span * UINT(4) + UINT(1)])
        first_slot, length = UINT(of[span * UINT(4) + UINT(2)]), UINT(of[span * UINT(4) + UINT(3)])
        count = rows * share
        for head in range(UINT(first_head), UINT(last_head)):
            for g in range(count):
                base = (row0 + g // share) * UINT(q_row) + (head * share + g % share) * UINT(q_head)
                for d in range(n):
                    query[g * n + d] = load(x[base + d]) * F32(scale)
            for c in range(UINT(0), length, columns):
                some = min(columns, length - c)
                _read_turned(k, at, first_slot + c, some, head, UINT(kv), n, turned)
                for g in range(UINT(0), count, UINT(2)):
                    a, b, to_a, to_b = g * n, (g + UINT(1)) * n, g * cap_ + c, (g + UINT(1)) * cap_ + c
                    _scores(
                        turned, query, a, b, scores, to_a, to_b, some, n
                    )  # an odd last one beside nothing
            for g in range(count):
                row = row0 + g // share
                seen, begin = UINT(ends[row]), UINT(begins[row])
                extra = UINT(begins[row + UINT(1)]) - begin
                for t in range(extra):
                    scores[g * cap_ + seen + t] = scores[g * cap_ + UINT(others[begin + t])]
                last = seen + extra
                first = last - UINT(window) if UINT(0) < UINT(window) < last else UINT(0)
                sums[g] = _softmax(scores, g * cap_ + first, g * cap_ + last)
                for d in range(m):
                    mixed[g * m + d] = F32(0)
            for c in range(UINT(0), length, columns):
                some = min(columns, length - c)
                _read(v, at, first_slot + c, some, head, UINT(kv), m, held)
                g = UINT(0)
                while g < count:
                    row = row0 + g // share
                    seen, begin = UINT(ends[row]), UINT(begins[row])
                    extra = UINT(begins[row + UINT(1)]) - begin
                    last = seen + extra
                    first = last - UINT(window) if UINT(0) < UINT(window) < last else UINT(0)
                    two = (g + UINT(1)) % share != UINT(0)  # else the next is another row's
                    a, b = g * cap_, (g + UINT(1) if two else g) * cap_
                    to_a, to_b = g * m, (g + UINT(1) if two else count) * m
                    low, high = max(first, c), min(seen, c + some)
                    if low < high:
                        _mix(scores, a + low, b + low, high - low, held, low - c, mixed, to_a, to_b, m)
                    for t in range(extra):
                        column = UINT(others[begin + t])
                        if c <= column < c + some and seen + t >= first:
                            at_ = seen + t
                            _mix(scores, a + at_, b + at_, UINT(1), held, column - c, mixed, to_a, to_b, m)
                    g += UINT(2) if two else UINT(1)
            for g in range(count):
                base = ((row0 + g // share) * UINT(heads) + head * share + g % share) * m
                inverse = F32(1) / sums[g]
                for d in range(m):
                    o[base + d] = to_half(mixed[g * m + d] * inverse)


def scratch_size(dim: int, value_dim: int, cap: int, most: int) -> int:
    """Return how many float32 `attend` works in."""
    return STRIDE * dim + COLUMNS * value_dim + (most + 1) * (cap + dim + value_dim + 1)
