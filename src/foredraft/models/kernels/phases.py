"""Phases of a pass, each shared by threads unit by unit: norms, products, angles and the cache, attention. In
bfloat16, tensors by address.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from foredraft.models.kernels.attend import attend
from foredraft.models.kernels.dense import (
    ASKS,
    OFFSET,
    SUMS_BYTES,
    WIDTH,
    byte_sums,
    share_of,
    shares_of,
    tile_sums,
)
from foredraft.models.kernels.numbers import (
    F32,
    LOG2E,
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
from foredraft.models.kernels.one_row import copied, grown, normed_row, turn_and_write, widened
from foredraft.models.kernels.pairs import WIDENED
from foredraft.models.kernels.share import claimed, finish

ROWS = 64  # of a product that are one unit
HALF = WIDTH // 2
_FAR = UINT(1) << UINT(40)


@njit(fastmath=True, **OPTIONS)
def _scaled(sums: Any, x: Any, rows: Any, inputs: Any, scales: Any) -> None:
    """Take from sums of bytes what these counted too much, and scale them. x: the rows, bfloat16 [rows,
    inputs].
    """
    s, w, a = carray(floats(sums), (_FAR,)), carray(floats(scales), (_FAR,)), carray(halves(x), (_FAR,))
    for row in range(rows):
        total = F32(0)
        for i in range(inputs):
            total += load(a[row * inputs + i])
        for i in range(UINT(WIDTH)):
            at = row * UINT(WIDTH) + i
            s[at] = (s[at] - F32(OFFSET) * total) * w[i]


@njit(fastmath=STEADY, **OPTIONS)
def _put(sums: Any, bias: Any, rows: Any, some: Any, out: Any, apart: Any) -> None:
    """out = sums + bias, for `some` numbers of rows `apart` numbers from each other."""
    s, b, o = carray(floats(sums), (_FAR,)), carray(floats(bias), (_FAR,)), carray(halves(out), (_FAR,))
    for row in range(rows):
        for i in range(some):
            o[row * apart + i] = to_half(s[row * UINT(WIDTH) + i] + b[i])


@njit(fastmath=STEADY, **OPTIONS)
def _put_more(sums: Any, bias: Any, rows: Any, some: Any, out: Any, apart: Any) -> None:
    """out += sums + bias, likewise; what is added is rounded first."""
    s, b, o = carray(floats(sums), (_FAR,)), carray(floats(bias), (_FAR,)), carray(halves(out), (_FAR,))
    for row in range(rows):
        for i in range(some):
            more = load(to_half(s[row * UINT(WIDTH) + i] + b[i]))
            o[row * apart + i] = to_half(load(o[row * apart + i]) + more)


@njit(fastmath=STEADY, **OPTIONS)
def _put_floats(sums: Any, bias: Any, rows: Any, some: Any, out: Any, apart: Any) -> None:
    """out = sums + bias in float32, likewise."""
    s, b, o = carray(floats(sums), (_FAR,)), carray(floats(bias), (_FAR,)), carray(floats(out), (_FAR,))
    for row in range(rows):
        for i in range(some):
            o[row * apart + i] = s[row * UINT(WIDTH) + i] + b[i]


@njit(fastmath=STEADY, **OPTIONS)
def _put_gated(sums: Any, bias: Any, rows: Any, some: Any, out: Any, apart: Any, gelu: Any) -> None:
    """out = activation(gate) * up, the gate in the first half of a tile, for `some` numbers of either."""
    s, b, o = carray(floats(sums), (_FAR,)), carray(floats(bias), (_FAR,)), carray(halves(out), (_FAR,))
    for row in range(rows):
        base = row * UINT(WIDTH)
        if gelu:
            for i in range(some):
                gate = load(to_half(s[base + i] + b[i]))
                up = load(to_half(s[base + UINT(HALF) + i] + b[UINT(HALF) + i]))
                inner = F32(2 * 0.7978845608028654) * (gate + F32(0.044715) * gate * gate * gate)
                o[row * apart + i] = to_half(gate / (F32(1) + exp2(inner * F32(-LOG2E))) * up)
        else:
            for i in range(some):
                gate = load(to_half(s[base + i] + b[i]))
                up = load(to_half(s[base + UINT(HALF) + i] + b[UINT(HALF) + i]))
                o[row * apart + i] = to_half(gate / (F32(1) + exp2(gate * F32(-LOG2E))) * up)


PUT, PUT_MORE, PUT_FLOATS, PUT_SILU, PUT_GELU = range(5)  # what becomes of sums


@njit(**OPTIONS)
def product(
    board: Any,
    phase: Any,
    x: Any,
    rows: Any,
    inputs: Any,
    weights: Any,
    scales: Any,
    bias: Any,
    outputs: Any,
    out: Any,
    how: Any,
    scratch: Any,
) -> None:
    """Of rows [rows, inputs] and tiles of weights, in bytes if there are scales, this thread's share; out:
    [rows, outputs].
    """
    board, phase, x, rows, inputs = UINT(board), UINT(phase), UINT(x), UINT(rows), UINT(inputs)
    weights, scales, bias, outputs, out = UINT(weights), UINT(scales), UINT(bias), UINT(outputs), UINT(out)
    how, scratch = UINT(how), UINT(scratch)
    gated = how >= UINT(PUT_SILU)
    width = UINT(HALF) if gated else UINT(WIDTH)
    count, chunks = (outputs + width - UINT(1)) // width, (rows + UINT(ROWS - 1)) // UINT(ROWS)
    done, units, apart, pairs = UINT(0), count * chunks, inputs * UINT(2), inputs // UINT(2)
    held, stride = chunks, UINT(2 * WIDTH) if scales else UINT(4 * WIDTH)
    room, size, wide = scratch + UINT(SUMS_BYTES), pairs * stride, apart * UINT(2) if WIDENED else apart
    # The next unit is claimed early where its weights are to be asked for meanwhile.
    unit = claimed(board, phase)
    while unit < units:
        following = claimed(board, phase) if ASKS else unit
        done += UINT(1)
        # Widened rows are those of one chunk, under all tiles; else a tile's weights are, under all chunks.
        tile, chunk = (unit % count, unit // count) if WIDENED else (unit // chunks, unit % chunks)
        first = chunk * UINT(ROWS)
        column, from_ = tile * width, bias + tile * UINT(4 * WIDTH)
        some, last = min(width, outputs - column), min(rows, first + UINT(ROWS))
        if WIDENED and chunk != held:
            widened(x + first * apart, (last - first) * inputs, room)
            held = chunk
        weight, next_ = weights + tile * size, weights
        if following < units:
            next_ += following % count * size
        step = stride // UINT(2) // shares_of(last - first, scales, pairs)
        row, ahead = first, next_
        while row < last:
            few = share_of(last - row, scales, pairs)
            from_row = x + row * apart
            read = room + (row - first) * wide if WIDENED else from_row
            if scales:
                byte_sums(read, wide, few, weight, pairs, scratch, ahead, step)
                _scaled(scratch, from_row, few, inputs, scales + tile * UINT(4 * WIDTH))
            else:
                tile_sums(read, wide, few, weight, pairs, scratch, ahead, step)
            to = out + (row * outputs + column) * UINT(2)
            if gated:
                _put_gated(scratch, from_, few, some, to, outputs, how == UINT(PUT_GELU))
            elif how == UINT(PUT):
                _put(scratch, from_, few, some, to, outputs)
            elif how == UINT(PUT_FLOATS):
                _put_floats(scratch, from_, few, some, out + (row * outputs + column) * UINT(4), outputs)
            else:
                _put_more(scratch, from_, few, some, to, outputs)
            row, ahead = row + few, ahead + pairs * UINT(2) * step
        unit = following if ASKS else claimed(board, phase)
    finish(board, phase, done, units)


@njit(**OPTIONS)
def norms(
    board: Any,
    phase: Any,
    x: Any,
    more: Any,
    after: Any,
    weight: Any,
    rows: Any,
    hidden: Any,
    eps: Any,
    out: Any,
    copy: Any,
    of_out: Any,
) -> None:
    """This thread's share of: x += more under the norm `after`, if there is one; copy x; out = x under the
    norm `weight`, or if `of_out` copy that.
    """
    done, size = UINT(0), hidden * UINT(2)
    while True:
        row = claimed(board, phase)
        if row >= rows:
            break
        done += UINT(1)
        at = row * size
        if after:
            normed_row(more + at, after, hidden, eps, more + at)
            grown(x + at, more + at, hidden)
        normed_row(x + at, weight, hidden, eps, out + at)
        if copy:
            copied((out if of_out else x) + at, copy + at, hidden)
    finish(board, phase, done, rows)


@njit(**OPTIONS)
def turned(
    board: Any,
    phase: Any,
    qkv: Any,
    rows: Any,
    angles: Any,
    slots: Any,
    cache: Any,
    query_norm: Any,
    key_norm: Any,
    queries: Any,
    kv: Any,
    dim: Any,
    eps: Any,
) -> None:
    """This thread's share of: queries and keys, under their norms if there are any, turned, and keys and
    values written. angles: tables of cos and sin, by position, and each row's position; cache: keys, values.
    """
    columns, size, done = (queries + UINT(2) * kv) * dim, dim * UINT(2), UINT(0)
    positions, places = carray(ints(angles[2]), (rows,)), carray(ints(slots), (rows,))
    while True:
        row = claimed(board, phase)
        if row >= rows:
            break
        done += UINT(1)
        at, turn = qkv + row * columns * UINT(2), UINT(positions[row]) * size
        if query_norm:
            for head in range(queries + kv):
                weight = query_norm if head < queries else key_norm
                normed_row(at + head * size, weight, dim, eps, at + head * size)
        cos, sin, slot = UINT(angles[0]) + turn, UINT(angles[1]) + turn, UINT(places[row])
        turn_and_write(at, cos, sin, slot, cache[0], cache[1], queries, kv, dim)
    finish(board, phase, done, rows)


@njit(**OPTIONS)
def attended(
    board: Any,
    phase: Any,
    q: Any,
    q_row: Any,
    q_head: Any,
    cache: Any,
    out: Any,
    count: Any,
    seen: Any,
    queries: Any,
    kv: Any,
    dim: Any,
    value_dim: Any,
    scale: Any,
    window: Any,
    scratch: Any,
) -> None:
    """This thread's share of attention, from so many units of rows. cache: keys, values. seen: where units,
    slots, prefix, tail_at and tails are, then cap, most, longest and together; all as attend has them.
    """
    done, together = UINT(0), UINT(seen[8])
    groups = (UINT(kv) + together - UINT(1)) // together
    all_, own = UINT(count) * groups, UINT(scratch) + UINT(SUMS_BYTES)
    while True:
        unit = claimed(UINT(board), UINT(phase))
        if unit >= all_:
            break
        done += UINT(1)
        head = unit % groups * together
        attend(
            q,
            q_row,
            q_head,
            cache[0],
            cache[1],
            out,
            UINT(seen[0]) + unit // groups * UINT(32),
            seen[1],
            seen[2],
            seen[3],
            seen[4],
            queries,
            kv,
            head,
            min(together, UINT(kv) - head),
            dim,
            value_dim,
            scale,
            window,
            own,
            seen[5],
            seen[6],
            seen[7],
        )
    finish(UINT(board), UINT(phase), done, all_)


def own_bytes(attending: int = 0, rows: int = 0, inputs: int = 0) -> int:
    """Return how many bytes a thread works in; attending: what attend works in; rows, inputs: the most of a
    product.
    """
    multiplying = 4 * min(rows, ROWS) * inputs if WIDENED else 0
    return SUMS_BYTES + max(attending, multiplying)
