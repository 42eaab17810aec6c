"""The kernels on a GPU: every implementation of them, JAX's own paged attention, and a device copy as the measure.

A step of decode reads every key and value once, so its best time is that of moving those bytes. A copy moves each byte
twice, once in and once out; its bandwidth is what `share` is relative to. KV writes and the operations on the books
update in place, and are timed inside of programs (`benchmarks.in_place`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import in_place
from benchmarks.measure import Measurement, interleaved, working
from benchmarks.shapes import BATCHES, BOOKS, SHAPES, WRITES, Shape
from pallas_kernels import registry
from pallas_kernels.paged_decode_gqa import paged_decode_gqa
from pallas_kernels.paged_decode_mla import paged_decode_mla
from pallas_kernels.paged_extend import paged_extend

CALLS = 20  # in a row, so that the time of a launch from Python is hidden behind the one before


def arrays(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Random queries and pool; every row holds `context` tokens."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    pages = shape.context // shape.page
    order = rng.permutation(shape.batch * pages).astype(np.int32).reshape(shape.batch, pages) + 1
    slots = order[:, :, None] * shape.page + np.arange(shape.page, dtype=np.int32)
    size = (shape.batch * pages + 1) * shape.page
    lens = np.full(shape.batch, shape.context, np.int32)
    q_shape = (shape.batch, shape.new, shape.heads, shape.dim)
    made = {
        "q": jax.random.normal(key, q_shape if shape.new > 1 else (q_shape[0], *q_shape[2:]), jnp.bfloat16),
        "k": jax.random.normal(jax.random.fold_in(key, 1), (size, shape.kv_heads, shape.dim), jnp.bfloat16),
        "table": jnp.asarray(np.concatenate([np.zeros((1, shape.context), np.int32), slots.reshape(shape.batch, -1)])),
        "rows": jnp.arange(1, shape.batch + 1, dtype=jnp.int32),
        "lens": jnp.asarray(lens),
        "pages": jnp.asarray(order),
        "positions": jnp.asarray(lens[:, None] - shape.new + np.arange(shape.new, dtype=np.int32)),
    }
    if shape.rank is None:
        made["v"] = jax.random.normal(jax.random.fold_in(key, 2), made["k"].shape, jnp.bfloat16)
    return made


def call_of(shape: Shape, given: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """(operation, its arrays, its static arguments) that compute the shape."""
    a, how = given, {"scale": shape.dim**-0.5}
    if shape.new > 1:
        ordered = (a["q"], a["k"], a.get("v"), a["table"], a["rows"], a["positions"], a["lens"])
        return paged_extend, ordered, how | {"rank": shape.rank}
    if shape.rank is not None:
        return paged_decode_mla, (a["q"], a["k"], a["table"], a["rows"], a["lens"]), how | {"rank": shape.rank}
    return paged_decode_gqa, (a["q"], a["k"], a["v"], a["table"], a["rows"], a["lens"]), how


def implementations(shape: Shape, given: dict[str, Any], *, interpret: bool = False) -> dict[str, Callable[[], Any]]:
    """Every way to compute the shape that can run here, as calls without arguments; interpret: the Pallas ones."""
    operation, ordered, how = call_of(shape, given)
    names = [n for n in registry.available(operation.__name__) if not (interpret and n == "triton")]
    calls = {}
    for name in names:
        static = {"implementation": name, "interpret": interpret and name != "xla", **how}
        calls[name] = functools.partial(jax.jit(functools.partial(operation, **static)), *ordered)
    if shape.rank is None and shape.new == 1:
        calls["jax.experimental"] = jax_paged_attention(shape, given, interpret)
    return calls


def jax_paged_attention(shape: Shape, a: dict[str, Any], interpret: bool) -> Callable[[], Any]:
    """JAX's own kernel, which wants pages by head: [Hkv, pages, page, D]. The change of layout happens here, once."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def by_head(pool: jax.Array) -> jax.Array:
        return jnp.moveaxis(pool.reshape(-1, shape.page, shape.kv_heads, shape.dim), 2, 0)

    k, v = by_head(a["k"]), by_head(a["v"])
    pages = a["pages"].shape[1]
    splits = math.gcd(16, pages)
    attend = functools.partial(
        paged_attention, k_splits=splits, pages_per_compute_block=math.gcd(8, pages // splits), interpret=interpret
    )
    # It does not scale its scores.
    q = (a["q"].astype(jnp.float32) * shape.dim**-0.5).astype(a["q"].dtype)
    return functools.partial(jax.jit(attend), q, k, v, a["pages"], a["lens"])


def kv_bytes(shape: Shape) -> int:
    """Bytes of keys and values that one call has to read."""
    return shape.batch * shape.context * shape.kv_heads * shape.dim * 2 * (2 if shape.rank is None else 1)


def seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds per call: the median of the rounds, in which all take turns at CALLS calls in a row."""
    times = interleaved({name: functools.partial(_repeated, call) for name, call in calls.items()}, rounds)
    return {name: median(values) / CALLS for name, values in times.items()}


def _repeated(call: Callable[[], Any]) -> Any:
    out = None
    for _ in range(CALLS):
        out = call()
    return out


def no_gpu(what: str) -> bool:
    """Whether there is no GPU, which is then said on stderr. what: "kernels are timed"."""
    missing = jax.default_backend() != "gpu"
    if missing:
        print(
            f"No GPU was seen, JAX runs on {jax.default_backend()!r}; {what} on an NVIDIA GPU only, so nothing was "
            "measured.",
            file=sys.stderr,
        )
    return missing


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Microseconds per call, and of attention and writes the bandwidth and its share of a copy's."""
    if no_gpu("kernels are timed"):
        return
    first = 1 if quick else None
    for title in list(SHAPES)[:first]:
        progress(title)
        yield from attention(title, SHAPES[title], rounds=5 if quick else 15)
    rounds = 9 if quick else 31
    for title in list(WRITES)[:first]:
        progress(title)
        shape, dtype = WRITES[title]
        yield from write(title, SHAPES[shape], jnp.dtype(dtype), rounds=rounds)
    for operation in BOOKS[:first]:
        for batch in BATCHES[:first]:
            progress(f"{operation}, batch {batch}")
            yield from books(operation, batch, rounds=rounds)


def attention(title: str, shape: Shape, *, rounds: int, interpret: bool = False) -> Iterator[Measurement]:
    """us per call, GB/s of keys and values, and the share of the copy's bandwidth."""
    given = arrays(shape)
    calls = working(title, implementations(shape, given, interpret=interpret))
    buffer = jnp.zeros(kv_bytes(shape) // 4, jnp.float32)
    times = seconds({**calls, "copy": functools.partial(jax.jit(jnp.copy), buffer)}, rounds)
    yield from _by_bytes(title, times, kv_bytes(shape), 2 * buffer.nbytes, dataclasses.asdict(shape))


def write(title: str, shape: Shape, dtype: Any, *, rounds: int, interpret: bool = False) -> Iterator[Measurement]:
    """us per write of a layer, GB/s read and written, and the share of a copy of as many bytes."""
    case, moved = in_place.write_case(shape, dtype), in_place.write_bytes(shape, dtype)
    copy = in_place.copy_case(moved)
    steps = {name: (step, case) for name, step in case.steps(interpret=interpret).items()}
    times = in_place.seconds({**steps, "copy": (copy.step, copy)}, rounds, title)
    yield from _by_bytes(title, times, moved, moved, dataclasses.asdict(shape) | {"dtype": dtype.name})


def books(operation: str, batch: int, *, rounds: int, interpret: bool = False, **sizes: int) -> Iterator[Measurement]:
    """us per operation; sizes: see `in_place.ledger_case`."""
    case, title = in_place.ledger_case(operation, batch, **sizes), f"{operation}, batch {batch}"
    times = in_place.seconds({n: (step, case) for n, step in case.steps(interpret=interpret).items()}, rounds, title)
    for name, took in times.items():
        config = {"operation": operation, "batch": batch, "page": in_place.PAGE} | sizes
        yield Measurement(f"kernels/{title}/{name}", took * 1e6, "us", config | _machine())


def _by_bytes(title: str, times: dict[str, float], moved: int, copied: int, about: Any) -> Iterator[Measurement]:
    """moved: bytes that each of `times` has to move; copied: bytes that "copy" among them moves."""
    config = {"shape": title, **_machine(), **about}
    bandwidth = copied / times["copy"]
    yield Measurement(f"kernels/{title}/copy", bandwidth / 1e9, "GB/s", config)
    for name in times.keys() - {"copy"}:
        rate = moved / times[name]
        yield Measurement(f"kernels/{title}/{name}", times[name] * 1e6, "us", config)
        yield Measurement(f"kernels/{title}/{name}/bandwidth", rate / 1e9, "GB/s", config)
        yield Measurement(f"kernels/{title}/{name}/share", rate / bandwidth, "of the copy", config)


def _machine() -> dict[str, str]:
    return {"card": jax.devices()[0].device_kind, "jax": jax.__version__}
