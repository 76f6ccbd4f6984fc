"""Attention of a few rows: scores key by key in the order of the text, four queries at once.

Keys lie by block as [dim / 2, BLOCK, 2], values as [BLOCK / 2, dim, 2]: a query meets the keys of a block by
pairs of its numbers, and values are mixed by pairs of positions. Which positions are a pair, and the order of
all sums, go by the text, wherever its keys lie, so that a token has the same bits decoded alone, in a chain
and in a tree.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from foredraft.engine.pool import BLOCK
from foredraft.models.kernels.numbers import (
    F32,
    OPTIONS,
    STEADY,
    U16,
    UINT,
    exp2,
    floats,
    halves,
    ints,
    to_half,
)
from foredraft.models.kernels.pairs import pair_sums

AT_ONCE = 4  # queries, as reading keys and values takes longer than multiplying
LEAST = 8  # numbers of a value that are mixed at once, at least
_WIDE, _MIDDLE = 64, 16
_scores = pair_sums(AT_ONCE, BLOCK // 16, 16, fresh=True)
_mix_wide = pair_sums(AT_ONCE, _WIDE // 16, 16, fresh=False)
_mix_middle = pair_sums(AT_ONCE, 1, 16, fresh=False)
_mix_least = pair_sums(AT_ONCE, 1, LEAST, fresh=False)
_add_middle, _add_least = (pair_sums(1, 1, lanes, fresh=False) for lanes in (16, LEAST))
_FAR = UINT(1) << UINT(40)


@njit(fastmath=STEADY, **OPTIONS)
def _exponents(scores: Any, first: Any, last: Any, highest: Any, scale: Any) -> None:
    for j in range(first, last):
        scores[j] = exp2((scores[j] - highest) * scale)


@njit(fastmath=True, **OPTIONS)
def _softmax(scores: Any, first: Any, last: Any, scale: Any) -> Any:
    """scores = 2 ** ((scores - highest) * scale), from first to last; returns their sum."""
    highest, total = F32(-3e38), F32(0)
    for j in range(first, last):
        highest = max(highest, scores[j])
    _exponents(scores, first, last, highest, scale)
    for j in range(first, last):
        total += scores[j]
    return total


@njit(inline="always")
def _sight(ends: Any, begins: Any, row: Any, window: Any) -> Any:
    """Return what a row sees: from where on, how many positions in a row from the text's beginning, where its
    tail begins, how many that are, and where its text ends.
    """
    seen, begin = UINT(ends[row]), UINT(begins[row])
    extra = UINT(begins[row + UINT(1)]) - begin
    last = seen + extra
    first = last - UINT(window) if UINT(0) < UINT(window) < last else UINT(0)
    return first, seen, begin, extra, last


@njit(fastmath=STEADY, **OPTIONS)
def _rounded(scores: Any, weights: Any, first: Any, last: Any, end: Any) -> None:
    """Weights of all positions before `end`: rounded scores from first to last, elsewhere nothing."""
    for j in range(first):
        weights[j] = U16(0)
    for j in range(first, last):
        weights[j] = to_half(scores[j])
    for j in range(last, end):
        weights[j] = U16(0)


@njit(inline="always")
def _mix(values: Any, stride: Any, weights: Any, apart: Any, pairs: Any, out: Any, dim: Any) -> None:
    """Add so many pairs of values to what AT_ONCE queries have; all by address."""
    to, four = dim * UINT(4), UINT(4)
    wide, middle = dim - dim % UINT(_WIDE), dim - dim % UINT(_MIDDLE)
    for d in range(UINT(0), wide, UINT(_WIDE)):
        _mix_wide(weights, apart, values + d * four, stride, pairs, out + d * four, to)
    for d in range(wide, middle, UINT(_MIDDLE)):
        _mix_middle(weights, apart, values + d * four, stride, pairs, out + d * four, to)
    for d in range(middle, dim, UINT(LEAST)):
        _mix_least(weights, apart, values + d * four, stride, pairs, out + d * four, to)


@njit(inline="always")
def _mix_own(values: Any, weights: Any, pairs: Any, out: Any, dim: Any) -> None:
    """Add so many pairs of values in a row to what one query has."""
    stride, four, middle = dim * UINT(4), UINT(4), dim - dim % UINT(_MIDDLE)
    for d in range(UINT(0), middle, UINT(_MIDDLE)):
        _add_middle(weights, UINT(0), values + d * four, stride, pairs, out + d * four, UINT(0))
    for d in range(middle, dim, UINT(LEAST)):
        _add_least(weights, UINT(0), values + d * four, stride, pairs, out + d * four, UINT(0))


@njit(**OPTIONS)
def _path(values: Any, at: Any, slots: Any, seen: Any, tail: Any, tail_at: Any, end: Any, out: Any) -> None:
    """Copy the values of a path in a tree, from the last whole pair of the text before it on. values: of one
    key head, [blocks, ·, BLOCK / 2, dim, 2], which `at` finds: how far blocks are apart, and dim.
    """
    apart, dim, two, block = at[0], at[1], UINT(2), UINT(BLOCK)
    begin = seen - seen % two
    for place in range(begin, end):
        position = place if place < seen else UINT(tail[tail_at + place - seen])
        slot, to = UINT(slots[position]), (place - begin) // two * two * dim + (place - begin) % two
        offset = slot % block
        source = slot // block * apart + offset // two * two * dim + offset % two
        for d in range(dim):
            out[to + two * d] = values[source + two * d]


@njit(**OPTIONS)
def attend(
    q: Any,
    q_row: Any,
    q_head: Any,
    keys: Any,
    values: Any,
    out: Any,
    span: Any,
    slots: Any,
    prefix: Any,
    tail_at: Any,
    tails: Any,
    heads: Any,
    kv: Any,
    head: Any,
    dim: Any,
    value_dim: Any,
    scale: Any,
    window: Any,
    scratch: Any,
    cap: Any,
    most: Any,
    longest: Any,
) -> None:
    """Attend from some rows of one sequence to the slots that each sees, for one key head.

    q: rows q_row apart, heads q_head apart; keys: [blocks, kv, dim / 2, BLOCK, 2]; values: [blocks, kv, BLOCK
    / 2, value_dim, 2]; out: [rows, heads, value_dim]. span: int64 [4], first row, rows, where its slots begin
    in `slots`, and how many they are. A row sees the first prefix[row] of them and then those that tails
    names from tail_at[row] to tail_at[row + 1], ascending; with a window > 0 only the last so many. scale: of
    scores, which are powers of two. scratch: as scratch_size says, for lengths up to cap, whole blocks,
    `most` queries a key head and tails of up to `longest`.
    """
    of, at = carray(ints(span), (UINT(4),)), carray(ints(slots), (_FAR,))
    ends, begins = carray(ints(prefix), (_FAR,)), carray(ints(tail_at), (_FAR,))
    others = carray(ints(tails), (_FAR,))
    row0, rows, first_slot, length = UINT(of[0]), UINT(of[1]), UINT(of[2]), UINT(of[3])
    n, m, cap_, two, four = UINT(dim), UINT(value_dim), UINT(cap), UINT(2), UINT(4)
    share, block, whole = UINT(heads) // UINT(kv), UINT(BLOCK), UINT(most) + UINT(AT_ONCE - 1)
    count = rows * share
    scores_at = UINT(scratch)
    mixed_at = scores_at + whole * cap_ * four
    sums_at = mixed_at + whole * m * four
    query_at = sums_at + whole * four
    weights_at = query_at + whole * n * two
    path_at = weights_at + whole * cap_ * two
    own_at = path_at + (UINT(longest) + four) * m * two
    x, query = carray(halves(q), (_FAR,)), carray(halves(query_at), (_FAR,))
    scores, sums = carray(floats(scores_at), (_FAR,)), carray(floats(sums_at), (_FAR,))
    mixed, o = carray(floats(mixed_at), (_FAR,)), carray(halves(out), (_FAR,))
    weights, path = carray(halves(weights_at), (_FAR,)), carray(halves(path_at), (_FAR,))
    own = carray(halves(own_at), (_FAR,))
    padded = (count + UINT(AT_ONCE - 1)) // UINT(AT_ONCE) * UINT(AT_ONCE)
    for g in range(padded):  # the last one again, beside itself
        source = min(g, count - UINT(1))
        base = (row0 + source // share) * UINT(q_row) + (UINT(head) * share + source % share) * UINT(q_head)
        for d in range(n):
            query[g * n + d] = x[base + d]
    blocks = (length + block - UINT(1)) // block
    for c in range(blocks):
        held = (
            UINT(keys) + (UINT(at[first_slot + c * block]) // block * UINT(kv) + UINT(head)) * n * block * two
        )
        for g in range(UINT(0), count, UINT(AT_ONCE)):
            to = scores_at + (g * cap_ + c * block) * four
            _scores(query_at + g * n * two, n * two, held, block * four, n // two, to, cap_ * four)
    low, high = blocks, UINT(0)  # the blocks that are mixed
    for g in range(padded):
        row = row0 + min(g, count - UINT(1)) // share
        first, seen, begin, extra, last = _sight(ends, begins, row, window)
        for t in range(extra):
            scores[g * cap_ + seen + t] = scores[g * cap_ + UINT(others[begin + t])]
        sums[g] = _softmax(scores, g * cap_ + first, g * cap_ + last, F32(scale))
        until = max(first, seen - seen % two if extra else seen)
        its, its_weights = scores[g * cap_ : (g + UINT(1)) * cap_], weights[g * cap_ : (g + UINT(1)) * cap_]
        _rounded(its, its_weights, first, until, blocks * block)
        low, high = min(low, first // block), max(high, (until + block - UINT(1)) // block)
    for i in range(padded * m):
        mixed[i] = F32(0)
    apart = UINT(kv) * block * m
    head_at = UINT(values) + UINT(head) * block * m * two
    for g in range(UINT(0), count, UINT(AT_ONCE)):
        for c in range(low, high):
            value = head_at + UINT(at[first_slot + c * block]) // block * apart * two
            weight, to = weights_at + (g * cap_ + c * block) * two, mixed_at + g * m * four
            _mix(value, m * four, weight, cap_ * two, block // two, to, m)
    held_values, where = carray(halves(head_at), (_FAR,)), (apart, m)
    for g in range(count):
        row = row0 + g // share
        first, seen, begin, extra, last = _sight(ends, begins, row, window)
        if extra:
            start = seen - seen % two
            pairs = (last - start + UINT(1)) // two
            if g % share == UINT(0):
                path[(pairs - UINT(1)) * two * m : pairs * two * m] = U16(0)
                _path(held_values, where, at[first_slot:], seen, others, begin, last, path)
            for j in range(start, start + two * pairs):
                inside = first <= j < last
                own[j - start] = to_half(scores[g * cap_ + j]) if inside else U16(0)
            _mix_own(path_at, own_at, pairs, mixed_at + g * m * four, m)
        base = (row * UINT(heads) + UINT(head) * share + g % share) * m
        inverse = F32(1) / sums[g]
        for d in range(m):
            o[base + d] = to_half(mixed[g * m + d] * inverse)


def scratch_size(dim: int, value_dim: int, cap: int, most: int, longest: int) -> int:
    """Return how many bytes `attend` works in."""
    whole = most + AT_ONCE - 1
    return whole * (4 * (cap + value_dim + 1) + 2 * (dim + cap)) + 2 * (longest + 4) * (value_dim + 1)
