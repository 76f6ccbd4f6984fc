"""Products of rows with weights laid out in tiles: every row's sums run over its inputs in order, by pairs,
so that a row has the same bits whatever else the pass holds.

A tile is WIDTH outputs, [inputs / 2, WIDTH, 2]: its weights are read once, in a row, and the sums of up to
AT_ONCE rows stay in registers meanwhile. Where the processor has it, one instruction multiplies and adds 32
pairs of bfloat16 (AVX512-BF16, vdpbf16ps); elsewhere they are widened to float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic
from torch import Tensor

from foredraft.models.kernels.numbers import OPTIONS, UINT

LANES, VECTORS = 16, 3
WIDTH = LANES * VECTORS
# Numba told to compile for another processor (NUMBA_CPU_NAME) gets what every one has.
_features = binding.get_host_cpu_features() if config.CPU_NAME is None else {}
HAS_PAIRS = bool(_features.get("avx512bf16"))
HAS_TILES = bool(_features.get("amx-bf16"))
AT_ONCE = 8 if _features.get("avx512f") else 2  # as many sums as there are registers for

_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
_HIGH = 0xFFFF0000 - (1 << 32)  # the upper half of a word, whose pair partner lies in the lower


class _BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for it."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _spread(build: Any, value: Any, kind: ir.Type) -> Any:
    """Return a vector whose numbers are all `value`."""
    one = build.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    return build.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


def _paired(build: Any, weights: list[Any], pair: Any, sums: list[Any]) -> list[Any]:
    """Return the sums, grown by a pair of inputs times each pair of weights, by the instruction for it."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    grow = cgutils.get_or_insert_function(build.module, kind, name)
    row = build.bitcast(_spread(build, pair, _WORDS), _PAIRS)
    return [
        build.call(grow, [old, build.bitcast(w, _PAIRS), row]) for old, w in zip(sums, weights, strict=True)
    ]


def _widened(build: Any, weights: list[Any], pair: Any, sums: list[Any]) -> list[Any]:
    """The same in float32."""
    name = f"llvm.fma.v{LANES}f32"
    fma = cgutils.get_or_insert_function(build.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), name)
    for low in (True, False):
        number = build.shl(pair, _WORD(16)) if low else build.and_(pair, _WORD(_HIGH))
        row = _spread(build, build.bitcast(number, _FLOAT), _FLOATS)
        for place, w in enumerate(weights):
            by, cut = (build.shl, 16) if low else (build.and_, _HIGH)
            wide = build.bitcast(by(w, ir.Constant(_WORDS, [cut] * LANES)), _FLOATS)
            sums[place] = build.call(fma, [wide, row, sums[place]])
    return sums


def _sums(rows: int) -> Any:
    """Return a kernel(x, apart, weights, pairs, out): the sums of so many rows, `apart` bytes from one to the
    next, over a tile; out: float32 [rows, WIDTH].
    """
    grown = _paired if HAS_PAIRS else _widened

    @intrinsic
    def kernel(_context: Any, x: Any, apart: Any, weights: Any, pairs: Any, out: Any) -> Any:
        def generate(context: Any, build: Any, _signature: Any, args: Any) -> Any:
            x, apart, weights, pairs, out = args

            def number(value: int) -> Any:
                return ir.Constant(pairs.type, value)

            def at(base: Any, offset: Any, kind: ir.Type) -> Any:
                return build.inttoptr(build.add(base, offset), kind.as_pointer())

            none = ir.Constant(_FLOATS, [0.0] * LANES)
            held = [[cgutils.alloca_once_value(build, none) for _ in range(VECTORS)] for _ in range(rows)]
            firsts = [build.add(x, build.mul(number(row), apart)) for row in range(rows)]
            with cgutils.for_range(build, pairs) as loop:
                tile = build.mul(loop.index, number(4 * WIDTH))
                read = [
                    build.load(at(weights, build.add(tile, number(4 * LANES * v)), _WORDS), align=4)
                    for v in range(VECTORS)
                ]
                for first, sums in zip(firsts, held, strict=True):
                    pair = build.load(at(first, build.mul(loop.index, number(4)), _WORD), align=4)
                    for new, sum_ in zip(
                        grown(build, read, pair, [build.load(s) for s in sums]), sums, strict=True
                    ):
                        build.store(new, sum_)
            for row, sums in enumerate(held):
                for v, sum_ in enumerate(sums):
                    to = number(4 * (row * WIDTH + v * LANES))
                    build.store(build.load(sum_), at(out, to, _FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 5), generate

    return kernel


_one, _two = _sums(1), _sums(2)
if AT_ONCE == 8:
    _three, _four, _five, _six, _seven, _eight = (_sums(rows) for rows in range(3, 9))

    @njit(**OPTIONS)
    def tile_sums(x: Any, apart: Any, rows: Any, weights: Any, pairs: Any, out: Any) -> None:
        """Sums of up to AT_ONCE rows over a tile; see _sums."""
        if rows == UINT(1):
            _one(x, apart, weights, pairs, out)
        elif rows == UINT(2):
            _two(x, apart, weights, pairs, out)
        elif rows == UINT(3):
            _three(x, apart, weights, pairs, out)
        elif rows == UINT(4):
            _four(x, apart, weights, pairs, out)
        elif rows == UINT(5):
            _five(x, apart, weights, pairs, out)
        elif rows == UINT(6):
            _six(x, apart, weights, pairs, out)
        elif rows == UINT(7):
            _seven(x, apart, weights, pairs, out)
        else:
            _eight(x, apart, weights, pairs, out)
else:

    @njit(**OPTIONS)
    def tile_sums(x: Any, apart: Any, rows: Any, weights: Any, pairs: Any, out: Any) -> None:
        """Sums of one or two rows over a tile; see _sums."""
        if rows == UINT(1):
            _one(x, apart, weights, pairs, out)
        else:
            _two(x, apart, weights, pairs, out)


def tiles(outputs: int) -> int:
    """Return how many tiles so many outputs take."""
    return -(-outputs // WIDTH)


def laid_out(weight: Tensor) -> Tensor:
    """Return weight [outputs, inputs], an even number of these, in tiles: [tiles, inputs / 2, WIDTH, 2]."""
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, 0, 0, -outputs % WIDTH))
    return whole.view(-1, WIDTH, inputs // 2, 2).transpose(1, 2)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up [width, inputs] such that each tile has HALF of either: [tiles * WIDTH, inputs]."""
    half = WIDTH // 2
    parts = [F.pad(w, (0, 0, 0, -len(w) % half)).view(-1, half, w.shape[1]) for w in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)
