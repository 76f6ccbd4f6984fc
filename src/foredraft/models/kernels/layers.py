"""All layers of a decoder in one call that several threads share, in bfloat16.

A layer is eight phases, each of units that do not depend on each other: norm; queries, keys and values; their
angles and the cache; attention; its output; norm; gate and up; down. Behind the last layer: the last norm,
the rows whose logits are wanted, and these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from foredraft.models.kernels.attend import attend
from foredraft.models.kernels.dense import AT_ONCE, WIDTH, tile_sums
from foredraft.models.kernels.glue import turn_and_write
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
from foredraft.models.kernels.share import claimed, finish

PHASES, ENDING = 8, 3  # of a layer, and behind the last one
ATTEND = 3  # the phase after which other rows may attend
ROWS = 64  # of a product that are one unit
HALF = WIDTH // 2
_FAR = UINT(1) << UINT(40)

# What a layer is, by address where it is not a number.
FIELDS = (
    "norm",
    "qkv",
    "qkv_bias",
    "query_norm",
    "key_norm",
    "out",
    "out_bias",
    "after_attention",
    "mlp_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "after_mlp",
    "window",
    "angles",
)
(
    _NORM,
    _QKV,
    _QKV_BIAS,
    _QUERY_NORM,
    _KEY_NORM,
    _OUT,
    _OUT_BIAS,
    _AFTER_ATTENTION,
    _MLP_NORM,
    _GATE_UP,
    _GATE_UP_BIAS,
    _DOWN,
    _DOWN_BIAS,
    _AFTER_MLP,
    _WINDOW,
    _ANGLES,
) = range(len(FIELDS))


@njit(fastmath=True, **OPTIONS)
def _normed(x: Any, weight: Any, width: Any, eps: Any, out: Any) -> None:
    """One row of bfloat16 [width] under a norm of float32 weights, by address; out may be x."""
    a, w, o = carray(halves(x), (width,)), carray(floats(weight), (width,)), carray(halves(out), (width,))
    total = F32(0)
    for i in range(width):
        total += load(a[i]) * load(a[i])
    scale = F32(1) / np.sqrt(total / F32(width) + F32(eps))
    for i in range(width):
        o[i] = to_half(load(a[i]) * scale * w[i])


@njit(fastmath=STEADY, **OPTIONS)
def _grown(x: Any, more: Any, width: Any) -> None:
    """x += more, bfloat16 [width], by address."""
    a, b = carray(halves(x), (width,)), carray(halves(more), (width,))
    for i in range(width):
        a[i] = to_half(load(a[i]) + load(b[i]))


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


_PUT, _PUT_MORE, _PUT_SILU, _PUT_GELU = range(4)


@njit(**OPTIONS)
def _product(
    board: Any,
    phase: Any,
    x: Any,
    rows: Any,
    inputs: Any,
    weights: Any,
    bias: Any,
    outputs: Any,
    out: Any,
    how: Any,
    scratch: Any,
) -> None:
    """Of rows [rows, inputs] and tiles of weights this thread's share; out: [rows, outputs]."""
    gated = how >= UINT(_PUT_SILU)
    width = UINT(HALF) if gated else UINT(WIDTH)
    count, chunks = (outputs + width - UINT(1)) // width, (rows + UINT(ROWS - 1)) // UINT(ROWS)
    done, units, apart = UINT(0), count * chunks, inputs * UINT(2)
    while True:
        unit = claimed(board, phase)
        if unit >= units:
            break
        done += UINT(1)
        tile, first = unit // chunks, unit % chunks * UINT(ROWS)
        column, from_ = tile * width, bias + tile * UINT(4 * WIDTH)
        some, last = min(width, outputs - column), min(rows, first + UINT(ROWS))
        for row in range(first, last, UINT(AT_ONCE)):
            few = min(UINT(AT_ONCE), last - row)
            tile_sums(
                x + row * apart,
                apart,
                few,
                weights + tile * apart * UINT(WIDTH),
                inputs // UINT(2),
                scratch,
            )
            to = out + (row * outputs + column) * UINT(2)
            if gated:
                _put_gated(scratch, from_, few, some, to, outputs, how == UINT(_PUT_GELU))
            elif how == UINT(_PUT):
                _put(scratch, from_, few, some, to, outputs)
            else:
                _put_more(scratch, from_, few, some, to, outputs)
    finish(board, phase, done, units)


