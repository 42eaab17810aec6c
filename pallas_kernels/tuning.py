"""Which config a kernel runs with: a heuristic default that always works, or what a search on this kind of GPU found.

Each kernel has a frozen dataclass of Python ints (its config), a function that gives a default for any shapes, and a
key, a string for the calls that share a config. `search` times candidates and keeps the best in a JSON file per kind of
device; `chosen` reads it while a program is traced. The environment variable KVJAX_TUNING names the folder; without
it nothing is read and every kernel has its default.
"""

import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = "KVJAX_TUNING"
FORMAT = 1
C = TypeVar("C", bound="DataclassInstance")


def device_kind() -> str:
    """JAX's name of the device that a program traced now will run on: "NVIDIA H200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def path_for(kind: str, folder: str | os.PathLike[str]) -> Path:
    """The file of a kind of device: nvidia-h200.json."""
    return Path(folder) / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def chosen(operation: str, key: str, default: C) -> C:
    """The config of `key` in this device's file, `default` where there is none.

    A file that cannot be used is warned about once, with its reason, and the default is taken.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return default
    kind = device_kind()
    path = path_for(kind, folder)
    if not path.exists():
        return default
    stamp = path.stat().st_mtime_ns
    entries, problem = _read(path, stamp, kind)
    tuned = entries.get(operation, {})
    if key in tuned:
        entry = tuned[key]
        try:
            return config_from(entry, type(default))
        except ValueError as error:
            problem = f"{path}: {operation}, {key}: {error}"
    if problem:
        warnings.warn(f"tuned configs are passed over: {problem}", stacklevel=2)
    return default


def read(path: str | os.PathLike[str], kind: str) -> dict[str, dict[str, Any]]:
    """operation -> key -> config as a dict, of a file that `search` wrote for this kind of device.

    Raises ValueError, one sentence, for a file that is not such a one.
    """
    remove = "remove the file, or search again into another folder"
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); {remove}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} is no tuning file of format {FORMAT} (format: {found!r}); {remove}")
    if content.get("device_kind") != kind:
        raise ValueError(f"{path} is for {content.get('device_kind')!r} and this device is {kind!r}; {remove}")
    kernels = content.get("kernels")
    if not isinstance(kernels, dict) or not all(isinstance(v, dict) for v in kernels.values()):
        raise ValueError(f"{path} has no table of kernels; {remove}")
    return kernels


def config_from(entry: Any, config_type: type[C]) -> C:
    """A config out of its JSON form; ValueError unless it has just the fields of config_type, positive ints all."""
    fields = {field.name for field in dataclasses.fields(config_type)}
    if not isinstance(entry, dict) or set(entry) != fields:
        raise ValueError(f"{entry!r} is no {config_type.__qualname__} with the fields {', '.join(sorted(fields))}")
    for name, value in entry.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, a whole number of at least 1 is needed")
    return config_type(**entry)


def search(
    operation: str,
    key: str,
    candidates: Iterable[C],
    seconds: Callable[[C], float],
    *,
    folder: str | os.PathLike[str],
    kind: str | None = None,
) -> tuple[C, dict[C, float]]:
    """Time the candidates, keep the fastest in the device's file, and return it with all times.

    seconds(config) runs the kernel and says how long it took; a candidate for which it raises (too much shared
    memory, say) is passed over. Raises ValueError when none works or the file there is not a tuning file.
    """
    kind = device_kind() if kind is None else kind
    path = path_for(kind, folder)
    kernels = read(path, kind) if path.exists() else {}
    times: dict[C, float] = {}
    failed: Exception | None = None
    for candidate in candidates:
        try:
            times[candidate] = seconds(candidate)
        except Exception as error:  # compilers raise what they like; the last one is told when no candidate works
            failed = error
    if not times:
        raise ValueError(f"no candidate config of {operation} ({key}) works here; the last failed with: {failed}")
    best = min(times, key=lambda candidate: times[candidate])
    kernels.setdefault(operation, {})[key] = dataclasses.asdict(best)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}.tmp")  # a reader never sees half a file
    whole.write_text(json.dumps({"format": FORMAT, "device_kind": kind, "kernels": kernels}, indent=1, sort_keys=True))
    whole.replace(path)
    return best, times


@functools.lru_cache(maxsize=16)
def _read(path: Path, stamp: int, kind: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """(entries, None), or ({}, what is wrong); `stamp` makes a changed file a new question."""
    try:
        return read(path, kind), None
    except ValueError as error:
        return {}, str(error)
