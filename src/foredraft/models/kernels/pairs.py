"""Sums of products of bfloat16, in vectors: a number of each sum grows by a pair of weights times a pair of
numbers, the second one first.

Where the processor has it, one instruction does that for up to 16 sums (AVX512-BF16, vdpbf16ps); elsewhere
pairs are widened to float32. A processor with 16 registers of 8 numbers (AVX2) makes as many sums at once as
leave room there for what they grow by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

# Numba told to compile for another processor (NUMBA_CPU_NAME) gets what every one has.
FEATURES = binding.get_host_cpu_features() if config.CPU_NAME is None else {}
PROCESSOR = config.CPU_NAME or binding.get_host_cpu_name()
HAS_PAIRS = bool(FEATURES.get("avx512bf16") and FEATURES.get("avx512vl"))
WIDENED = not HAS_PAIRS  # then weights are float32
IS_WIDE = HAS_PAIRS or bool(FEATURES.get("avx512f"))  # 32 registers of 16 numbers
_ON_X86 = binding.get_process_triple().startswith("x86")
# Has the instruction that sums grow by; without it each is a call.
_WITHOUT = {None, "generic", "x86-64", "x86-64-v2"}
IS_QUICK = bool(FEATURES.get("fma")) or config.CPU_NAME not in _WITHOUT or not _ON_X86
_LANES = 8  # elsewhere: numbers of a register
_LEFT = 15  # registers, besides the one that a weight is spread over
FLOAT, WORD = ir.FloatType(), ir.IntType(32)
_HALF, _BYTE, _LONG = ir.IntType(16), ir.IntType(8), ir.IntType(64)
_FROM_128 = 0x4300  # the bits of 128 in bfloat16, whose last seven are what is above it
_HIGH = 0xFFFF0000 - (1 << 32)  # the upper half of a word: of a pair, the second one


class _BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for it."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def floats_of(lanes: int) -> ir.Type:
    """The type of so many sums."""
    return ir.VectorType(FLOAT, lanes)


def words_of(lanes: int) -> ir.Type:
    """The type of so many pairs."""
    return ir.VectorType(WORD, lanes)


def zeros(lanes: int) -> Any:
    """So many sums that begin."""
    return ir.Constant(floats_of(lanes), [0.0] * lanes)


def _grow_by_pairs(
    build: Any,
    lanes: int,
    read: Callable[[], list[Any]],
    firsts: list[Any],
    index: Any,
    held: list[list[Any]],
) -> None:
    numbers = read()
    halves, floats = ir.VectorType(_BFloat(), 2 * lanes), floats_of(lanes)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    grow = cgutils.get_or_insert_function(
        build.module, ir.FunctionType(floats, [floats, halves, halves]), name
    )
    wide, offset = [build.bitcast(some, halves) for some in numbers], build.mul(index, index.type(4))
    for first, own in zip(firsts, held, strict=True):
        pair = build.load(at(build, first, offset, WORD), align=4)
        weights = build.bitcast(_spread(build, lanes, pair, words_of(lanes)), halves)
        for some, sum_ in zip(wide, own, strict=True):
            build.store(build.call(grow, [build.load(sum_), weights, some]), sum_)


def _grow_widened(
    build: Any,
    lanes: int,
    read: Callable[[], list[Any]],
    firsts: list[Any],
    index: Any,
    held: list[list[Any]],
) -> None:
    floats, words = floats_of(lanes), words_of(lanes)
    fma = cgutils.get_or_insert_function(
        build.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{lanes}f32"
    )
    for by, cut, behind in ((build.and_, _HIGH, 4), (build.shl, 16, 0)):
        wide = [build.bitcast(by(some, ir.Constant(words, [cut] * lanes)), floats) for some in read()]
        offset = build.add(build.mul(index, index.type(8)), index.type(behind))
        for first, own in zip(firsts, held, strict=True):
            weight = build.load(at(build, first, offset, FLOAT), align=4)
            weights = _spread(build, lanes, weight, floats)
            for some, sum_ in zip(wide, own, strict=True):
                build.store(build.call(fma, [some, weights, build.load(sum_)]), sum_)


def _spread(build: Any, lanes: int, value: Any, kind: ir.Type) -> Any:
    """Return a vector whose numbers are all `value`."""
    one = build.insert_element(ir.Constant(kind, ir.Undefined), value, WORD(0))
    return build.shuffle_vector(one, one, ir.Constant(words_of(lanes), [0] * lanes))


def at(build: Any, base: Any, offset: Any, kind: ir.Type) -> Any:
    """Return a pointer to `kind` so many bytes behind an address."""
    return build.inttoptr(build.add(base, offset), kind.as_pointer())


def own_function(module: Any, name: str, arguments: int) -> tuple[Any, Any]:
    """Return a function of so many words into which nothing else is compiled, and what builds it, None if the
    module has it already.
    """
    kind = ir.FunctionType(ir.VoidType(), [_LONG] * arguments)
    made = cgutils.get_or_insert_function(module, kind, name)
    if not made.is_declaration:
        return made, None
    made.linkage = "internal"
    made.attributes.add("noinline")
    return made, ir.IRBuilder(made.append_basic_block())


def _anew(build: Any, address: Any) -> Any:
    """Return an address of which the compiler does not know that it is the same, so that it reads again what
    it would else keep on the stack, at twice the time where a line of the cache ends there.
    """
    return build.asm(ir.FunctionType(_LONG, [_LONG]), "", "=r,0", [address], False)


def _ask(build: Any, pointer: Any) -> None:
    """Have memory brought into this core's caches, but not into the nearest, which is small."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
    ask = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
    build.call(ask, [pointer, WORD(0), WORD(2), WORD(1)])  # to read, the second level, data


