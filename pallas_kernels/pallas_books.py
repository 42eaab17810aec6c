"""What the Pallas kernels of a ledger's operations do alike: who is live, what is free, which lanes say the same.

All of it runs in one program, with one lane per request. Lanes are padded to a power of two; a padding lane repeats
the last real one and stores what that one stores.
"""
# pyright: reportArgumentType=false
# A piece of a reference, `ref.at[...]`, has no type that load and store declare.

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import div, power_of_two
from pallas_kernels.books import OTHERS


def store(ref, at: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """ref[at] = value where mask.

    JAX's interpreter writes the old value through the index of a masked lane, over what another lane has just
    stored there; so it stores lane by lane.
    """
    if not interpret:
        plgpu.store(ref.at[at], value, mask=mask)
        return

    def one(i, carry):
        @pl.when(mask[i])
        def _():
            ref[tuple(a[i] for a in at)] = value[i]

        return carry

    lax.fori_loop(0, mask.shape[0], one, 0)


def barrier(interpret: bool) -> None:
    """What any thread has stored before is what every thread reads after. The interpreter has one thread."""
    if not interpret:
        plgpu.debug_barrier()


def lanes_of(batch: int) -> tuple[jax.Array, jax.Array]:
    """(lane that each padded lane repeats: i32[p], whether it is that lane itself: bool[p])."""
    lane = jnp.arange(power_of_two(batch), dtype=jnp.int32)
    return jnp.minimum(lane, batch - 1), lane < batch


def number(flags: jax.Array) -> jax.Array:
    """i32[]: how many flags are set."""
    return jnp.sum(flags.astype(jnp.int32))


def exclusive(values: jax.Array) -> jax.Array:
    """i32: sum of the earlier lanes."""
    return jnp.cumsum(values) - values


def floor_div(x: jax.Array, d: int) -> jax.Array:
    """x // d for any x."""
    return jnp.where(x < 0, -1 - div(-1 - x, d), div(x, d))


def read2(ref, row: jax.Array, col: jax.Array, wanted: jax.Array) -> jax.Array:
    """ref[row, col] where wanted and inside, else entry [0, 0]."""
    inside = wanted & (row >= 0) & (row < ref.shape[0]) & (col >= 0) & (col < ref.shape[1])
    return plgpu.load(ref.at[jnp.where(inside, row, 0), jnp.where(inside, col, 0)])


def live_rows(row: jax.Array, row_pos, free_rows, free: jax.Array) -> jax.Array:
    """bool: the row is handed out (`kvjax.freelist` says how the witness works)."""
    real = (row > 0) & (row < row_pos.shape[0])
    at = plgpu.load(row_pos.at[jnp.where(real, row, 0)])
    listed = (at >= 0) & (at < free)
    return real & ~(listed & (plgpu.load(free_rows.at[jnp.where(listed, at, 0)]) == row))


def taken_pages(page: jax.Array, page_pos, pages, free: jax.Array, head: jax.Array | None) -> jax.Array:
    """bool: the id is a page's and the page is handed out. head: of a ring; None: a stack."""
    count = pages.shape[0]
    real = (page > 0) & (page <= count)
    at = plgpu.load(page_pos.at[jnp.where(real, page, 0)])
    inside = (at >= 0) & (at < count)
    depth = at
    if head is not None:
        depth = jnp.where(at < head, at - head + count, at - head)
    listed = inside & (depth < free)
    return real & ~(listed & (plgpu.load(pages.at[jnp.where(listed, at, 0)]) == page))


def wrapped(head: jax.Array, rank: jax.Array, count: int) -> jax.Array:
    """Index of the rank-th entry of a ring of `count` entries behind its head; no sum passes int32."""
    at = (head - count) + rank
    return jnp.where(at < 0, at + count, at)


def twins(rows, row: jax.Array, lane: jax.Array, used=None) -> tuple[jax.Array, jax.Array]:
    """bool, bool: an earlier, a later lane holds the same row; `used(lanes)` says which lanes are looked at."""
    batch = rows.shape[0]
    width = min(OTHERS, power_of_two(batch))

    def turn(k, found):
        other = k * width + jnp.arange(width, dtype=jnp.int32)
        at = jnp.minimum(other, batch - 1)
        looked = other < batch if used is None else (other < batch) & used(at)
        same = (row[:, None] == plgpu.load(rows.at[at])[None, :]) & looked[None, :]
        before = same & (other[None, :] < lane[:, None])
        behind = same & (other[None, :] > lane[:, None])
        return tuple(
            jnp.maximum(old, jnp.max(new.astype(jnp.int32), axis=1))
            for old, new in zip(found, (before, behind), strict=True)
        )

    none = jnp.zeros(row.shape, jnp.int32)
    before, behind = lax.fori_loop(0, pl.cdiv(batch, width), turn, (none, none))
    return before > 0, behind > 0
