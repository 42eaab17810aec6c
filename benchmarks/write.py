"""Cost of one KV write (64 tokens, K and V of 8 heads x 128) in every dtype, at pools of 2^12 to 2^20 slots.

In-graph: inside a long scan that carries the pool, so a write that touched more than its rows would show at once. All
pools are written in the same few slots, so that larger ones do not merely miss the cache more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Measurement, slopes
from kvjax.pools import MHATokenToKVPool

TOKENS, HEADS, WIDTH = 64, 8, 128
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SLOTS = tuple(2**n for n in range(12, 21, 2))
VARIANTS = 16


def write_step(dtype: str, slots: int) -> tuple[Callable, Any, Any]:
    """(step, pool, inputs) of a write of TOKENS bf16 rows into a pool of `slots` slots."""
    pool = MHATokenToKVPool.create(slots - 16, 16, 1, HEADS, WIDTH, dtype=dtype)
    rng = np.random.default_rng(0)
    loc = np.stack([rng.permutation(SLOTS[0] - 16)[:TOKENS] + 16 for _ in range(VARIANTS)]).astype(np.int32)
    rows = jnp.asarray(rng.normal(size=(VARIANTS, TOKENS, HEADS, WIDTH)), jnp.bfloat16)

    def step(pool, x):
        loc, kv = x
        return pool.set_kv_buffer(0, loc, kv, kv), (loc,)

    return step, pool, (jnp.array(loc), rows)


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Microseconds per write and, per dtype, the largest pool against the smallest."""
    for dtype in DTYPES[:2] if quick else DTYPES:
        sizes = (SLOTS[0], SLOTS[-2]) if quick else SLOTS
        progress(f"write: {dtype}, {sizes[0]} to {sizes[-1]} slots")
        times = slopes({str(n): write_step(dtype, n) for n in sizes})
        config = {"dtype": dtype, "tokens": TOKENS, "heads": HEADS, "width": WIDTH}
        for n in sizes:
            yield Measurement("write", median(times[str(n)]), "us", {**config, "slots": n})
        small, large = times[str(sizes[0])], times[str(sizes[-1])]
        grows = median(b / a for a, b in zip(small, large, strict=True))
        yield Measurement("write/pool_ratio", grows, "x", {**config, "slots": [sizes[0], sizes[-1]]})
        jax.clear_caches()
