"""How threads share a pass: whoever is free claims the next unit of a phase, and none begins the next phase
before all units of this one are done. A thread that the system took off its core thus holds up no more than
the unit it is at.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from foredraft.models.kernels.numbers import OPTIONS, UINT

PHASE_BYTES = 128  # of the board: how many units are claimed, and on a cache line of its own how many done
_SPINS = 1023  # between two offers of the core to others
_LONG = ir.IntType(64)
_ON_X86 = binding.get_process_triple().startswith("x86")


@intrinsic
def _add(_context: Any, address: Any, more: Any) -> Any:
    def generate(_c: Any, build: Any, _s: Any, args: Any) -> Any:
        return build.atomic_rmw("add", build.inttoptr(args[0], _LONG.as_pointer()), args[1], "acq_rel")

    return types.uintp(types.uintp, types.uintp), generate


@intrinsic
def _read(_context: Any, address: Any) -> Any:
    def generate(_c: Any, build: Any, _s: Any, args: Any) -> Any:
        return build.load_atomic(build.inttoptr(args[0], _LONG.as_pointer()), "acquire", 8)

    return types.uintp(types.uintp), generate


@intrinsic
def _pause(_context: Any) -> Any:
    def generate(context: Any, build: Any, _s: Any, _args: Any) -> Any:
        if _ON_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            build.call(cgutils.get_or_insert_function(build.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _offer(_context: Any) -> Any:
    def generate(context: Any, build: Any, _s: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        build.call(cgutils.get_or_insert_function(build.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(inline="always")
def claimed(board: Any, phase: Any) -> Any:
    """Return the next unit of a phase, which may be beyond its last."""
    return _add(board + phase * UINT(PHASE_BYTES), UINT(1))


@njit(**OPTIONS)
def finish(board: Any, phase: Any, done: Any, units: Any) -> None:
    """Say that `done` more units of a phase are done, and wait until all are."""
    at, spins = board + phase * UINT(PHASE_BYTES) + UINT(PHASE_BYTES // 2), UINT(0)
    if done:
        _add(at, done)
    while _read(at) < units:
        _pause()
        spins += UINT(1)
        if spins & UINT(_SPINS) == UINT(0):
            _offer()
