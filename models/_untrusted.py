"""Reading what strangers wrote: bounded bytes, JSON, and typed fields of a mapping.

Every function here raises `CheckpointError` and nothing else for bad input.
"""

import json
import math
import reprlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import CheckpointError

_REQUIRED: Any = object()

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel = 2


def shown(value: object) -> str:
    """`repr(value)`, clipped: an error must stay one sentence even when a file holds a megabyte of text."""
    return _repr.repr(value)


def require_regular(path: Path) -> int:
    """Returns the size in bytes of a regular file; opening a pipe or a device could block for ever."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} can not be read ({error}); check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file; a checkpoint consists of plain files.")
    return status.st_size


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    size = require_regular(path)
    if size > limit:
        raise CheckpointError(f"{path.name} has {size} bytes, more than the {limit} that are read of such a file.")
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path.name} can not be read ({error}); check its permissions.") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return made


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in errors. Duplicate keys and deep nesting are refused."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where} is not valid JSON: {reason[:200]}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}; an object was expected.")
    return value


class Fields:
    """Typed access to a mapping that came from a file; a JSON null counts as absent.

    Without a default a missing field is an error; ranges are the business of whoever uses the value.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def _get(self, key: str, default: Any, kind: str, accepts: type | tuple[type, ...]) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.where} lacks {key!r}; {kind} was expected there.")
            return default
        # bool is a subclass of int, and `"num_hidden_layers": true` is no layer count.
        if not isinstance(value, accepts) or (isinstance(value, bool) and accepts is not bool):
            raise CheckpointError(f"{self.where} has {key!r} = {shown(value)}; {kind} was expected there.")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, "an integer", int)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default, "a number", (int, float))
        try:
            value = value if value is None else float(value)
        except OverflowError:
            value = math.inf
        if value is not None and not math.isfinite(value):
            raise CheckpointError(f"{self.where} has {key!r} = {value}; a finite number was expected there.")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, "true or false", bool)

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, "a string", str)

    def mapping(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, "an object", dict)

    def sequence(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, "a list", list)
