"""The metadata of a .gguf file: its key-value table and nothing behind it. Arrays are stepped over, not kept."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MAX_ENTRIES, MAX_STRING = 1 << 16, 1 << 24  # far above real files; a lie is refused before it costs anything


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Scalars and strings by key. ValueError for a file that is no GGUF, or whose table is broken."""
    with open(path, "rb") as file:
        if (magic := file.read(4)) != MAGIC:
            raise ValueError(f"{path} starts with {magic!r}; a GGUF file starts with {MAGIC!r}.")
        version = _number(file, "<I")
        if version not in VERSIONS:
            raise ValueError(f"{path} is GGUF version {version}; versions {VERSIONS} are read.")
        _number(file, "<Q")  # tensors
        entries = _number(file, "<Q")
        if entries > MAX_ENTRIES:
            raise ValueError(f"{path} claims {entries} metadata entries; up to {MAX_ENTRIES} are read.")
        found: dict[str, Any] = {}
        for _ in range(entries):
            key = _string(file)
            kind = _number(file, "<I")
            value = _value(file, kind)
            if kind != ARRAY:
                found[key] = value
        return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in SCALARS:
        return _number(file, SCALARS[kind])
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in SCALARS:
            file.seek(count * struct.calcsize(SCALARS[inner]), 1)
            return None
        if inner == STRING:
            for _ in range(count):  # ends at the file's end at the latest
                _string(file)
            return None
        kind = inner
    raise ValueError(f"{file.name} has a metadata value of unknown type {kind}; the file is broken or too new.")


def _number(file: BinaryIO, code: str) -> Any:
    data = file.read(struct.calcsize(code))
    if len(data) != struct.calcsize(code):
        raise ValueError(f"{file.name} ends inside its metadata; the file is not complete.")
    return struct.unpack(code, data)[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > MAX_STRING:
        raise ValueError(f"{file.name} has a string of {length} bytes in its metadata; up to {MAX_STRING} are read.")
    data = file.read(length)
    if len(data) != length:
        raise ValueError(f"{file.name} ends inside its metadata; the file is not complete.")
    return data.decode("utf-8", "replace")