@njit(**OPTIONS)
def _norms(
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
    copied: Any,
) -> None:
    """This thread's share of: x += more under the norm `after`, if there is one; copy x; out = x under the
    norm `weight`, or copy that.
    """
    done, size = UINT(0), hidden * UINT(2)
    while True:
        row = claimed(board, phase)
        if row >= rows:
            break
        done += UINT(1)
        at = row * size
        if after:
            _normed(more + at, after, hidden, eps, more + at)
            _grown(x + at, more + at, hidden)
        _normed(x + at, weight, hidden, eps, out + at)
        if copy:
            _copied((out if copied else x) + at, copy + at, hidden)
    finish(board, phase, done, rows)


@njit(**OPTIONS)
def _copied(source: Any, target: Any, width: Any) -> None:
    a, b = carray(halves(source), (width,)), carray(halves(target), (width,))
    for i in range(width):
        b[i] = a[i]


@njit(**OPTIONS)
def run_layers(
    first: Any,
    last: Any,
    layers: Any,
    caches: Any,
    angles: Any,
    copies: Any,
    ending: Any,
    sizes: Any,
    work: Any,
    seen: Any,
    eps: Any,
    scale: Any,
    scratch: Any,
) -> None:
    """Do a thread's share of the phases first … last - 1.

    layers: int64 [layers, FIELDS]; a norm is float32, a bias float32 of whole tiles, the others tiles; a norm
    that is 0 there is not done. caches: int64 [layers, 2], keys and values. angles: int64 [kinds, 2], cos and
    sin as turn_and_write has them. copies: int64 [layers + 1], where each layer's input goes, bfloat16 [rows,
    hidden], the last of them the output under the last norm; 0: nowhere. ending: the last norm, the output
    layer and its bias. sizes: rows, hidden, inner, query heads, key heads, dim, vocabulary, wanted rows,
    whether the activation is gelu. work: the board, then x, normed, qkv, attended, gated and more, then the
    wanted rows, what is gathered of them, and logits. seen: as in head_pass, without scratch. scratch: this
    thread's own, as own_bytes says.
    """
    board, x, normed, qkv, attended = (
        UINT(work[0]),
        UINT(work[1]),
        UINT(work[2]),
        UINT(work[3]),
        UINT(work[4]),
    )
    gated, more, gathered, logits = UINT(work[5]), UINT(work[6]), UINT(work[8]), UINT(work[9])
    rows, hidden, inner = UINT(sizes[0]), UINT(sizes[1]), UINT(sizes[2])
    queries, kv, dim = UINT(sizes[3]), UINT(sizes[4]), UINT(sizes[5])
    vocab, outputs, gelu = UINT(sizes[6]), UINT(sizes[7]), UINT(sizes[8])
    columns, two, eight = (queries + UINT(2) * kv) * dim, UINT(2), UINT(8)
    wanted = carray(ints(work[7]), (outputs,))
    own = UINT(scratch) + UINT(4 * AT_ONCE * WIDTH)
    spans = UINT(seen[2])
    count = UINT(len(layers))
    for phase in range(UINT(first), UINT(last)):
        index, step = phase // UINT(PHASES), phase % UINT(PHASES)
        if index == count:
            if step == UINT(0):
                after = UINT(layers[index - UINT(1), _AFTER_MLP])
                copy = UINT(copies[index])
                _norms(board, phase, x, more, after, UINT(ending[0]), rows, hidden, eps, normed, copy, True)
            elif step == UINT(1):
                done = UINT(0)
                while True:
                    row = claimed(board, phase)
                    if row >= outputs:
                        break
                    done += UINT(1)
                    size = hidden * two
                    _copied(normed + UINT(wanted[row]) * size, gathered + row * size, hidden)
                finish(board, phase, done, outputs)
            else:
                _product(
                    board,
                    phase,
                    gathered,
                    outputs,
                    hidden,
                    UINT(ending[1]),
                    UINT(ending[2]),
                    vocab,
                    logits,
                    UINT(_PUT),
                    UINT(scratch),
                )
            continue
        layer = layers[index]
        if step == UINT(0):
            after = UINT(layers[index - UINT(1), _AFTER_MLP]) if index else UINT(0)
            copy = UINT(copies[index])
            _norms(board, phase, x, more, after, UINT(layer[_NORM]), rows, hidden, eps, normed, copy, False)
        elif step == UINT(2):
            angle = angles[layer[_ANGLES]]
            done = UINT(0)
            while True:
                row = claimed(board, phase)
                if row >= rows:
                    break
                done += UINT(1)
                at, turn = qkv + row * columns * two, row * dim * two
                if layer[_QUERY_NORM]:
                    for head in range(queries + kv):
                        weight = UINT(layer[_QUERY_NORM] if head < queries else layer[_KEY_NORM])
                        _normed(at + head * dim * two, weight, dim, eps, at + head * dim * two)
                turn_and_write(
                    at,
                    UINT(angle[0]) + turn,
                    UINT(angle[1]) + turn,
                    UINT(seen[0]) + row * eight,
                    caches[index, 0],
                    caches[index, 1],
                    1,
                    queries,
                    kv,
                    dim,
                )
            finish(board, phase, done, rows)
        elif step == UINT(ATTEND):
            done = UINT(0)
            while True:
                unit = claimed(board, phase)
                if unit >= spans * kv:
                    break
                done += UINT(1)
                attend(
                    qkv,
                    columns,
                    dim,
                    caches[index, 0],
                    caches[index, 1],
                    attended,
                    UINT(seen[1]) + unit // kv * UINT(32),
                    1,
                    seen[3],
                    seen[4],
                    seen[5],
                    seen[6],
                    queries,
                    kv,
                    unit % kv,
                    unit % kv + UINT(1),
                    dim,
                    dim,
                    scale,
                    layer[_WINDOW],
                    own,
                    seen[7],
                    seen[8],
                )
            finish(board, phase, done, spans * kv)
        elif step == UINT(5):
            after = UINT(layer[_AFTER_ATTENTION])
            weight = UINT(layer[_MLP_NORM])
            _norms(board, phase, x, more, after, weight, rows, hidden, eps, normed, UINT(0), False)
        else:
            if step == UINT(1):
                source, inputs, to, width = normed, hidden, qkv, columns
                weights, bias, how = layer[_QKV], layer[_QKV_BIAS], UINT(_PUT)
            elif step == UINT(4):
                source, inputs, to, width = attended, queries * dim, x, hidden
                weights, bias, how = layer[_OUT], layer[_OUT_BIAS], UINT(_PUT_MORE)
                if layer[_AFTER_ATTENTION]:
                    to, how = more, UINT(_PUT)
            elif step == UINT(6):
                source, inputs, to, width = normed, hidden, gated, inner
                weights, bias = layer[_GATE_UP], layer[_GATE_UP_BIAS]
                how = UINT(_PUT_GELU) if gelu else UINT(_PUT_SILU)
            else:
                source, inputs, to, width = gated, inner, x, hidden
                weights, bias, how = layer[_DOWN], layer[_DOWN_BIAS], UINT(_PUT_MORE)
                if layer[_AFTER_MLP]:
                    to, how = more, UINT(_PUT)
            _product(
                board, phase, source, rows, inputs, UINT(weights), UINT(bias), width, to, how, UINT(scratch)
            )


def own_bytes(attending: int) -> int:
    """Return how many bytes a thread works in; attending: what attend works in, in numbers."""
    return 4 * (AT_ONCE * WIDTH + attending)
