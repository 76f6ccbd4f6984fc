"""An EAGLE head's tree, all levels of it, in one call that several threads share.

A level feeds rows: the head's layer, its logits after the rows that are wanted, the likeliest tokens of
these, and which of them are fed next (arXiv 2406.16858, section 4). A head's passes are short, so that what
lay between them in Python took longer.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from foredraft.models.kernels.numbers import OPTIONS, UINT
from foredraft.models.kernels.one_row import copied, normed_row
from foredraft.models.kernels.phases import (
    PUT,
    PUT_FLOATS,
    PUT_MORE,
    PUT_SILU,
    attended,
    norms,
    product,
    turned,
)
from foredraft.models.kernels.share import claimed, finish
from foredraft.models.kernels.tree import ACTIVE, LEVELS, grow, lay_out_next

LEVEL_PHASES = 13


@njit(**OPTIONS)
def run_head(
    board: Any,
    head: Any,
    scales: Any,
    sizes: Any,
    buffers: Any,
    cache: Any,
    seqs: Any,
    luck: Any,
    keys: Any,
    found: Any,
    fed: Any,
    slots: Any,
    rows: Any,
    tails: Any,
    spans: Any,
    state: Any,
    ids: Any,
    angles: Any,
    seen: Any,
    eps: Any,
    scale: Any,
    worth: Any,
    scratch: Any,
) -> None:
    """Do a thread's share of growing the trees of some sequences.

    head: addresses of the embedding [vocab, hidden], its norm and that of features, then norms, tiles and a
    bias as in run_layers: fc, qkv, out, MLP norm, gate and up, down, last norm, projection, and zeros.
    scales: those of products in bytes, at the same places. sizes: hidden, inner, query heads, key heads, dim,
    drafted vocabulary, width of what is fused. buffers: of x, twice, normed, qkv, attended, gated, gathered,
    logits, and what is to be fused [first rows, that width]; x is there already if that is 0. seqs: int64
    [seqs, SEQ_FIELDS]; none if one level's logits are all that is wanted. luck:
    float64 [seqs], keys: int64 [seqs, LEVELS], see tree.grow.
    found: tokens, parents and scores of candidates, [seqs, CANDIDATES] each; fed: which of them are fed,
    [seqs, FED]. rows, tails, spans: of a level, as lay_out_first has them; state: of each level. ids: the
    target's of each drafted token. worth: see tree.grow. angles, seen: as turned and attended have them, of
    these rows, tails, spans and slots.
    """
    hidden, inner, queries = UINT(sizes[0]), UINT(sizes[1]), UINT(sizes[2])
    kv, dim, vocab, wide = UINT(sizes[3]), UINT(sizes[4]), UINT(sizes[5]), UINT(sizes[6])
    size, none = UINT(2) * hidden, UINT(head[11])
    x, other, normed, qkv = UINT(buffers[0]), UINT(buffers[1]), UINT(buffers[2]), UINT(buffers[3])
    attending, gated, gathered = UINT(buffers[4]), UINT(buffers[5]), UINT(buffers[6])
    logits, features = UINT(buffers[7]), UINT(buffers[8])
    columns, single, own = (queries + UINT(2) * kv) * dim, UINT(1), UINT(scratch)
    written = UINT(rows[2].ctypes.data)
    for level in range(LEVELS + 1):
        count, wanted, spans_ = UINT(state[level, 0]), UINT(state[level, 1]), UINT(state[level, 2])
        if count == UINT(0):
            return
        at = UINT(level * LEVEL_PHASES)
        if level == 0 and features:
            product(
                board,
                at,
                features,
                count,
                wide,
                UINT(head[3]),
                UINT(scales[3]),
                none,
                hidden,
                x,
                UINT(PUT),
                own,
            )
        done, phase = UINT(0), at + UINT(1)
        while True:
            row = claimed(board, phase)
            if row >= count:
                break
            done += UINT(1)
            if level:
                copied(other + UINT(rows[5, row]) * size, x + row * size, hidden)
            to = normed + row * UINT(2) * size
            normed_row(UINT(head[0]) + UINT(rows[0, row]) * size, UINT(head[1]), hidden, eps, to)
            normed_row(x + row * size, UINT(head[2]), hidden, eps, to + size)
        finish(board, phase, done, count)
        product(
            board,
            at + UINT(2),
            normed,
            count,
            UINT(2) * hidden,
            UINT(head[4]),
            UINT(scales[4]),
            none,
            columns,
            qkv,
            UINT(PUT),
            own,
        )
        turned(
            board, at + UINT(3), qkv, count, angles, written, cache, UINT(0), UINT(0), queries, kv, dim, eps
        )
        if wanted == UINT(0):
            return
        attended(
            board,
            at + UINT(4),
            qkv,
            columns,
            dim,
            cache,
            attending,
            spans_,
            seen,
            queries,
            kv,
            dim,
            dim,
            scale,
            0,
            own,
        )
        product(
            board,
            at + UINT(5),
            attending,
            count,
            queries * dim,
            UINT(head[5]),
            UINT(scales[5]),
            none,
            hidden,
            x,
            UINT(PUT_MORE),
            own,
        )
        norms(board, at + UINT(6), x, x, UINT(0), UINT(head[6]), count, hidden, eps, normed, UINT(0), False)
        product(
            board,
            at + UINT(7),
            normed,
            count,
            hidden,
            UINT(head[7]),
            UINT(scales[7]),
            none,
            inner,
            gated,
            UINT(PUT_SILU),
            own,
        )
        product(
            board,
            at + UINT(8),
            gated,
            count,
            inner,
            UINT(head[8]),
            UINT(scales[8]),
            none,
            hidden,
            x,
            UINT(PUT_MORE),
            own,
        )
        done, phase = UINT(0), at + UINT(9)
        while True:
            row = claimed(board, phase)
            if row >= wanted:
                break
            done += UINT(1)
            normed_row(x + UINT(rows[6, row]) * size, UINT(head[9]), hidden, eps, gathered + row * size)
        finish(board, phase, done, wanted)
        product(
            board,
            at + UINT(10),
            gathered,
            wanted,
            hidden,
            UINT(head[10]),
            UINT(scales[10]),
            none,
            vocab,
            logits,
            UINT(PUT_FLOATS),
            own,
        )
        done, phase, many = UINT(0), at + UINT(11), UINT(len(seqs))
        while True:
            unit = claimed(board, phase)
            if unit >= many:
                break
            done += UINT(1)
            if seqs[unit, ACTIVE]:
                its = (found[0][unit], found[1][unit], found[2][unit])
                grow(seqs[unit], logits, vocab, luck[unit], keys[unit, level], ids, its, fed[unit], worth)
        finish(board, phase, done, many)
        if many == UINT(0):
            return
        done, phase = UINT(0), at + UINT(12)
        if claimed(board, phase) == UINT(0):
            lay_out_next(seqs, found, fed, slots, rows, tails, spans, state[level + 1])
            done = single
        finish(board, phase, done, single)
        x, other = other, x
