"""What the replays of recorded operation traces share: padding to fixed shapes, and complete comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.golden import traces
from tests.quick import FAST_COMPILE

HEADER_KEYS = {"system", "config", "source", "seed", "ops", "limits", "initial"}


class Once:
    """A jitted function that counts how often it was traced; `check` says that one shape served the whole file."""

    def __init__(self, function: Callable[..., Any]):
        self.traces = 0

        def counted(*args: Any) -> Any:
            self.traces += 1
            return function(*args)

        self._jitted = jax.jit(counted, compiler_options=FAST_COMPILE)

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    def check(self) -> None:
        assert self.traces <= 1, f"traced {self.traces} times: the shapes changed within one file"


@dataclass
class Trace:
    """One recorded run: header facts and operations; `widths` are fixed shapes for the whole file."""

    path: Path
    config: dict[str, Any]
    limits: dict[str, int]
    initial: dict[str, Any]
    ops: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path, system: str, config_keys: set[str]) -> Trace:
        header, ops = traces.load_jsonl(path)
        assert set(header) == HEADER_KEYS, f"unknown header keys {set(header) ^ HEADER_KEYS}"
        assert header["system"] == system
        assert set(header["config"]) == config_keys, f"unknown config keys {set(header['config']) ^ config_keys}"
        assert len(ops) == header["ops"], f"{len(ops)} operations, the header says {header['ops']}"
        return cls(path, header["config"], header["limits"], header["initial"], ops)

    def width(self, lengths: Callable[[dict[str, Any]], Iterable[int]]) -> int:
        """The largest number that `lengths` yields for any operation (at least 1)."""
        return max((n for op in self.ops for n in lengths(op)), default=1) or 1


def pad(values: Iterable[int], width: int, fill: int = 0) -> np.ndarray:
    """i32[width]: the values, then `fill`. A list that does not fit is an error, never cut."""
    values = list(values)
    assert len(values) <= width, f"{len(values)} values in a width of {width}"
    return np.asarray(values + [fill] * (width - len(values)), np.int32)


def lanes(count: int, width: int) -> np.ndarray:
    """bool[width]: the first `count` lanes."""
    return np.arange(width) < count


def taken(loc: Any, count: int, ok: Any) -> list[int] | None:
    """The first `count` slots, or None where the call failed; everything behind them must be 0."""
    slots = np.asarray(loc)  # sliced on the host: an eager slice would compile for every length
    assert not slots[count if ok else 0 :].any(), "padding must be 0"
    return slots[:count].tolist() if ok else None


def run(trace: Trace, state: Any, step: Callable, observe: Callable[[Any], dict[str, Any]], extras=frozenset()) -> Any:
    """Apply every operation and compare everything recorded about it.

    step(state, name, args) -> (state, result, extras: dict); observe(state) -> the observable state by name.
    """
    compare("initial", trace.initial, observe(state))
    for index, op in enumerate(trace.ops):
        where = f"{trace.path.name} op {index} {op['op']}"
        known = {"op", "args", "result", "after"} | extras
        assert set(op) <= known, f"{where}: unknown keys {set(op) - known}"
        state, result, seen = step(state, op["op"], op["args"])
        assert result == op["result"], f"{where}: got {result}, recorded {op['result']}"
        for name in extras & set(op):
            assert seen[name] == op[name], f"{where}: {name} is {seen[name]}, recorded {op[name]}"
        compare(where, op["after"], observe(state))
    return state


def compare(where: str, recorded: dict[str, Any], seen: dict[str, Any]) -> None:
    assert recorded, f"{where}: nothing recorded"
    assert set(recorded) <= set(seen), f"{where}: unknown observations {set(recorded) - set(seen)}"
    for name, value in recorded.items():
        assert seen[name] == value, f"{where}: {name} is {seen[name]}, recorded {value}"
