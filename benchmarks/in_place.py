"""What updates its state in place, at the sizes of a server: a layer's KV write, and the operations on the books.

Each is timed inside a program that takes its state over (donated) and runs the operation some times in a row, each time
on other arrays, so that nothing can be left away or done once for all. Two such programs differ in length only, and the
slope between them is the time of one operation: dispatch, and whatever else is paid once per call, drops out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import interleaved, working
from benchmarks.shapes import Shape
from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, alloc_for_extend
from kvjax.kernels import books_of
from kvjax.pools.dtypes import default_store_dtype
from pallas_kernels import registry
from pallas_kernels.kv_write import kv_write
from pallas_kernels.ledger_decode import ledger_decode
from pallas_kernels.ledger_extend import ledger_extend
from pallas_kernels.release import release

SHORT, LONG = 2, 10  # operations in the two programs of a slope
PAGE, CONTEXT, CHUNK = 16, 4096, 128  # CHUNK: tokens of a request that begins or ends

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, x) -> (state, what else comes out)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on a state, and its implementations."""

    operation: str  # a key of `registry.TABLE`
    state: Callable[[], Any]  # makes a fresh one
    inputs: list[Any]  # one x for each step
    step: Callable[..., tuple[Any, Any]]  # step(state, x, implementation=, interpret=)

    def steps(self, *, interpret: bool = False) -> dict[str, Step]:
        """A step for each implementation that this installation has; interpret: the Pallas ones, interpreted."""
        names = [n for n in registry.available(self.operation) if not (interpret and n == "triton")]
        return {
            name: functools.partial(self.step, implementation=name, interpret=interpret and name != "xla")
            for name in names
        }


def program(step: Step) -> Callable[..., Any]:
    """run(state, inputs) -> (state, outputs): a step for each input, compiled as one, which takes the state over."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, inputs):
        outputs = []
        for x in inputs:
            state, out = step(state, x)
            outputs.append(out)
        return state, outputs

    return run


def seconds(steps: Mapping[str, tuple[Step, Case]], rounds: int, title: str | None = None) -> dict[str, float]:
    """Seconds of one operation by each step: the median slope of the rounds, in which all programs take turns.

    title: steps that do not run here are left out, and named on stderr under this title; None: they raise.
    """
    calls, make = {}, {}
    for name, (step, case) in steps.items():
        for length in (SHORT, LONG):
            calls[f"{name} {length}"] = functools.partial(program(step), inputs=case.inputs[:length])
            make[f"{name} {length}"] = case.state
    if title is not None:
        calls = working(title, calls, make=make)
    times = interleaved(calls, rounds, make=make)
    return {
        name: median(
            max(long - short, 1e-9) / (LONG - SHORT)
            for short, long in zip(times[f"{name} {SHORT}"], times[f"{name} {LONG}"], strict=True)
        )
        for name in steps
        if f"{name} {SHORT}" in times and f"{name} {LONG}" in times
    }


def copy_case(nbytes: int) -> Case:
    """A measure for a write: `nbytes` / 2 bytes read and as many written, side by side."""
    width = nbytes // 8
    inputs = [(jnp.full(width, i, jnp.int32), jnp.int32(i * width)) for i in range(LONG)]

    def step(state, x):
        # Without the barrier XLA makes one copy of several.
        return jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(state, x[0], (x[1],))), ()

    return Case("copy", lambda: jnp.zeros(LONG * width, jnp.int32), inputs, step)


def write_shapes(shape: Shape, dtype: Any = jnp.bfloat16) -> tuple[tuple, tuple, jax.ShapeDtypeStruct]:
    """(leaves, values, loc) of the write of a shape's new tokens, as shapes: bf16 values into a pool of `dtype`.

    The pool has the slots of `shape`'s rows and is stored as the platform traced for stores it.
    """
    array, rows = jax.ShapeDtypeStruct, shape.batch * shape.new
    slots = shape.batch * shape.context + shape.page
    stored = default_store_dtype(dtype, registry.target_platform())
    leaf = array((slots, shape.kv_heads, shape.dim), stored)
    loc = array((rows,), jnp.int32)
    if shape.rank is not None:
        parts = (shape.rank, shape.dim - shape.rank)
        return (leaf,), (tuple(array((rows, 1, width), jnp.bfloat16) for width in parts),), loc
    value = array((rows, shape.kv_heads, shape.dim), jnp.bfloat16)
    return (leaf, leaf), ((value,), (value,)), loc


def write_case(shape: Shape, dtype: Any = jnp.bfloat16, seed: int = 0) -> Case:
    """The write of `shape`'s new tokens: scattered slots, but consecutive ones within a page, as chunks have them."""
    leaves, values, loc = write_shapes(shape, dtype)
    rng, run = np.random.default_rng(seed), min(shape.page, shape.new)
    keys = iter(jax.random.split(jax.random.key(seed), LONG * len(jax.tree.leaves(values))))
    inputs = []
    for _ in range(LONG):
        starts = rng.permutation(shape.batch * shape.context // run)[: -(-loc.shape[0] // run)] * run + shape.page
        slots = (starts[:, None] + np.arange(run)).reshape(-1)[: loc.shape[0]]
        made = jax.tree.map(lambda part: jax.random.normal(next(keys), part.shape, part.dtype), values)
        inputs.append((jnp.asarray(slots, jnp.int32), made))

    def step(state, x, **how):
        loc, values = x
        return kv_write(state, values, loc, dtype=dtype, **how), ()

    def state():
        return tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves)

    return Case("kv_write", state, inputs, step)


