"""A kernel's module with one place in its source changed: faults that the suite has to find."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = tempfile.TemporaryDirectory()  # Triton reads the source of a kernel when it is called, so the file must stay


@functools.cache
def load(path: str, old: str, new: str) -> ModuleType:
    """The module at `path` (from the root of the repository) with `old`, which stands in it once, replaced."""
    source = (ROOT / path).read_text()
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {path}; name a place that stands there once")
    file = Path(_FOLDER.name, f"mutant_{abs(hash((path, old, new)))}.py")
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*arrays: Any, operation: str, path: str, old: str, new: str, **static: Any) -> Any:
    """The operation of a changed module, in the form that `triton_interpreter.Call` takes."""
    return getattr(load(path, old, new), operation)(*arrays, **static)
