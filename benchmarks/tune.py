"""Search the configs of paged attention and of kv_write for this machine's GPU, at the named shapes.

The fastest config of each goes into <folder>/<kind of device>.json, under the key that the kernel asks for it while a
program is traced (`pallas_kernels.tuning`); KVJAX_TUNING=<folder> makes every program of that kind of device use it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import in_place, kernels
from benchmarks.measure import Measurement
from benchmarks.shapes import SHAPES, Shape
from pallas_kernels import jax_triton_adapter, registry, tuning
from pallas_kernels.attention import options, plan
from pallas_kernels.kv_write import plan as write_plan

ROUNDS, WRITE_ROUNDS = 5, 15
WRITE_DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn)
QUICK = 6  # candidates of a quick search

Timer = Callable[[Any], float]  # config -> seconds


@dataclasses.dataclass(frozen=True)
class Search:
    """One key to be searched."""

    title: str
    operation: str  # as `tuning.chosen` has it
    key: str
    candidates: list[Any]  # the default first
    timer: Callable[[], Timer]  # makes the arrays; the timer compiles for a config and runs it


def searches(shapes: dict[str, Shape] | None = None) -> list[Search]:
    """What there is to search, each key once; nothing is allocated."""
    shapes = SHAPES if shapes is None else shapes
    found: dict[tuple[str, str], Search] = {}
    every = [attention(title, shape) for title, shape in shapes.items()]
    every += [write(title, shape, dtype) for dtype in WRITE_DTYPES for title, shape in shapes.items()]
    for one in every:
        found.setdefault((one.operation, one.key), one)
    return list(found.values())


def attention(title: str, shape: Shape) -> Search:
    """The attention of a shape, by the implementation that None takes."""
    given = jax.eval_shape(lambda: kernels.arrays(shape))
    operation, _, how = kernels.call_of(shape, given)
    extras = {"v": given.get("v"), "positions": given["positions"] if shape.new > 1 else None}
    lanes = (given["table"], given["rows"], given["lens"])
    arrays, static = options.prepare(given["q"], given["k"], *lanes, **extras, **how)
    q = jax.ShapeDtypeStruct((shape.batch, shape.new, shape.heads, shape.dim), given["q"].dtype)
    call = (q, given["k"], given["table"], extras, static)
    key = plan.tuning_key(*call[:3], shape.dim if shape.rank is None else shape.rank, static)
    name = registry.best(operation.__name__, *arrays, options=static)

    def timer() -> Timer:
        if name == "xla":
            raise ValueError(f"no kernel can do {operation.__name__} here; install jax-triton (extra `cuda12`)")
        _, ordered, _ = kernels.call_of(shape, kernels.arrays(shape))

        def seconds(config: Any) -> float:
            attend = jax.jit(functools.partial(operation, config=config, implementation=name, **how))
            return kernels.seconds({"": functools.partial(attend, *ordered)}, ROUNDS)[""]

        return seconds

    return Search(title, plan.tuned_as(name), key, plan.candidates(*call), timer)


def write(title: str, shape: Shape, dtype: Any) -> Search:
    """The write of a shape's new tokens into a pool of `dtype`, by the Triton kernel: no other has a config."""
    call = in_place.write_shapes(shape, dtype)

    def timer() -> Timer:
        from pallas_kernels.kv_write.triton import kv_write

        case = in_place.write_case(shape, dtype)

        def seconds(config: Any) -> float:
            def step(leaves, x):
                loc, values = x
                return kv_write(
                    leaves, values, (None,) * len(leaves), loc, None, dtype=jnp.dtype(dtype), config=config
                ), ()

            return in_place.seconds({"": (step, case)}, WRITE_ROUNDS)[""]

        return seconds

    title = f"{title}, write {jnp.dtype(dtype).name}"
    return Search(title, "kv_write", write_plan.tuning_key(*call), write_plan.candidates(*call), timer)


def tune(
    wanted: list[Search], folder: str | os.PathLike[str], kind: str, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Measurement]:
    """Search each in turn and keep what was found after each; yields the times of the default and of the best.

    A search in which no candidate works is told on stderr and leaves its key without a config.
    """
    for number, one in enumerate(wanted, 1):
        timed = _told(one, f"{number}/{len(wanted)} {one.title}", progress)
        try:
            best, times = tuning.search(one.operation, one.key, one.candidates, timed, folder=folder, kind=kind)
        except ValueError as error:
            print(f"{one.title}: {error}", file=sys.stderr)
            continue
        about = {"operation": one.operation, "key": one.key, "card": kind, "jax": jax.__version__}
        if (default := one.candidates[0]) in times:
            config = about | dataclasses.asdict(default)
            yield Measurement(f"tune/{one.title}/default", times[default] * 1e6, "us", config)
        yield Measurement(f"tune/{one.title}/best", times[best] * 1e6, "us", about | dataclasses.asdict(best))
        yield Measurement(f"tune/{one.title}/failed", len(one.candidates) - len(times), "candidates", about)


def _told(one: Search, title: str, progress: Callable[[str], None]) -> Timer:
    """The timer of a search, which says where it stands; the arrays are made when the first candidate comes."""
    timer, tried = functools.cache(one.timer), itertools.count(1)

    def seconds(config: Any) -> float:
        progress(f"{title}: {next(tried)} of {len(one.candidates)}, {config}")
        return timer()(config)

    return seconds


def run(
    progress: Callable[[str], None], quick: bool = False, folder: str | os.PathLike[str] | None = None
) -> Iterator[Measurement]:
    """Search every shape on this machine's GPU. folder: None for the one that KVJAX_TUNING names."""
    if kernels.no_gpu("configs are searched"):
        return
    folder = folder or os.environ.get(tuning.FOLDER)
    if not folder:
        print(f"no folder for the configs: pass --tuning FOLDER, or set {tuning.FOLDER}.", file=sys.stderr)
        raise SystemExit(2)
    wanted = searches()
    if reason := jax_triton_adapter.why_not():
        print(f"kv_write is left out, whose configs are those of its Triton kernel: {reason}", file=sys.stderr)
        wanted = [one for one in wanted if one.operation != "kv_write"]
    if quick:
        first = {one.operation: one for one in reversed(wanted)}
        wanted = [dataclasses.replace(one, candidates=one.candidates[:QUICK]) for one in first.values()]
    kind = tuning.device_kind()
    yield from tune(wanted, folder, kind, progress)
    print(f"The configs are in {tuning.path_for(kind, Path(folder))}.", file=sys.stderr)
