"""Products of rows with weights laid out in tiles: every row's sums run over its inputs in order, by pairs,
so that a row has the same bits whatever else the pass holds.

A tile is WIDTH outputs, [inputs / 2, WIDTH, 2]: its weights are read once, in a row, and the sums of up to
AT_ONCE rows stay in registers meanwhile. Where pairs are widened, rows are WIDENED once for many tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from foredraft.models.kernels import matrix
from foredraft.models.kernels.matrix import HAS_UNIT, matrix_sums
from foredraft.models.kernels.numbers import OPTIONS, UINT
from foredraft.models.kernels.pairs import IS_WIDE, WIDENED, pair_sums

# Where sums by pairs are fast, asking for the next tile while one is multiplied was slower.
ASKS = WIDENED
_LANES, _VECTORS = 16, 3 if IS_WIDE else 2
WIDTH = _LANES * _VECTORS
SMALL_AT_ONCE, OFFSET = 4, 128 + 64
AT_ONCE = 8 if IS_WIDE else 6  # as many sums as there are registers for
SUMS_BYTES = 4 * max(AT_ONCE, SMALL_AT_ONCE, matrix.AT_ONCE if HAS_UNIT else 0) * WIDTH
_ROW, _BYTE_ROW = UINT(4 * WIDTH), UINT(2 * WIDTH)  # bytes of a row of a tile, also of sums; of one of bytes
_one, _two, _three, _four, _five, _six, _seven, _eight = (  # those of more than AT_ONCE are never called
    pair_sums(min(rows, AT_ONCE), _VECTORS, _LANES, fresh=True, asks=ASKS) for rows in range(1, 9)
)
_by_unit = matrix_sums(_VECTORS) if HAS_UNIT else _one  # which is never called
_UNIT_ROWS, _UNIT_PAIRS = UINT(matrix.AT_ONCE), UINT(matrix.PAIRS)


@njit(inline="always")
def _has_unit(pairs: Any) -> Any:
    """True where the matrix unit multiplies rows of so many pairs."""
    return HAS_UNIT and pairs % _UNIT_PAIRS == UINT(0)


@njit(inline="always")
def share_of(left: Any, small: Any, pairs: Any) -> Any:
    """Return how many of so many rows are multiplied next, by tiles of bytes if `small`. With few registers
    four and five are the fastest.
    """
    if not small and _has_unit(pairs):
        return min(left, _UNIT_ROWS)
    most = UINT(SMALL_AT_ONCE) if small else UINT(AT_ONCE)
    if left <= most or IS_WIDE or small:
        return min(left, most)
    return UINT(5) if UINT(9) <= left <= UINT(10) else UINT(4)


@njit(inline="always")
def shares_of(left: Any, small: Any, pairs: Any) -> Any:
    """Return in how many shares so many rows are multiplied."""
    shares = UINT(0)
    while left:
        left -= share_of(left, small, pairs)
        shares += UINT(1)
    return shares


@njit(**OPTIONS)
def tile_sums(
    x: Any, apart: Any, rows: Any, weights: Any, pairs: Any, out: Any, ahead: Any, step: Any
) -> None:
    """Sums of as many rows as share_of says, `apart` bytes from each other, over a tile; out: float32 [rows,
    WIDTH]. The rows are float32 if WIDENED. If it ASKS, then for the tile that is `ahead`: see pair_sums.
    """
    if _has_unit(pairs):
        _by_unit(x, apart, rows, weights, _ROW, pairs, out, _ROW)
    elif rows == UINT(1):
        _one(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(2):
        _two(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(3):
        _three(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(4):
        _four(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(5):
        _five(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(6):
        _six(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(7):
        _seven(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)
    else:
        _eight(x, apart, weights, _ROW, pairs, out, _ROW, ahead, step)


_one_small, _two_small, _three_small, _four_small = (
    pair_sums(rows, _VECTORS, _LANES, fresh=True, of_bytes=True, asks=ASKS) for rows in range(1, 5)
)


@njit(**OPTIONS)
def byte_sums(
    x: Any, apart: Any, rows: Any, weights: Any, pairs: Any, out: Any, ahead: Any, step: Any
) -> None:
    """The same for up to SMALL_AT_ONCE rows over a tile of bytes, each of which counts OFFSET too much."""
    if rows == UINT(1):
        _one_small(x, apart, weights, _BYTE_ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(2):
        _two_small(x, apart, weights, _BYTE_ROW, pairs, out, _ROW, ahead, step)
    elif rows == UINT(3):
        _three_small(x, apart, weights, _BYTE_ROW, pairs, out, _ROW, ahead, step)
    else:
        _four_small(x, apart, weights, _BYTE_ROW, pairs, out, _ROW, ahead, step)


def tiles(outputs: int) -> int:
    """Return how many tiles so many outputs take."""
    return -(-outputs // WIDTH)


def laid_out(weight: Tensor) -> Tensor:
    """Return weight [outputs, inputs], an even number of these, in tiles: [tiles, inputs / 2, WIDTH, 2]."""
    outputs, inputs = weight.shape
    missing = -outputs % WIDTH
    whole = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return whole.view(-1, WIDTH, inputs // 2, 2).transpose(1, 2)


def in_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [outputs, inputs] in tiles of bytes, 64 more than whole numbers from -64 to 63, and what
    these are multiplied by, float32 [tiles * WIDTH].
    """
    scales = weight.float().abs().amax(1).clamp(min=1e-12) / 63
    whole = (weight.float() / scales[:, None]).round().clamp(-64, 63) + 64
    return laid_out(whole.to(torch.uint8)), F.pad(scales, (0, -len(scales) % WIDTH))


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up [width, inputs] such that each tile has half of either: [tiles * WIDTH, inputs]."""
    half = WIDTH // 2
    parts = [F.pad(w, (0, 0, 0, -len(w) % half)).view(-1, half, w.shape[1]) for w in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)
