"""The head of a GGUF file: enough to refuse a damaged or unsupported file before torch is loaded.

Layout (ggml, docs/gguf.md): magic, version, counts; key-value pairs; one record a tensor; padding; data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path

from foredraft.errors import CheckpointError, ModelError

Value = int | float | bool | str
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: name, dims as the file lists them (fastest first), ggml type and place in the data."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.dims)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the head says. meta holds the scalar keys; arrays (the vocabulary) are skipped."""

    path: Path
    meta: dict[str, Value]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """Name of the model family, in llama.cpp's spelling."""
        return str(self.meta["general.architecture"])

    @property
    def elements(self) -> int:
        """Number of values in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


class _Cursor:
    """Reads little-endian values one after the other; struct.error at the end of the file."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def number(self, layout: str) -> Value:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]

    def count(self, layout: str = "<Q") -> int:
        return int(self.number(layout))

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise struct.error("it ends within a value")
        self.at += size

    def text(self) -> str:
        size = self.count()
        start = self.at
        self.skip(size)
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Value | None:
        """Read one value; None for an array, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        inner, size = self.count("<I"), self.count()
        if inner == _STRING:
            for _ in range(size):
                self.skip(self.count())
        else:
            self.skip(size * struct.calcsize(_NUMBERS[inner]))
        return None

    def tensor(self) -> GgufTensor:
        name = self.text()
        dims = tuple(self.count() for _ in range(self.count("<I")))
        return GgufTensor(name, dims, self.count("<I"), self.count())


def read_gguf(path: Path) -> GgufFile:
    """Read the head and check that all tensors lie within the file.

    Raises CheckpointError for a file that is no GGUF, is cut short or contradicts itself; ModelError for
    a version or a quantisation this program cannot read.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is no GGUF file: its first four bytes are not 'GGUF'")
        try:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                return _parse(path, _Cursor(data), len(data))
        except (struct.error, KeyError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(f"{path} is damaged or cut short ({error}): download it anew") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    cursor.skip(4)
    version = cursor.count("<I")
    if version not in _VERSIONS:
        raise ModelError(f"{path} is GGUF version {version}: versions 2 and 3 (little-endian) can be read")
    tensors, pairs = cursor.count(), cursor.count()
    meta: dict[str, Value] = {}
    for _ in range(pairs):
        key, kind = cursor.text(), cursor.count("<I")
        value = cursor.value(kind)
        if value is not None:
            meta[key] = value
    gguf = GgufFile(path, meta, tuple(cursor.tensor() for _ in range(tensors)))
    if not gguf.tensors or "general.architecture" not in meta:
        raise CheckpointError(f"{path} holds no model: it has {tensors} tensors and {len(meta)} scalar keys")
    alignment = int(meta.get("general.alignment", _ALIGNMENT))
    data = -(-cursor.at // alignment) * alignment
    needed = data + max(t.offset + _bytes(path, t) for t in gguf.tensors)
    if size < needed:
        raise CheckpointError(f"{path} is cut short: it has {size:,} bytes of {needed:,}; download it anew")
    return gguf


def _bytes(path: Path, tensor: GgufTensor) -> int:
    """Return the size of a tensor in the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: {tensor.name} has ggml type {tensor.type}, which is not known here: "
            "update the gguf package or use another quantisation"
        ) from None
    return int(tensor.elements // block * width)
