"""One .safetensors file: its header, checked in full, and its tensors as views of the mapped file.

Format: u64 little-endian n; n bytes of JSON {name: {dtype, shape, data_offsets}}; the tensors' bytes, without
holes (https://github.com/huggingface/safetensors#format). The file is parsed here, and only here, so that no
second reader can understand a hostile header differently.
"""

import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models._untrusted import parse_json_object, require_regular, shown
from models.errors import CheckpointError

# Real headers stay below 1 MB; a JSON text of this size becomes a few hundred MB of Python objects at worst.
_HEADER_LIMIT = 8 << 20

_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
}
_READABLE: dict[str, Any] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class SafetensorsFile:
    """The tensors of one file; `shapes` by name, `read(name)` for a view of float64/32/16 or bfloat16."""

    def __init__(self, path: Path):
        size = require_regular(path)
        where = f"The header of {path.name}"
        if size < 10:
            raise CheckpointError(f"{path.name} has {size} bytes; a safetensors file has at least 10.")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(
                    f"{where} claims {length} bytes; at most {min(size - 8, _HEADER_LIMIT)} can be there: "
                    "the file is damaged or not in safetensors format."
                )
            header = parse_json_object(file.read(length), where)
        self._name = path.name
        self._entries = _check_entries(header, size - 8 - length, where)
        self.shapes = {name: shape for name, (_, shape, _) in self._entries.items()}
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._start = 8 + length

    def read(self, name: str) -> np.ndarray:
        kind, shape, begin = self._entries[name]
        if kind not in _READABLE:
            raise CheckpointError(
                f"Tensor {shown(name)} in {self._name} has dtype {kind}; {', '.join(_READABLE)} are read."
            )
        view = np.frombuffer(self._data, _READABLE[kind], math.prod(shape), self._start + begin)
        return view.reshape(shape)


def _check_entries(header: dict[str, Any], size: int, where: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype, shape, first byte) per tensor; the byte ranges have to fill `size` bytes, one after the other."""
    entries = {}
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, begin, end = _check_entry(name, entry, where)
        entries[name] = (kind, shape, begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise CheckpointError(
                f"{where} puts tensor {shown(name)} at byte {begin}, not {position}: tensors overlap or leave a gap."
            )
        position = end
    if position != size:
        raise CheckpointError(f"{where} describes {position} bytes of tensors, the file has {size}; it is damaged.")
    return entries


def _check_entry(name: str, entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where} describes tensor {shown(name)} by other fields than dtype, shape, data_offsets."
        )
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _ITEM_BITS.get(kind) if isinstance(kind, str) else None
    if bits is None:
        raise CheckpointError(f"{where} gives tensor {shown(name)} dtype {shown(kind)}, which is unknown.")
    if not _naturals(shape) or len(shape) > 8:
        raise CheckpointError(f"{where} gives tensor {shown(name)} shape {shown(shape)}; up to 8 sizes were expected.")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} gives tensor {shown(name)} data_offsets {shown(offsets)}; [begin, end] fits.")
    if math.prod(shape) * bits // 8 != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} gives tensor {shown(name)} {offsets[1] - offsets[0]} bytes; "
            f"{kind} of shape {shown(shape)} takes {math.prod(shape) * bits // 8}."
        )
    return kind, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
