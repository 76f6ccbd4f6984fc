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
    load,
    to_half,
)
from foredraft.models.kernels.pairs import WIDENED, pair_sums

AT_ONCE = 4  # queries, as reading keys and values takes longer than multiplying
LEAST = 8  # numbers of a value that are mixed at once, at least
_WIDE, _MIDDLE = 64, 16
_scores = pair_sums(AT_ONCE, BLOCK // 16, 16, fresh=True)
_mix_wide = pair_sums(AT_ONCE, _WIDE // 16, 16, fresh=False)
_mix_middle = pair_sums(AT_ONCE, 1, 16, fresh=False)
_mix_least = pair_sums(AT_ONCE, 1, LEAST, fresh=False)
_add_middle, _add_least = (pair_sums(1, 1, lanes, fresh=False) for lanes in (16, LEAST))
_SIDE_BY_SIDE, _NEAR_BYTES = 4, 1 << 20
_SIZE = 4 if WIDENED else 2  # bytes of a query's number, and of what a value is multiplied by
_numbers = floats if WIDENED else halves
_NONE, _FAR = UINT(0), UINT(1) << UINT(40)


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
def _stored(half: Any) -> Any:
    """A bfloat16 as `_numbers` hold it."""
    return load(half) if WIDENED else half


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
        weights[j] = _stored(U16(0))
    for j in range(first, last):
        weights[j] = _stored(to_half(scores[j]))
    for j in range(last, end):
        weights[j] = _stored(U16(0))


@njit(inline="always")
def _mix(values: Any, stride: Any, weights: Any, apart: Any, pairs: Any, out: Any, dim: Any) -> None:
    """Add so many pairs of values to what AT_ONCE queries have; all by address."""
    to, four = dim * UINT(4), UINT(4)
    wide, middle = dim - dim % UINT(_WIDE), dim - dim % UINT(_MIDDLE)
    for d in range(UINT(0), wide, UINT(_WIDE)):
        _mix_wide(weights, apart, values + d * four, stride, pairs, out + d * four, to, _NONE, _NONE)
    for d in range(wide, middle, UINT(_MIDDLE)):
        _mix_middle(weights, apart, values + d * four, stride, pairs, out + d * four, to, _NONE, _NONE)
    for d in range(middle, dim, UINT(LEAST)):
        _mix_least(weights, apart, values + d * four, stride, pairs, out + d * four, to, _NONE, _NONE)


@njit(inline="always")
def _mix_own(values: Any, weights: Any, pairs: Any, out: Any, dim: Any) -> None:
    """Add so many pairs of values in a row to what one query has."""
    stride, four, middle = dim * UINT(4), UINT(4), dim - dim % UINT(_MIDDLE)
    for d in range(UINT(0), middle, UINT(_MIDDLE)):
        _add_middle(weights, _NONE, values + d * four, stride, pairs, out + d * four, _NONE, _NONE, _NONE)
    for d in range(middle, dim, UINT(LEAST)):
        _add_least(weights, _NONE, values + d * four, stride, pairs, out + d * four, _NONE, _NONE, _NONE)


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
    together: Any,
    dim: Any,
    value_dim: Any,
    scale: Any,
    window: Any,
    scratch: Any,
    cap: Any,
    most: Any,
    longest: Any,
) -> None:
    """Attend from some rows of one sequence to the slots that each sees, for `together` key heads from `head`
    on. These lie side by side in a block, and memory is read faster in longer pieces.

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
    share, block, many = UINT(heads) // UINT(kv), UINT(BLOCK), UINT(together)
    number, whole = UINT(_SIZE), many * (UINT(most) + UINT(AT_ONCE - 1))
    count = rows * share
    scores_at = UINT(scratch)
    mixed_at = scores_at + whole * cap_ * four
    sums_at = mixed_at + whole * m * four
    query_at = sums_at + whole * four
    weights_at = query_at + whole * n * number
    path_at = weights_at + whole * cap_ * number
    own_at = path_at + (UINT(longest) + four) * m * two
    x, query = carray(halves(q), (_FAR,)), carray(_numbers(query_at), (_FAR,))
    scores, sums = carray(floats(scores_at), (_FAR,)), carray(floats(sums_at), (_FAR,))
    mixed, o = carray(floats(mixed_at), (_FAR,)), carray(halves(out), (_FAR,))
    weights, path = carray(_numbers(weights_at), (_FAR,)), carray(halves(path_at), (_FAR,))
    own = carray(_numbers(own_at), (_FAR,))
    # Of each head so many queries, the last one again, beside itself, until they are whole fours.
    padded = (count + UINT(AT_ONCE - 1)) // UINT(AT_ONCE) * UINT(AT_ONCE)
    for g in range(many * padded):
        source, of_head = min(g % padded, count - UINT(1)), UINT(head) + g // padded
        base = (row0 + source // share) * UINT(q_row) + (of_head * share + source % share) * UINT(q_head)
        for d in range(n):
            query[g * n + d] = _stored(x[base + d])
    blocks = (length + block - UINT(1)) // block
    key_size, value_size = n * block * two, m * block * two
    for c in range(blocks):
        held = UINT(keys) + (UINT(at[first_slot + c * block]) // block * UINT(kv) + UINT(head)) * key_size
        for g in range(UINT(0), many * padded, UINT(AT_ONCE)):
            key, to = held + g // padded * key_size, scores_at + (g * cap_ + c * block) * four
            _scores(
                query_at + g * n * number,
                n * number,
                key,
                block * four,
                n // two,
                to,
                cap_ * four,
                _NONE,
                _NONE,
            )
    low, high = blocks, UINT(0)  # the blocks that are mixed
    for g in range(many * padded):
        row = row0 + min(g % padded, count - UINT(1)) // share
        first, seen, begin, extra, last = _sight(ends, begins, row, window)
        for t in range(extra):
            scores[g * cap_ + seen + t] = scores[g * cap_ + UINT(others[begin + t])]
        sums[g] = _softmax(scores, g * cap_ + first, g * cap_ + last, F32(scale))
        until = max(first, seen - seen % two if extra else seen)
        its, its_weights = scores[g * cap_ : (g + UINT(1)) * cap_], weights[g * cap_ : (g + UINT(1)) * cap_]
        _rounded(its, its_weights, first, until, blocks * block)
        low, high = min(low, first // block), max(high, (until + block - UINT(1)) // block)
    for i in range(many * padded * m):
        mixed[i] = F32(0)
    for c in range(low, high):
        held = UINT(values) + (UINT(at[first_slot + c * block]) // block * UINT(kv) + UINT(head)) * value_size
        for g in range(UINT(0), many * padded, UINT(AT_ONCE)):
            weight, to = weights_at + (g * cap_ + c * block) * number, mixed_at + g * m * four
            _mix(held + g // padded * value_size, m * four, weight, cap_ * number, block // two, to, m)
    where = (UINT(kv) * block * m, m)
    for g in range(many * padded):
        if g % padded >= count:
            continue
        row, of_head, its_share = row0 + g % padded // share, UINT(head) + g // padded, g % padded % share
        first, seen, begin, extra, last = _sight(ends, begins, row, window)
        if extra:
            start = seen - seen % two
            pairs = (last - start + UINT(1)) // two
            if its_share == UINT(0):
                path[(pairs - UINT(1)) * two * m : pairs * two * m] = U16(0)
                held_values = carray(halves(UINT(values) + of_head * value_size), (_FAR,))
                _path(held_values, where, at[first_slot:], seen, others, begin, last, path)
            for j in range(start, start + two * pairs):
                inside = first <= j < last
                own[j - start] = _stored(to_half(scores[g * cap_ + j]) if inside else U16(0))
            _mix_own(path_at, own_at, pairs, mixed_at + g * m * four, m)
        base = (row * UINT(heads) + of_head * share + its_share) * m
        inverse = F32(1) / sums[g]
        for d in range(m):
            o[base + d] = to_half(mixed[g * m + d] * inverse)


def heads_together(count: int, kv_heads: int, cap: int, most: int, threads: int) -> int:
    """Return how many key heads of a unit are attended together: as many as leave each thread something to
    do, as lie side by side in a few pages, and as have room for their scores in a core's own cache.
    """
    fit = _NEAR_BYTES // ((most + AT_ONCE - 1) * cap * 6)
    return max(1, min(-(-kv_heads * count // threads), kv_heads, _SIDE_BY_SIDE, fit))


def scratch_size(dim: int, value_dim: int, cap: int, most: int, longest: int, together: int) -> int:
    """Return how many bytes `attend` works in."""
    whole = together * (most + AT_ONCE - 1)
    path = (longest + 4) * (2 * value_dim + _SIZE)
    return whole * (4 * (cap + value_dim + 1) + _SIZE * (dim + cap)) + path
