"""Where the recorded traces lie, and how they are read.

KVJAX_GOLDEN names the directories to replay (separated like PATH). Without it: the choice committed with the tests,
and a full set beside the repository where there is one.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")  # the first one found of a trace is read


def trace_dirs() -> list[Path]:
    """Directories to look in, first one first. A named directory without any trace is an error, never skipped."""
    if named := os.environ.get("KVJAX_GOLDEN"):
        dirs = [Path(part).expanduser() for part in named.split(os.pathsep) if part]
        for directory in dirs:
            if not any(name(path) for path in sorted(directory.glob("*"))):
                raise ValueError(f"KVJAX_GOLDEN names {directory}, which holds no trace ({', '.join(SUFFIXES)}).")
        return dirs
    return [d for d in (ROOT / "tests" / "data" / "golden", ROOT.parent / "shared" / "golden") if d.is_dir()]


def name(path: Path) -> str:
    """Name of the trace in `path`, without its suffix; empty for any other file."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return ""


def find(patterns: str | Iterable[str]) -> list[Path]:
    """Trace files whose name matches one of the patterns ("paged_allocator_*"), one file for each name, sorted."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found: dict[str, Path] = {}
    for directory in trace_dirs():
        for suffix in SUFFIXES:
            for path in directory.glob(f"*{suffix}"):
                if any(fnmatch.fnmatchcase(name(path), pattern) for pattern in patterns):
                    found.setdefault(name(path), path)
    return [found[key] for key in sorted(found)]


def read_text(path: Path) -> str:
    """Text of a plain or gzipped file."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    return path.read_text()


def load_jsonl(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(first line, other lines) of a JSON-lines trace."""
    first, *rest = (json.loads(line) for line in read_text(path).splitlines() if line)
    return first, rest


def load_json(path: Path) -> dict[str, Any]:
    """A trace that is one JSON object."""
    return json.loads(read_text(path))


def arrays_of(path: Path) -> Path:
    """The .npz file that belongs to a JSON trace."""
    return path.with_name(name(path) + ".npz")
