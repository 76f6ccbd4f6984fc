"""Sums of rows under float32 weights, in vectors of the processor, for attention and for products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FLOAT, _HALF, _BYTE, _WORD = ir.FloatType(), ir.IntType(16), ir.IntType(8), ir.IntType(32)


def products(sums: int, vectors: int, lanes: int, *, fresh: bool, of_bytes: bool = False) -> Any:
    """Return a kernel that adds `count` rows to so many sums, each of `vectors` times `lanes` numbers.

    kernel(weights, apart, rows, stride, count, out, out_apart), the first of each as an address: sum g, the
    floats from out + g * out_apart on, grows by weight i of weights + g * apart times row i, `stride` numbers
    behind row i - 1, one row after another; a fresh sum begins at zero. Rows are bfloat16, or integers of one
    byte. Every number of a sum depends on its own column and weights alone.
    """
    size, kind = (1, _BYTE) if of_bytes else (2, _HALF)
    floats, smalls, words = (ir.VectorType(one, lanes) for one in (_FLOAT, kind, _WORD))

    @intrinsic
    def kernel(
        _context: Any, weights: Any, apart: Any, rows: Any, stride: Any, count: Any, out: Any, out_apart: Any
    ) -> Any:
        def generate(context: Any, build: Any, _signature: Any, args: Any) -> Any:
            weights, apart, rows, stride, count, out, out_apart = args

            def at(base: Any, index: Any, size: int, kind: ir.Type) -> Any:
                where = build.add(base, build.mul(index, ir.Constant(index.type, size)))
                return build.inttoptr(where, kind.as_pointer())

            def number(value: int) -> Any:
                return ir.Constant(count.type, value)

            def place(g: int, t: int) -> Any:
                index = build.add(build.mul(number(g), out_apart), number(t * lanes))
                return at(out, index, 4, floats)

            cells = [(g, t) for g in range(sums) for t in range(vectors)]
            held = {cell: cgutils.alloca_once(build, floats) for cell in cells}
            for cell, sum_ in held.items():
                begin = ir.Constant(floats, [0.0] * lanes) if fresh else build.load(place(*cell), align=4)
                build.store(begin, sum_)
            with cgutils.for_range(build, count) as loop:
                first = build.mul(loop.index, stride)
                row = []
                for t in range(vectors):
                    place_ = at(rows, build.add(first, number(t * lanes)), size, smalls)
                    small = build.load(place_, align=size)
                    if of_bytes:
                        row.append(build.sitofp(small, floats))
                    else:
                        word = build.shl(build.zext(small, words), ir.Constant(words, [16] * lanes))
                        row.append(build.bitcast(word, floats))
                for g in range(sums):
                    index = build.add(build.mul(number(g), apart), loop.index)
                    one = build.insert_element(
                        ir.Constant(floats, ir.Undefined),
                        build.load(at(weights, index, 4, _FLOAT)),
                        _WORD(0),
                    )
                    weight = build.shuffle_vector(one, one, ir.Constant(words, [0] * lanes))
                    for t in range(vectors):
                        more = build.fmul(weight, row[t], flags=("contract",))
                        grown = build.fadd(build.load(held[g, t]), more, flags=("contract",))
                        build.store(grown, held[g, t])
            for cell, sum_ in held.items():
                build.store(build.load(sum_), place(*cell), align=4)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 7), generate

    return kernel
