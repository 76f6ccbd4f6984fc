"""Numbers inside the kernels: bfloat16 as bits, addresses as arrays, powers of two."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from foredraft.jit import OPTIONS as OPTIONS
from foredraft.jit import njit

F32: Any = np.float32
U16, U32, I32, UINT = (getattr(numba, name) for name in ("uint16", "uint32", "int32", "uintp"))
LOG2E = 1.4426950408889634
STEADY = {"contract", "nsz", "nnan", "ninf", "arcp"}  # fast arithmetic whose sums keep their order


@intrinsic
def float_of(_context: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda _c, build, _s, args: build.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(_context: Any, value: Any) -> Any:
    return types.uint32(types.float32), lambda _c, build, _s, args: build.bitcast(args[0], ir.IntType(32))


@intrinsic
def rounded(_context: Any, value: Any) -> Any:
    def generate(_c: Any, build: Any, _s: Any, args: Any) -> Any:
        return build.call(build.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), [args[0]])

    return types.float32(types.float32), generate


def _pointer(kind: Any, bits: ir.Type) -> Any:
    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        wanted = types.CPointer(kind)(types.int64)
        return wanted, lambda _c, build, _s, args: build.inttoptr(args[0], bits.as_pointer())

    return pointer


halves = _pointer(types.uint16, ir.IntType(16))
floats = _pointer(types.float32, ir.FloatType())
ints = _pointer(types.int64, ir.IntType(64))


@njit(inline="always")
def load(half: Any) -> Any:
    return float_of(U32(half) << U32(16))


@njit(inline="always")
def to_half(value: Any) -> Any:
    """Round to the nearest bfloat16, ties to even."""
    bits = bits_of(value)
    return U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@njit(inline="always")
def exp2(x: Any) -> Any:
    """2 ** x within 3e-7, by a polynomial on [-0.5, 0.5]."""
    x = min(max(x, F32(-126.0)), F32(126.0))
    whole = rounded(x)
    f = x - whole
    p = F32(0.009618129107628477) + f * F32(0.0013333558146428443)
    p = F32(0.24022650695910072) + f * (F32(0.05550410866482158) + f * p)
    p = F32(1.0) + f * (F32(0.6931471805599453) + f * p)
    return p * float_of(U32(I32(whole) + I32(127)) << U32(23))
