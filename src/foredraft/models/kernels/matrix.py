"""Products by a processor's matrix unit (AMX, tdpbf16ps): up to 16 rows take as long as one, which is what
their weights take to be read.

A number of a sum depends on its row and column alone, whatever rows are beside it; each grows by 32 inputs at
a time, so those of a product must be a multiple of that.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from foredraft.jit import MATRIX_REGISTERS
from foredraft.models.kernels.pairs import FEATURES, HAS_PAIRS, at, own_function

AT_ONCE, PAIRS = 16, 16  # the most rows of a tile register, and the pairs of a row in it
_LINE = 64  # bytes of a register's row: 32 inputs, or 16 sums
_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
HAS_UNIT = bool(MATRIX_REGISTERS and HAS_PAIRS and FEATURES.get("amx-tile") and FEATURES.get("amx-bf16"))


def _settings(build: Any, rows: Any, sums: range, read: int) -> Any:
    """Return the configuration of the registers: of sums and of what is read as many rows as there are, of
    weights all 16.
    """
    settings = cgutils.alloca_once(build, _BYTE, 64)
    address = build.ptrtoint(settings, _LONG)
    for word in range(8):
        build.store(_LONG(0), at(build, address, _LONG(8 * word), _LONG))
    build.store(_BYTE(1), settings)  # the one palette there is
    few = build.trunc(rows, _BYTE)
    for register in range(8):
        build.store(_BYTE(_LINE), at(build, address, _LONG(16 + 2 * register), _BYTE))
        count = few if register in sums or register == read else _BYTE(PAIRS)
        build.store(count, at(build, address, _LONG(48 + register), _BYTE))
    return settings


def matrix_sums(vectors: int) -> Any:
    """Return a kernel of sums of up to AT_ONCE rows, each of `vectors` (up to 3) times 16 numbers.

    kernel(x, apart, rows, weights, stride, pairs, out, out_apart), addresses and bytes: sum g, float32 from
    out + g * out_apart on, is that of x + g * apart, `pairs` pairs of bfloat16, a multiple of PAIRS, times
    `weights`, whose pairs are `stride` behind each other.
    """
    sums, read = range(vectors), vectors
    weights_at = range(read + 1, read + 1 + vectors)

    def function(module: Any) -> Any:
        made, build = own_function(module, f"matrix_sums.{vectors}", 8)
        if build is None:
            return made
        x, apart, rows, weights, stride, pairs, out, out_apart = made.args
        pointer = _BYTE.as_pointer()

        def call(what: str, *args: Any) -> None:
            kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
            build.call(cgutils.get_or_insert_function(module, kind, f"llvm.x86.{what}"), args)

        settings = _settings(build, rows, sums, read)
        call("ldtilecfg", build.bitcast(settings, pointer))
        for sum_ in sums:
            call("tilezero", _BYTE(sum_))
        with cgutils.for_range(build, build.udiv(pairs, _LONG(PAIRS))) as loop:
            column = build.mul(loop.index, _LONG(_LINE))
            call("tileloadd64", _BYTE(read), at(build, x, column, _BYTE), apart)
            first = build.mul(loop.index, build.mul(stride, _LONG(PAIRS)))
            for sum_, own in zip(sums, weights_at, strict=True):
                place = at(build, weights, build.add(first, _LONG(_LINE * sum_)), _BYTE)
                call("tileloadd64", _BYTE(own), place, stride)
                call("tdpbf16ps", _BYTE(sum_), _BYTE(read), _BYTE(own))
        for sum_ in sums:
            call("tilestored64", _BYTE(sum_), at(build, out, _LONG(_LINE * sum_), _BYTE), out_apart)
        call("tilerelease")
        build.ret_void()
        return made

    @intrinsic
    def kernel(
        _context: Any,
        x: Any,
        apart: Any,
        rows: Any,
        weights: Any,
        stride: Any,
        pairs: Any,
        out: Any,
        out_apart: Any,
    ) -> Any:
        def generate(context: Any, build: Any, _signature: Any, args: Any) -> Any:
            build.call(function(build.module), args)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 8), generate

    return kernel
