"""The header of a GGUF file: metadata and tensor table, read with every count checked against the bytes left.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The reader of
the gguf package trusts the file (a claimed length of 2**60 is a loop of 2**60 steps there), hence this one.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from models._untrusted import shown
from models.errors import CheckpointError

_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 21  # over all arrays; the largest vocabularies have 2**18 tokens and twice the merges
_MAX_STRING_BYTES = 1 << 24
_MAX_SCALARS = 1 << 22  # in one array; real ones have an entry per token
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

READABLE = tuple(GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]  # row-major, that is GGUF's sizes reversed
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int  # bytes of one row, that is of shape[-1] elements


@dataclass(frozen=True)
class GgufHeader:
    """Metadata as plain Python values (arrays: lists), and the tensor table by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A position in the file that can not leave it."""

    def __init__(self, data: memoryview):
        self.data = data  # u8[file size], mapped; slices of a view are cheaper than those of an array
        self.position = 0
        self.strings_left = _MAX_STRINGS  # over the whole file

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise CheckpointError(f"The GGUF file ends within {what}: {size} bytes expected, {self.left} left.")
        self.position += size
        return self.data[self.position - size : self.position].tobytes()

    def unpack(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def text(self, what: str) -> str:
        length = self.unpack("<Q", what)
        if length > _MAX_STRING_BYTES:
            raise CheckpointError(
                f"The GGUF file claims {length} bytes for {what}; up to {_MAX_STRING_BYTES} are read."
            )
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"The GGUF file holds {what} that is not UTF-8 text.") from None

    def scalars(self, dtype: np.dtype, count: int, what: str) -> list[Any]:
        if count > _MAX_SCALARS:
            raise CheckpointError(f"The GGUF file claims {count} numbers for {what}; up to {_MAX_SCALARS} are read.")
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()


def read_header(data: np.ndarray) -> GgufHeader:
    """Parses the header of a mapped file u8[size]; the tensors it lists lie inside the file and do not overlap."""
    cursor = _Cursor(data.data)
    if cursor.take(4, "its magic") != b"GGUF":
        raise CheckpointError("The file does not start with the letters GGUF; it is not a GGUF file.")
    version = cursor.unpack("<I", "its version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError("The GGUF file is big-endian; convert it to little-endian.")
    if version not in (2, 3):
        raise CheckpointError(f"The GGUF file has version {version}; 2 and 3 are read.")
    tensor_count = _count(cursor, "tensors", _MAX_TENSORS)
    key_count = _count(cursor, "metadata keys", _MAX_KEYS)

    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise CheckpointError(f"The GGUF file has metadata key {shown(key)} twice.")
        metadata[key] = _value(cursor, cursor.unpack("<I", "a value type"), f"the value of {shown(key)}")
    table = [_tensor_info(cursor) for _ in range(tensor_count)]

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"The GGUF file has alignment {shown(alignment)}; a power of two was expected.")
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _place_tensors(table, start, alignment, len(data)))


def _count(cursor: _Cursor, what: str, limit: int) -> int:
    count = cursor.unpack("<Q", f"the number of {what}")
    if count > limit:
        raise CheckpointError(f"The GGUF file claims {count} {what}; up to {limit} are read.")
    return count


def _value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind in _SCALARS:
        return cursor.scalars(_SCALARS[kind], 1, what)[0]
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        raise CheckpointError(f"The GGUF file has value type {kind} for {what}; 0 to 12 are known.")
    item_kind, count = cursor.unpack("<I", what), cursor.unpack("<Q", what)
    if item_kind in _SCALARS:
        return cursor.scalars(_SCALARS[item_kind], count, what)
    if item_kind != _STRING:
        # The format allows arrays of arrays, no model uses them, and nesting is how parsers are exhausted.
        raise CheckpointError(f"The GGUF file has an array of type {item_kind} for {what}; scalars or strings fit.")
    if count > min(cursor.strings_left, cursor.left // 8):  # a string takes 8 bytes at least
        raise CheckpointError(f"The GGUF file claims {count} strings for {what}; the file can not hold as many.")
    cursor.strings_left -= count
    return [cursor.text(what) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.text("a tensor name")
    dims = cursor.unpack("<I", f"tensor {shown(name)}")
    if not 1 <= dims <= _MAX_DIMS:
        raise CheckpointError(f"The GGUF file gives tensor {shown(name)} {dims} dimensions; 1 to 4 were expected.")
    sizes = cursor.scalars(np.dtype("<u8"), dims, f"tensor {shown(name)}")
    kind = cursor.unpack("<I", f"tensor {shown(name)}")
    offset = cursor.unpack("<Q", f"tensor {shown(name)}")
    if kind not in READABLE:
        known = GGMLQuantizationType(kind).name if kind in list(GGMLQuantizationType) else str(kind)
        raise CheckpointError(
            f"The GGUF file stores tensor {shown(name)} as {known}; "
            f"{', '.join(readable.name for readable in READABLE)} are read: quantise it to one of those."
        )
    return name, tuple(reversed(sizes)), GGMLQuantizationType(kind), offset


def _place_tensors(
    table: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    position = start
    for name, shape, kind, offset in sorted(table, key=lambda row: row[3]):
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise CheckpointError(
                f"The GGUF file gives tensor {shown(name)} shape {shape}; {kind.name} takes rows of n * {block}."
            )
        row_bytes = shape[-1] // block * block_bytes
        begin = start + offset
        end = begin + math.prod(shape[:-1]) * row_bytes
        if end > size:
            raise CheckpointError(
                f"The GGUF file ends at byte {size}, tensor {shown(name)} at {end}; it is not complete."
            )
        if begin < position or offset % alignment:
            raise CheckpointError(f"The GGUF file puts tensor {shown(name)} over another one or off its alignment.")
        if name in tensors:
            raise CheckpointError(f"The GGUF file has tensor {shown(name)} twice.")
        position = end
        tensors[name] = GgufTensor(shape, kind, begin, row_bytes)
    return tensors