def write_bytes(shape: Shape, dtype: Any = jnp.bfloat16) -> int:
    """Bytes that one write reads and stores."""
    _, values, _ = write_shapes(shape, dtype)
    entries = sum(part.size for part in jax.tree.leaves(values))
    return entries * (2 + jnp.dtype(dtype).itemsize)


def ledger_case(operation: str, batch: int, *, context: int = CONTEXT, chunk: int = CHUNK, page: int = PAGE) -> Case:
    """ledger_decode: `batch` rows of half a context and more, one token each. ledger_extend: `batch` new rows of
    `chunk` tokens each. release: `batch` such rows.
    """
    new, none, size = jnp.full(batch, -1, jnp.int32), jnp.zeros(batch, jnp.int32), {"page_size": page}
    if operation == "ledger_decode":
        lens = np.random.default_rng(batch).integers(context // 2, context - LONG, batch).astype(np.int32)
        ledger, capacity = _ledger(batch, context, batch * context, page), int(lens.sum())
        ledger, rows, _, _ = alloc_for_extend(
            ledger, new, none, jnp.asarray(lens), capacity=capacity, implementation="xla"
        )
        return _case(operation, ledger, [(rows, None)] * LONG, functools.partial(ledger_decode, **size))
    grown, capacity = jnp.full(batch, chunk, jnp.int32), batch * chunk
    ledger = _ledger(LONG * batch, context, LONG * capacity, page)
    if operation == "ledger_extend":
        extend = functools.partial(ledger_extend, capacity=capacity, **size)
        return _case(operation, ledger, [(new, none, grown)] * LONG, extend)
    taken = []
    for _ in range(LONG):
        ledger, rows, _, _ = alloc_for_extend(ledger, new, none, grown, capacity=capacity, implementation="xla")
        taken.append((rows,))
    return _case(operation, ledger, taken, lambda books, rows, **how: (release(books, rows, **size, **how),))


def _case(operation: str, ledger: Ledger, inputs: list[Any], update: Callable[..., tuple[Any, ...]]) -> Case:
    """update(books, *x, implementation=, interpret=) -> (books, what else comes out)."""

    def step(books, x, **how):
        books, *out = update(books, *x, **how)
        return books, out

    books = books_of(ledger)
    return Case(operation, lambda: jax.tree.map(jnp.copy, books), inputs, step)


def _ledger(rows: int, context: int, tokens: int, page: int) -> Ledger:
    return Ledger.create(ReqToTokenPool.create(rows, context), PagedTokenToKVPoolAllocator.create(tokens, page))
