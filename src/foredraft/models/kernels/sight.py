"""What each row of a batch sees of the cache, laid out for `attend`."""

from __future__ import annotations

from typing import Any

from numba import njit

from foredraft.engine.pool import BLOCK
from foredraft.models.kernels.numbers import OPTIONS

UNIT = 4  # rows that attend together
SPAN_FIELDS = 6
(_START, _PENDING, _KV_LEN, _CACHED, _NODES, _BLOCKS) = range(SPAN_FIELDS)


@njit(**OPTIONS)
def _units(found: Any, count: Any, first: Any, last: Any, at: Any, length: Any, growing: Any) -> Any:
    """Add the units of some rows; growing: each row sees one position more than the one before it, the last
    one `length`.
    """
    for row in range(first, last, UNIT):
        end = min(last, row + UNIT)
        found[count, 0], found[count, 1], found[count, 2] = row, end - row, at
        found[count, 3] = length - (last - end) if growing else length
        count += 1
    return count


@njit(**OPTIONS)
def lay_out(
    spans: Any,
    parents: Any,
    blocks: Any,
    slots: Any,
    written: Any,
    prefix: Any,
    tail_at: Any,
    tails: Any,
    units: Any,
) -> tuple[int, int, int]:
    """Lay out the rows of some sequences.

    spans: int64 [sequences, SPAN_FIELDS], first row, pending tokens, positions in the cache, nodes in it, all
    nodes, and where its blocks begin in `blocks`; parents: of all nodes. Fills slots of all positions, one
    sequence after another, where each row is written, and what attend is told: units [·, 4], prefix, tail_at
    and tails. Returns how many units there are, the longest text and the longest tail.
    """
    at, parent_at, tail, count, longest, deepest = 0, 0, 0, 0, 0, 0
    for s in range(len(spans)):
        span = spans[s]
        start, pending, kv_len = span[_START], span[_PENDING], span[_KV_LEN]
        cached, nodes = span[_CACHED], span[_NODES]
        text, length = kv_len + pending, kv_len + pending + nodes
        for pos in range(length):
            slots[at + pos] = blocks[span[_BLOCKS] + pos // BLOCK] * BLOCK + pos % BLOCK
        rows = length - kv_len - cached
        for row in range(rows):
            written[start + row] = slots[at + kv_len + cached + row]
        chain = True
        for node in range(nodes):
            chain &= parents[parent_at + node] == node - 1
        for row in range(pending):
            prefix[start + row], tail_at[start + row] = kv_len + row + 1, tail
        for node in range(cached, nodes):
            row = start + pending + node - cached
            prefix[row], tail_at[row] = text + node + 1 if chain else text, tail
            if not chain:
                depth, above = 0, node
                while above >= 0:
                    depth, above = depth + 1, parents[parent_at + above]
                above = node
                for place in range(depth):
                    tails[tail + depth - 1 - place] = text + above
                    above = parents[parent_at + above]
                tail, deepest = tail + depth, max(deepest, depth)
        if pending <= UNIT:
            count = _units(units, count, start, start + rows, at, length, False)
        else:
            count = _units(units, count, start, start + pending, at, text, True)
            count = _units(units, count, start + pending, start + rows, at, length, False)
        longest = max(longest, length)
        at, parent_at = at + length, parent_at + nodes
        tail_at[start + rows] = tail
    return count, longest, deepest
