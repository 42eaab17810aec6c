"""Cost of each allocator operation: in-graph per call, and dispatched as a jitted call of its own.

Every step starts from the same counters, so each call finds the same number of free pages; pages come from a working
set of the same size in every pool, because random slots over a larger pool cost more cache misses, which are the
machine's and not the algorithm's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Measurement, interleaved, slopes
from kvjax import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

VARIANTS = 16  # different inputs that a scan cycles through
NEW_TOKENS = 128  # of a request in an extend, and of a whole row in a free
POOLS = (4096, 262144)  # pages
SGLANG_US = {"alloc_decode": 63.0, "alloc_extend": 555.0, "free_whole_rows": 427.0}  # batch 64, page 16, its CPU path

Step = tuple[Callable, Any, Any]


def steps_of(num_pages: int, page_size: int, batch: int) -> dict[str, Step]:
    """Every operation as (step, state, inputs) on a pool of `num_pages`, with a working set of POOLS[0] pages."""
    rng = np.random.default_rng(batch * 1000 + page_size)
    full = _allocator(num_pages, page_size)
    working = min(POOLS[0], num_pages)  # pages in play: half of them handed out, half free
    live, free = working // 2, working - working // 2
    # The oldest pages are taken, and the free list is cut to the rest of the working set.
    taken, _, ok = full.alloc(jnp.int32(live * page_size), capacity=live * page_size)
    assert bool(ok)
    state = _cut(taken, num_pages, working, free)
    counters = state.counters

    def step(operation: Callable) -> Callable:
        def body(a, x):
            a, *out = operation(a, x)
            return dataclasses.replace(a, counters=counters), (out, a.counters)

        return body

    i32 = np.int32
    lens = rng.integers(1, 4 * NEW_TOKENS, (VARIANTS, batch)).astype(i32)
    page = rng.integers(1, live, (VARIANTS, batch)).astype(i32)
    prefix = lens - 1
    last = (page * page_size + (prefix - 1) % page_size).astype(i32)
    per_row = -(-NEW_TOKENS // page_size)
    rows = min(batch, live // per_row)
    starts = np.stack([rng.permutation(live - 1)[: rows * per_row] for _ in range(VARIANTS)]) + 1
    whole = (starts[:, :, None] * page_size + np.arange(page_size)).reshape(VARIANTS, -1).astype(i32)
    shuffled = np.stack([rng.permutation(w) for w in whole])
    ragged = _ragged(whole.reshape(VARIANTS, rows, -1), rng)
    extend = min(NEW_TOKENS, free * page_size // (2 * batch))
    grown = (prefix + extend).astype(i32)
    width = batch * extend

    out: dict[str, Step] = {
        "alloc_decode": (
            step(lambda a, x: a.alloc_decode(x[0], x[1], x[0] > 0)),
            state,
            (jnp.array(lens), jnp.array(last)),
        ),
        "alloc_extend": (
            step(lambda a, x: a.alloc_extend(x[0], x[1], x[2], capacity=width)),
            state,
            (jnp.array(prefix), jnp.array(grown), jnp.array(last)),
        ),
        "alloc": (
            step(lambda a, x: a.alloc(x, capacity=width)),
            state,
            jnp.array(rng.integers(1, max(2, width // page_size), VARIANTS) * page_size, jnp.int32),
        ),
        "free_whole_rows": (step(lambda a, x: (a.free(x),)), state, jnp.array(whole)),
        "free_ragged": (step(lambda a, x: (a.free(x),)), state, jnp.array(ragged)),
        "free_shuffled": (step(lambda a, x: (a.free(x),)), state, jnp.array(shuffled)),
        "free_segment": (
            step(lambda a, x: (a.free_segment(x),)),
            state,
            jnp.array(whole[:, : per_row * page_size]),
        ),
        "free_page_ids": (step(lambda a, x: (a.free_page_ids(x),)), state, jnp.array(starts, jnp.int32)),
    }
    return out


def _allocator(num_pages: int, page_size: int):
    if page_size == 1:
        return TokenToKVPoolAllocator.create(num_pages)
    return PagedTokenToKVPoolAllocator.create(num_pages * page_size, page_size)


def _cut(taken, num_pages: int, working: int, free: int):
    """The same allocator with only `free` free pages, all from the working set."""
    pages = list(range(working - free + 1, working + 1))
    if isinstance(taken, TokenToKVPoolAllocator):
        return TokenToKVPoolAllocator.from_lists(pages, size=num_pages)
    return PagedTokenToKVPoolAllocator.from_lists(pages, size=taken.size, page_size=taken.page_size)


def _ragged(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The rows cut to random lengths, back to back, 0 behind them."""
    out = np.zeros((rows.shape[0], rows.shape[1] * rows.shape[2]), np.int32)
    for line, row in zip(out, rows, strict=True):
        parts = [r[: rng.integers(1, len(r) + 1)] for r in row]
        flat = np.concatenate(parts)
        line[: len(flat)] = flat
    return out


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """In-graph cost at both pool sizes, their ratio, the factor to SGLang's CPU path, and dispatch cost."""
    batches, pages = ((64,), (16,)) if quick else ((1, 16, 64, 256), (1, 16, 64))
    for page_size in pages:
        for batch in batches:
            progress(f"ledger: page {page_size}, batch {batch}")
            small, large = (steps_of(n, page_size, batch) for n in POOLS)
            for name in small:
                pair = {str(n): s[name] for n, s in zip(POOLS, (small, large), strict=True)}
                times = slopes(pair)
                config = {"batch": batch, "page_size": page_size}
                for pool in POOLS:
                    cost = median(times[str(pool)])
                    yield Measurement(f"ledger/{name}", cost, "us", {**config, "pages": pool, "kind": "in-graph"})
                grows = median(b / a for a, b in zip(times[str(POOLS[0])], times[str(POOLS[1])], strict=True))
                yield Measurement(f"ledger/{name}/pool_ratio", grows, "x", config)
                if (batch, page_size) == (64, 16) and name in SGLANG_US:
                    factor = SGLANG_US[name] / median(times[str(POOLS[0])])
                    yield Measurement(f"ledger/{name}/faster_than_sglang_cpu", factor, "x", config)
                step, state, inputs = small[name]
                call = jax.jit(step)
                one = jax.tree.map(lambda v: v[0], inputs)
                dispatch = interleaved({"call": lambda call=call, state=state, one=one: call(state, one)}, 101)
                yield Measurement(
                    f"ledger/{name}",
                    median(dispatch["call"]) * 1e6,
                    "us",
                    {**config, "pages": POOLS[0], "kind": "jitted call"},
                )
