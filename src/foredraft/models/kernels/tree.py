"""A draft tree grown by confidence (EAGLE-2, arXiv 2406.16858, section 4): the likeliest tokens after each
row, which of them are fed next, and how their rows are laid out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from foredraft.models.kernels.luck import gumbels
from foredraft.models.kernels.numbers import (
    F32,
    I32,
    LOG2E,
    OPTIONS,
    U32,
    UINT,
    bits_of,
    exp2,
    float_of,
    floats,
)

LEVELS = 8  # the deepest draft
BEST = 4  # nodes of a level that are fed, and candidates below each
FED, CANDIDATES = BEST * LEVELS, BEST + BEST * BEST * (LEVELS - 1)
_CHUNK = 64  # logits whose highest is kept
_LOWEST = F32(-3e38)

# What is kept of a sequence: how many rows wait, the position of the first of them, where its slots begin,
# nodes and levels it may have, and how many nodes may be fed. Then, as the tree grows: whether it does,
# candidates, nodes fed, of these the level's first and the next one's, the level's first row and wanted row.
SEQ_FIELDS = 13
_WAITING, _FIRST, _SLOTS, _BUDGET, _LEFT, _ROOM = range(6)
ACTIVE, FOUND, TAKEN, _FRONT, _DONE, _ROW, _WANTED = range(6, SEQ_FIELDS)


@njit(**OPTIONS)
def _highest(row: Any) -> Any:
    """The highest of float32, found by their bits in the order of the numbers, which compilers do at once."""
    found = I32(-0x80000000)
    for i in range(len(row)):
        bits = I32(bits_of(row[i]))
        found = max(found, I32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return float_of(U32(found ^ ((found >> 31) & 0x7FFFFFFF)))


@njit(fastmath=True, **OPTIONS)
def _total(row: Any, highest: Any) -> Any:
    total = F32(0)
    for i in range(len(row)):
        total += exp2((row[i] - highest) * F32(LOG2E))
    return total


@njit(**OPTIONS)
def _first_of(row: Any, first: Any, last: Any, value: Any) -> Any:
    for i in range(first, last):
        if row[i] == value:
            return i
    return last - 1


@njit(**OPTIONS)
def _add_best(row: Any, ids: Any, node: Any, above: Any, seq: Any, found: Any) -> None:
    """Add the likeliest tokens after a node, -1 for the root, to a sequence's candidates. row: float32
    [vocab], which loses these.
    """
    tokens, parents, scores = found
    vocab = len(row)
    chunks = (vocab + _CHUNK - 1) // _CHUNK
    highs = np.empty(chunks, np.float32)
    for chunk in range(chunks):
        highs[chunk] = _highest(row[chunk * _CHUNK : (chunk + 1) * _CHUNK])
    highest = _highest(highs)
    least = np.log(_total(row, highest))
    for _ in range(min(BEST, vocab)):
        high = _highest(highs)
        chunk = _first_of(highs, 0, chunks, high)
        begin, end = chunk * _CHUNK, min(vocab, (chunk + 1) * _CHUNK)
        best, at = _first_of(row, begin, end, high), seq[FOUND]
        tokens[at], parents[at] = ids[best], node
        scores[at] = above + high - highest - least
        seq[FOUND] = at + 1
        row[best] = _LOWEST
        highs[chunk] = _highest(row[begin:end])


@njit(**OPTIONS)
def _choose(seq: Any, first: Any, scores: Any, fed: Any, worth: Any) -> None:
    """Mark for the next level the best of the newest candidates, from `first` on, below which others can
    still get into the draft; none if the chance that one of them is right is not worth a level.
    """
    count, budget = seq[FOUND], seq[_BUDGET]
    if seq[_LEFT] <= 0:
        return
    least = np.sort(scores[:count])[count - budget] if count >= budget else -np.inf
    newest = first + np.argsort(-scores[first:count], kind="mergesort")
    chosen, chance = 0, 0.0
    for candidate in newest[: max(0, min(BEST, seq[_ROOM] - seq[TAKEN]))]:
        if scores[candidate] > least:
            fed[seq[TAKEN] + chosen] = candidate
            chosen += 1
            chance += np.exp(scores[candidate])
    if chance >= worth:
        seq[TAKEN] += chosen


@njit(**OPTIONS)
def grow(
    seq: Any, logits: Any, vocab: Any, luck: Any, key: Any, ids: Any, found: Any, fed: Any, worth: Any
) -> None:
    """Take in a level of one sequence. logits: float32 [wanted rows, vocab], by address. luck: how much the
    noise of `key` counts.
    """
    seq[_LEFT] -= 1
    lucky = np.empty(len(ids) if luck > 0 else 0, np.float32)
    gumbels(key, ids, lucky)
    first, nodes = seq[FOUND], seq[_DONE] - seq[_FRONT]
    for place in range(max(nodes, 1)):
        node = seq[_FRONT] + place if nodes else -1
        above = found[2][fed[node]] if nodes else 0.0
        at = UINT(logits) + UINT(seq[_WANTED] + place) * UINT(vocab) * UINT(4)
        row = carray(floats(at), (vocab,))
        for i in range(len(lucky)):
            row[i] += F32(luck) * lucky[i]
        _add_best(row, ids, node, above, seq, found)
    _choose(seq, first, found[2], fed, worth)


@njit(**OPTIONS)
def lay_out_first(seqs: Any, slots: Any, rows: Any, spans: Any, state: Any) -> None:
    """Lay out the rows that wait, of sequences that may grow and of others, whose cache alone is written.

    rows: token, which is there already, position, slot, how many of its slots a row sees, where its tail
    begins, from which row of the level before it goes on, and which rows' logits are wanted: int64 [7, rows +
    1]. spans: as attend has them. state: rows, wanted rows, spans.
    """
    row, count = 0, 0
    for s in range(len(seqs)):
        seq = seqs[s]
        waiting, first, begin = seq[_WAITING], seq[_FIRST], seq[_SLOTS]
        seq[ACTIVE], seq[_ROW], seq[_WANTED] = seq[_LEFT] > 0, row, count
        if seq[ACTIVE]:
            spans[count, 0], spans[count, 1] = row, waiting
            spans[count, 2], spans[count, 3] = begin, first + waiting
            rows[6, count] = row + waiting - 1
            count += 1
        for i in range(waiting):
            rows[1, row], rows[2, row] = first + i, slots[begin + first + i]
            rows[3, row], rows[4, row] = first + i + 1, 0
            row += 1
    rows[4, row] = 0
    state[0], state[1], state[2] = row, count, count


@njit(**OPTIONS)
def lay_out_next(
    seqs: Any, found: Any, fed: Any, slots: Any, rows: Any, tails: Any, spans: Any, state: Any
) -> None:
    """Lay out the rows of the nodes that are fed next, likewise; each sees its text and its own path."""
    tokens, parents = found[0], found[1]
    row, tail, count = 0, 0, 0
    for s in range(len(seqs)):
        seq = seqs[s]
        front, done, length = seq[_FRONT], seq[_DONE], seq[_FIRST] + seq[_WAITING]
        # Where the row of node 0, or -1, is: the root's is the last that waited, nodes follow each other.
        before = seq[_ROW] - front if done else seq[_ROW] + seq[_WAITING]
        seq[ACTIVE], seq[_FRONT], seq[_DONE] = seq[TAKEN] > done, done, seq[TAKEN]
        seq[_ROW], seq[_WANTED] = row, row
        if seq[ACTIVE]:
            spans[count, 0], spans[count, 1] = row, seq[TAKEN] - done
            spans[count, 2], spans[count, 3] = seq[_SLOTS], length + seq[TAKEN]
            count += 1
        for node in range(done, seq[TAKEN]):
            depth, above = 0, node
            while above >= 0:
                depth, above = depth + 1, parents[s, fed[s, above]]
            rows[0, row], rows[1, row] = tokens[s, fed[s, node]], length - 1 + depth
            rows[2, row], rows[3, row] = slots[seq[_SLOTS] + length + node], length
            rows[4, row], rows[5, row], rows[6, row] = tail, before + parents[s, fed[s, node]], row
            tail, above = tail + depth, node
            for place in range(depth):
                tails[tail - 1 - place] = length + above
                above = parents[s, fed[s, above]]
            row += 1
    rows[4, row] = tail
    state[0], state[1], state[2] = row, row, count
