"""How time is measured here: many rounds, interleaved and shuffled, compared round by round in one process.

A process on a shared machine runs in a fast or a slow state for seconds at a time, so two numbers are comparable only
when they were taken next to each other. In-graph cost is the slope between a short and a long scan: dispatch, and
whatever else is paid once per call, drops out.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

SHORT, LONG = 512, 2048  # calls in the two scans of a slope


@dataclass(frozen=True)
class Measurement:
    """One figure of a benchmark; `config` says what was measured, so that two runs can be compared."""

    name: str
    value: float
    unit: str
    config: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def interleaved(
    calls: Mapping[str, Callable[..., Any]],
    rounds: int = 9,
    *,
    make: Mapping[str, Callable[[], Any]] | None = None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of every call in every round; the order within a round is shuffled. Each call is warmed up first.

    make: for calls that consume their argument (donation): a fresh one for each call, made before the clock starts.
    """

    def seconds(name: str) -> float:
        args = () if make is None else (jax.block_until_ready(make[name]()),)
        start = time.perf_counter()
        jax.block_until_ready(calls[name](*args))
        return time.perf_counter() - start

    for name in calls:
        seconds(name)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(seconds(name))
    return times


def working(
    title: str, calls: Mapping[str, Callable[..., Any]], *, make: Mapping[str, Callable[[], Any]] | None = None
) -> dict[str, Callable[..., Any]]:
    """The calls that run here; the others are named on stderr with their reason, so that one does not stop the rest.

    make: see `interleaved`.
    """
    found = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call() if make is None else call(make[name]()))
        except Exception as error:  # compilers raise what they like; it is told, and the others are still timed
            print(f"{title}: {name} is left out: {str(error)[:500]}", file=sys.stderr)
        else:
            found[name] = call
    return found


def ratio(times: Mapping[str, list[float]], numerator: str, denominator: str) -> float:
    """Median of the per-round ratios."""
    return median(a / b for a, b in zip(times[numerator], times[denominator], strict=True))


def looped(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any, calls: int) -> Callable[[], Any]:
    """A jitted scan of `calls` steps, ready to be called again and again.

    step(state, x) -> (state, out): every element of `out` is used, so nothing of the step can be left away; `inputs`
    (leading axis: different inputs, cycled) come in through the scan, so nothing can be hoisted out of it. The state
    is copied in once per call and is updated in place inside.
    """
    leaves = jax.tree.leaves(inputs)
    index = jnp.arange(calls, dtype=jnp.int32) % leaves[0].shape[0]

    @jax.jit
    def run(state, inputs):
        def body(carry, i):
            state, seen = carry
            state, out = step(state, jax.tree.map(lambda x: x[i], inputs))
            return (state, jax.tree.map(lambda s, o: s ^ o.astype(s.dtype), seen, out)), None

        shapes = jax.eval_shape(lambda s, x: step(s, jax.tree.map(lambda v: v[0], x))[1], state, inputs)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.int32), shapes)
        (state, seen), _ = jax.lax.scan(body, (state, zeros), index)
        return seen, jax.tree.map(lambda x: x.reshape(-1)[:1], state)

    return lambda: run(state, inputs)


def slopes(steps: Mapping[str, tuple[Callable, Any, Any]], rounds: int = 9) -> dict[str, list[float]]:
    """Microseconds per step of every (step, state, inputs), one value per round; see `looped`."""
    calls = {}
    for name, (step, state, inputs) in steps.items():
        calls[f"{name} short"] = looped(step, state, inputs, SHORT)
        calls[f"{name} long"] = looped(step, state, inputs, LONG)
    times = interleaved(calls, rounds)
    return {
        name: [
            max(long - short, 1e-9) / (LONG - SHORT) * 1e6
            for short, long in zip(times[f"{name} short"], times[f"{name} long"], strict=True)
        ]
        for name in steps
    }
