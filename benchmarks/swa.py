"""What sliding windows save: pages held per layer kind while a sequence grows, and tokens served by a fixed budget.

Nothing here is a time: the figures are counts that the ledger itself keeps, the same on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Measurement
from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    release_window,
)
from kvjax.layout import round_down, round_up

WINDOW, CHUNK, WINDOWS = 128, 256, 64  # tokens, tokens, how many windows long the sequence becomes
LAYERS = {"full": 5, "window": 25}  # gemma3's 5 window layers for each that sees the whole row
BUDGET = 1 << 21  # tokens of one layer: 69,905 tokens in a pool that keeps them in all 30 layers


def held(ledger: Ledger) -> tuple[jax.Array, jax.Array]:
    """(pages held for full layers, for window layers), i32[] each."""
    a, ps = ledger.allocator, ledger.page_size
    if isinstance(a, SWATokenToKVPoolAllocator):
        full, swa = a.full_available_size(), a.swa_available_size()
        return (a.size_full - full) // ps, (a.size_swa - swa) // ps
    used = (a.size - a.available_size()) // ps
    return (jnp.zeros_like(used), used) if isinstance(a, PureSWATokenToKVPoolAllocator) else (used, used)


def grow(ledger: Ledger, tokens: int, prompt: int) -> dict[str, np.ndarray]:
    """Pages held by one row: prefilled to `prompt` tokens chunk by chunk, then one token per step to `tokens`.

    Returns i32[steps, 2] each: "inside" an extend, before it releases; "extend", after it; "decode", after each step.
    """
    extend = jax.jit(lambda s, rows, p, q: alloc_for_extend(s, rows, p, q, capacity=CHUNK))
    release = jax.jit(lambda s, rows: release_window(s, rows, max_tokens=CHUNK))

    @functools.partial(jax.jit, static_argnums=2)
    def decode(ledger, rows, steps):
        def step(ledger, _):
            ledger, _, _, ok = alloc_for_decode(ledger, rows)
            return ledger, (jnp.stack(held(ledger)), ok)

        return jax.lax.scan(step, ledger, length=steps)

    rows, seen = jnp.array([-1]), {"inside": [], "extend": []}
    for start in range(0, prompt, CHUNK):
        ledger, rows, _, ok = extend(ledger, rows, jnp.array([start]), jnp.array([min(start + CHUNK, prompt)]))
        if not ok:
            raise RuntimeError(f"an extend from {start} tokens was refused though the pool is large enough.")
        seen["inside"].append(np.stack(held(ledger)))
        ledger = release(ledger, rows)
        seen["extend"].append(np.stack(held(ledger)))
    ledger, (pages, ok) = decode(ledger, rows, tokens - prompt)
    if not np.all(ok):
        raise RuntimeError("a decode step was refused though the pool is large enough.")
    return {name: np.array(values) for name, values in seen.items()} | {"decode": np.asarray(pages)}


def served(ledger: Ledger, length: int) -> int:
    """Tokens of the sequences of `length` tokens that the ledger holds at once before it refuses one."""
    extend = jax.jit(lambda s, rows, p, q: alloc_for_extend(s, rows, p, q, capacity=CHUNK))
    release = jax.jit(lambda s, rows: release_window(s, rows, max_tokens=CHUNK))
    whole = 0
    while True:
        rows = jnp.array([-1])
        for start in range(0, length, CHUNK):
            ledger, rows, _, ok = extend(ledger, rows, jnp.array([start]), jnp.array([min(start + CHUNK, length)]))
            if not ok:
                return whole
            ledger = release(ledger, rows)
        whole += length


def budget(kind: str, length: int, page_size: int) -> Ledger:
    """A ledger whose pools cost BUDGET tokens of one layer in all, for sequences of `length` tokens."""
    full, window = LAYERS["full"], LAYERS["window"]
    most = WINDOW + CHUNK + 2 * page_size
    if kind == "one":
        size = round_down(BUDGET // (full + window), page_size)
        return Ledger.create(
            ReqToTokenPool.create(size // length + 1, length), PagedTokenToKVPoolAllocator.create(size, page_size)
        )
    if kind == "dual":  # one row at a time is inside an extend, the others hold their window
        per_row = full * round_up(length, page_size) + window * (WINDOW + 2 * page_size)
        rows = (BUDGET - window * most) // per_row
        swa = round_up(rows * (WINDOW + 2 * page_size) + most, page_size)
        size = round_down((BUDGET - window * swa) // full, page_size)
        allocator = SWATokenToKVPoolAllocator.create(size, swa, page_size)
    else:
        ring = round_up(WINDOW + CHUNK - 1, page_size)
        rows = (BUDGET - window * ring) // (full * round_up(length, page_size) + window * ring)
        size = round_down((BUDGET - window * ring * (rows + 1)) // full, page_size)
        allocator = SWARingTokenToKVPoolAllocator.create(size, page_size, rows, WINDOW, CHUNK)
    return Ledger.create(ReqToTokenPool.create(rows, length), allocator, WINDOW)


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Most pages held, times the page size, and tokens served."""
    windows = 8 if quick else WINDOWS
    for page_size in (16,) if quick else (1, 16, 64):
        tokens, prompt = windows * WINDOW, 2 * CHUNK
        for kind in ("dual", "pure"):
            progress(f"swa: {kind}, page {page_size}, {tokens} tokens")
            size = round_up(tokens, page_size)
            allocator = (
                SWATokenToKVPoolAllocator.create(size, size, page_size)
                if kind == "dual"
                else PureSWATokenToKVPoolAllocator.create(size, page_size)
            )
            pages = grow(Ledger.create(ReqToTokenPool.create(1, tokens), allocator, WINDOW), tokens, prompt)
            config = {"page_size": page_size, "window": WINDOW, "tokens": tokens, "kind": kind}
            bound = WINDOW + 2 * page_size
            for when, allowed in (("decode", bound), ("inside", bound + CHUNK)):
                most = int(pages[when][:, 1].max()) * page_size
                yield Measurement(f"swa/window_tokens_held/{when}", most, "tokens", {**config, "bound": allowed})
            if kind == "dual":
                yield Measurement("swa/full_tokens_held", int(pages["decode"][-1, 0]) * page_size, "tokens", config)
    for length in (2048,) if quick else (1024, 4096, 16384):
        one = None
        for kind in ("one", "dual", "ring"):
            progress(f"swa: tokens served by a budget, {kind}, sequences of {length}")
            number = served(budget(kind, length, 16), length)
            config = {"length": length, "page_size": 16, "window": WINDOW, "layers": "5 full, 25 window"}
            yield Measurement(f"swa/tokens_served/{kind}", number, "tokens", config)
            one = number if one is None else one
            if kind != "one":
                yield Measurement(f"swa/tokens_served/{kind}_against_one", number / one, "x", config)
