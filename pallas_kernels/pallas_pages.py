"""Pages of several rows go back to the free list, as a part of a Pallas kernel of one program.

The pages are taken in blocks, in lane order, three times: every page gets the mark of its first lane in the witness;
the marks tell how many pages go back, which says where they lie; then they are written. So a page that stands twice
goes back once, at its first place, and no prefix sum is larger than a block.

JAX's interpreter has no atomic minimum for equal indices. Blocks go one after the other, so an earlier block's mark
is known when the next one looks, and inside a block the lanes are compared with each other.
"""
# pyright: reportArgumentType=false
# A piece of a reference, `ref.at[...]`, has no type that load and store declare.

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import power_of_two
from pallas_kernels.pallas_books import barrier, exclusive, floor_div, number, store, taken_pages, wrapped

COMPARISONS, MOST = 8_192, 64  # pages x lanes that are compared at once, pages of a block
LARGEST, SMALLEST = 2**31 - 1, -(2**31)


class Held(NamedTuple):
    """The pages to release: `count` pages of each lane's row, from its page `first` on. i32[lanes] each."""

    row: jax.Array
    first: jax.Array
    count: jax.Array  # 0 on lanes that pad the batch


def block_size(batch: int) -> int:
    """Pages per block, for `batch` lanes."""
    return max(16, min(MOST, COMPARISONS // power_of_two(batch)))


def give_back(
    held: Held, table, pages, page_pos, free: jax.Array, head: jax.Array | None, page_size: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Release the pages. table, pages, page_pos: references. free, head: i32[]; head is None for a stack.

    Returns (pages that went back, different pages that were refused), i32[]; the caller holds the counters.
    """
    num_pages, block = pages.shape[0], block_size(held.row.shape[0])
    end = jnp.cumsum(held.count)
    begin, total = end - held.count, jnp.sum(held.count)
    skip, blocks = held.first - begin, lax.div(total + (block - 1), jnp.int32(block))

    def items(k):
        """(mark of each item, its page; 0 behind the last item)."""
        item = k * block + jnp.arange(block, dtype=jnp.int32)
        mine = (begin[None, :] <= item[:, None]) & (item[:, None] < end[None, :])
        row = jnp.sum(jnp.where(mine, held.row[None, :], 0), axis=1)
        column = item + jnp.sum(jnp.where(mine, skip[None, :], 0), axis=1)
        inside = item < total
        slot = plgpu.load(table.at[jnp.where(inside, row, 0), jnp.where(inside, column * page_size, 0)])
        return item + SMALLEST, floor_div(jnp.where(inside, slot, 0), page_size)

    def fresh_of(mark, page):
        """bool: the item's page goes back, and this is its first item."""
        real = (page > 0) & (page <= num_pages)
        return real & (plgpu.load(page_pos.at[jnp.where(real, page, 0)]) == mark)

    def look(k, carry):
        mark, page = items(k)
        # A mark is below every index, so what is marked counts as taken; it keeps the first mark.
        taken = taken_pages(page, page_pos, pages, free, head)
        marked = plgpu.load(page_pos.at[jnp.where(taken, page, 0)]) < SMALLEST + k * block
        earlier = (page[:, None] == page[None, :]) & (mark[None, :] < mark[:, None])
        first = jnp.max(earlier.astype(jnp.int32), axis=1) == 0
        barrier(interpret)
        store(page_pos, (jnp.where(taken, page, 0),), mark, taken & first & ~marked, interpret)
        barrier(interpret)
        return carry

    lax.fori_loop(0, blocks, look, jnp.int32(0))

    def count(k, sums):
        mark, page = items(k)
        fresh = fresh_of(mark, page)
        return sums[0] + number(fresh), sums[1] + number((page != 0) & ~fresh)

    given, refused = lax.fori_loop(0, blocks, count, (jnp.int32(0), jnp.int32(0)))

    # Different pages among the refused: the smallest, the smallest above it, and so on. Usually there is none.
    def next_fault(carry):
        _, faults, least = carry

        def lowest(k, carry):
            found, smallest = carry
            mark, page = items(k)
            looked = (page != 0) & ~fresh_of(mark, page) & ((faults == 0) | (page > least))
            return found + number(looked), jnp.minimum(smallest, jnp.min(jnp.where(looked, page, LARGEST)))

        found, smallest = lax.fori_loop(0, blocks, lowest, (jnp.int32(0), jnp.int32(LARGEST)))
        return found, faults + (found > 0).astype(jnp.int32), smallest

    _, faults, _ = lax.while_loop(lambda c: c[0] > 0, next_fault, (refused, jnp.int32(0), jnp.int32(0)))

    def write(k, done):
        mark, page = items(k)
        fresh = fresh_of(mark, page)
        rank = done + exclusive(fresh.astype(jnp.int32))
        at = free + given - 1 - rank if head is None else wrapped(head, free + rank, num_pages)
        barrier(interpret)
        store(pages, (jnp.where(fresh, at, 0),), page, fresh, interpret)
        store(page_pos, (jnp.where(fresh, page, 0),), at, fresh, interpret)
        return done + number(fresh)

    barrier(interpret)
    lax.fori_loop(0, blocks, write, jnp.int32(0))
    return given, faults


def row_pages(start: jax.Array, end: jax.Array, page_size: int, width: int) -> tuple[jax.Array, jax.Array]:
    """(first, count) of the pages that begin at tokens start .. end - 1 of a row of `width` tokens."""
    ceil = [lax.div(x, jnp.int32(page_size)) + (lax.rem(x, jnp.int32(page_size)) != 0) for x in (start, end)]
    return ceil[0], jnp.maximum(jnp.minimum(ceil[1], pl.cdiv(width, page_size)) - ceil[0], 0)
