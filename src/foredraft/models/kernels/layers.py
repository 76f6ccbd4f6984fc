"""All layers of a decoder in one call that several threads share, in bfloat16.

A layer is eight phases (kernels/phases.py): norm; queries, keys and values; their angles and the cache;
attention; its output; norm; gate and up; down. Behind the last layer: the last norm, the rows whose logits
are wanted, and these.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from foredraft.models.kernels.numbers import OPTIONS, UINT, ints
from foredraft.models.kernels.one_row import copied
from foredraft.models.kernels.phases import (
    PUT,
    PUT_GELU,
    PUT_MORE,
    PUT_SILU,
    attended,
    norms,
    product,
    turned,
)
from foredraft.models.kernels.share import claimed, finish

PHASES, ENDING = 8, 3  # of a layer, and behind the last one

# What a layer is, by address where it is not a number.
FIELDS = 16
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
) = range(FIELDS)


@njit(**OPTIONS)
def run_layers(
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
    """Do a thread's share of a pass.

    layers: int64 [layers, FIELDS]; a norm is float32, a bias float32 of whole tiles, the others tiles; a norm
    that is 0 there is not done. caches: int64 [layers, 2], keys and values. angles: int64 [kinds, 3], as
    `turned` has them. copies: int64 [layers + 1], where each layer's input goes, bfloat16 [rows, hidden], the
    last of them the output under the last norm; 0: nowhere. ending: the last norm, the output layer and its
    bias. sizes: rows, hidden, inner, query heads, key heads, dim, vocabulary, wanted rows, whether the
    activation is gelu, where the rows are written, units of rows. work: the board, then x, normed, qkv,
    attended, gated and more, then the wanted rows, what is gathered of them, and logits. seen: as `attended`
    has it. scratch: this thread's own, as own_bytes says.
    """
    board, x, normed, qkv = UINT(work[0]), UINT(work[1]), UINT(work[2]), UINT(work[3])
    attending, gated, more = UINT(work[4]), UINT(work[5]), UINT(work[6])
    gathered, logits = UINT(work[8]), UINT(work[9])
    rows, hidden, inner = UINT(sizes[0]), UINT(sizes[1]), UINT(sizes[2])
    queries, kv, dim = UINT(sizes[3]), UINT(sizes[4]), UINT(sizes[5])
    vocab, outputs, gelu = UINT(sizes[6]), UINT(sizes[7]), UINT(sizes[8])
    columns, two = (queries + UINT(2) * kv) * dim, UINT(2)
    wanted = carray(ints(work[7]), (outputs,))
    own, written, units, count = UINT(scratch), UINT(sizes[9]), UINT(sizes[10]), UINT(len(layers))
    for phase in range(count * UINT(PHASES) + UINT(ENDING)):
        index, step = phase // UINT(PHASES), phase % UINT(PHASES)
        if index == count:
            if step == UINT(0):
                after = UINT(layers[index - UINT(1), _AFTER_MLP])
                copy = UINT(copies[index])
                norms(board, phase, x, more, after, UINT(ending[0]), rows, hidden, eps, normed, copy, True)
            elif step == UINT(1):
                done = UINT(0)
                while True:
                    row = claimed(board, phase)
                    if row >= outputs:
                        break
                    done += UINT(1)
                    size = hidden * two
                    copied(normed + UINT(wanted[row]) * size, gathered + row * size, hidden)
                finish(board, phase, done, outputs)
            else:
                product(
                    board,
                    phase,
                    gathered,
                    outputs,
                    hidden,
                    UINT(ending[1]),
                    UINT(0),
                    UINT(ending[2]),
                    vocab,
                    logits,
                    UINT(PUT),
                    own,
                )
            continue
        layer = layers[index]
        if step == UINT(0):
            after = UINT(layers[index - UINT(1), _AFTER_MLP]) if index else UINT(0)
            copy = UINT(copies[index])
            norms(board, phase, x, more, after, UINT(layer[_NORM]), rows, hidden, eps, normed, copy, False)
        elif step == UINT(2):
            query_norm, key_norm = UINT(layer[_QUERY_NORM]), UINT(layer[_KEY_NORM])
            angle, cache = angles[layer[_ANGLES]], caches[index]
            turned(
                board, phase, qkv, rows, angle, written, cache, query_norm, key_norm, queries, kv, dim, eps
            )
        elif step == UINT(3):
            window, cache = layer[_WINDOW], caches[index]
            attended(
                board,
                phase,
                qkv,
                columns,
                dim,
                cache,
                attending,
                units,
                seen,
                queries,
                kv,
                dim,
                dim,
                scale,
                window,
                own,
            )
        elif step == UINT(5):
            after = UINT(layer[_AFTER_ATTENTION])
            weight = UINT(layer[_MLP_NORM])
            norms(board, phase, x, more, after, weight, rows, hidden, eps, normed, UINT(0), False)
        else:
            if step == UINT(1):
                source, inputs, to, width = normed, hidden, qkv, columns
                weights, bias, how = layer[_QKV], layer[_QKV_BIAS], UINT(PUT)
            elif step == UINT(4):
                source, inputs, to, width = attending, queries * dim, x, hidden
                weights, bias, how = layer[_OUT], layer[_OUT_BIAS], UINT(PUT_MORE)
                if layer[_AFTER_ATTENTION]:
                    to, how = more, UINT(PUT)
            elif step == UINT(6):
                source, inputs, to, width = normed, hidden, gated, inner
                weights, bias = layer[_GATE_UP], layer[_GATE_UP_BIAS]
                how = UINT(PUT_GELU) if gelu else UINT(PUT_SILU)
            else:
                source, inputs, to, width = gated, inner, x, hidden
                weights, bias, how = layer[_DOWN], layer[_DOWN_BIAS], UINT(PUT_MORE)
                if layer[_AFTER_MLP]:
                    to, how = more, UINT(PUT)
            product(
                board, phase, source, rows, inputs, UINT(weights), UINT(0), UINT(bias), width, to, how, own
            )