def _parts(sums: int, vectors: int, lanes: int) -> tuple[int, list[range]]:
    """Return how many numbers a register has, and which of so many vectors are summed up at a time."""
    if IS_WIDE:
        return lanes, [range(vectors)]
    narrow = min(lanes, _LANES)
    every, some = vectors * lanes // narrow, 4 if sums == 1 else 2  # so that registers hold all
    return narrow, [range(first, min(first + some, every)) for first in range(0, every, some)]


def pair_sums(
    sums: int, vectors: int, lanes: int, *, fresh: bool, of_bytes: bool = False, asks: bool = False
) -> Any:
    """Return a kernel of so many sums, each of `vectors` times `lanes` numbers.

    kernel(weights, apart, rows, stride, count, out, out_apart, ahead, step), addresses and bytes: sum g,
    float32 from out + g * out_apart on, grows by pair i of weights + g * apart times row i, `stride` behind
    row i - 1, a pair a number, one row after another; a fresh sum begins at zero. Every number of a sum
    depends on its own column and weights alone. Weights are float32 if WIDENED, else bfloat16. of_bytes: a
    number of a row is a byte below 128, and counts 128 more. asks: with every row memory is asked for what
    will be read next, from `ahead` on, `step` further each time.
    """
    lanes, parts = _parts(sums, vectors, lanes)
    size = (2 if of_bytes else 4) * lanes

    def read(build: Any, rows: Any, offset: Any) -> Any:
        if not of_bytes:
            return build.load(at(build, rows, offset, words_of(lanes)), align=4)
        halves = ir.VectorType(_HALF, 2 * lanes)
        small = build.load(at(build, rows, offset, ir.VectorType(_BYTE, 2 * lanes)), align=2)
        wide = build.or_(build.zext(small, halves), ir.Constant(halves, [_FROM_128] * 2 * lanes))
        return build.bitcast(wide, words_of(lanes))

    def function(module: Any, some: int) -> Any:
        """A function for so many vectors: the sums of one loop then have all registers."""
        name = f"pair_sums.{sums}.{some}.{lanes}.{fresh:d}{of_bytes:d}{asks:d}"
        made, build = own_function(module, name, 9)
        if build is None:
            return made
        weights, apart, rows, stride, count, out, out_apart, ahead, step = made.args
        floats = floats_of(lanes)
        crowded = not IS_WIDE and some * (sums + 2) > _LEFT  # sums, and what is read for both halves

        def place(g: int, t: int) -> Any:
            offset = build.add(build.mul(_LONG(g), out_apart), _LONG(4 * t * lanes))
            return at(build, out, offset, floats)

        held = []
        for g in range(sums):
            begins = [zeros(lanes) if fresh else build.load(place(g, t), align=4) for t in range(some)]
            held.append([cgutils.alloca_once_value(build, begin) for begin in begins])
        firsts = [build.add(weights, build.mul(_LONG(g), apart)) for g in range(sums)]
        with cgutils.for_range(build, count) as loop:
            if asks:
                _ask(build, at(build, ahead, build.mul(loop.index, step), _BYTE))
            row = build.mul(loop.index, stride)

            places = [build.add(row, _LONG(t * size)) for t in range(some)]

            def numbers(places: list[Any] = places) -> list[Any]:
                base = _anew(build, rows) if crowded else rows
                return [read(build, base, place) for place in places]

            (_grow_by_pairs if HAS_PAIRS else _grow_widened)(build, lanes, numbers, firsts, loop.index, held)
        for g, own in enumerate(held):
            for t, sum_ in enumerate(own):
                build.store(build.load(sum_), place(g, t), align=4)
        build.ret_void()
        return made

    @intrinsic
    def kernel(
        _context: Any,
        weights: Any,
        apart: Any,
        rows: Any,
        stride: Any,
        count: Any,
        out: Any,
        out_apart: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        def generate(context: Any, build: Any, _signature: Any, args: Any) -> Any:
            weights, apart, rows, stride, count, out, out_apart, ahead, step = args
            each = build.mul(count, step)
            for part in parts:
                columns = build.add(rows, _LONG(part.start * size))
                to = build.add(out, _LONG(4 * part.start * lanes))
                told = (weights, apart, columns, stride, count, to, out_apart, ahead, step)
                build.call(function(build.module, len(part)), told)
                ahead = build.add(ahead, each)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 9), generate

    return kernel
