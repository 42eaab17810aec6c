"""What the references of a ledger's operations do alike, in plain jax.numpy: safe reads and writes, who is live, what
is free, and the release of pages. `kvjax` has the same in the forms that a CPU likes best.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.books import FREE_ROWS, HEAD, Books
from pallas_kernels.indexing import in_range, parked

SMALLEST = -(2**31)


def read(array: jax.Array, at: tuple[jax.Array, ...], wanted: jax.Array | bool = True) -> jax.Array:
    """array[at] where wanted and inside, else its first entry, the padding; at: an index of each axis."""
    for index, extent in zip(at, array.shape, strict=True):
        wanted = wanted & in_range(index, extent)
    return array[tuple(jnp.where(wanted, index, 0) for index in at)]


def write(array: jax.Array, at: tuple[jax.Array, ...], value: jax.Array | int, wanted: jax.Array) -> jax.Array:
    """array[at] = value where wanted; the indices are inside there, and no two are equal."""
    first, *rest = at
    indices = (parked(first, array.shape[0], wanted), *(jnp.where(wanted, index, 0) for index in rest))
    return array.at[indices].set(value, mode="drop", unique_indices=True)


def ranks(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(how many earlier lanes are set, how many are set in all), i32."""
    up_to = jnp.cumsum(flags, dtype=jnp.int32)
    return up_to - flags, up_to[-1]


def lengths(books: Books, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(committed, allocated, owned_from) of each row; of row 0 where there is no such row."""
    inside = in_range(rows, books.lens.shape[0])
    committed, allocated, owned_from = books.lens[jnp.where(inside, rows, 0)].T
    return committed, allocated, owned_from


def live_rows(books: Books, rows: jax.Array) -> jax.Array:
    """bool: the row is handed out (`kvjax.freelist` says how the witness works)."""
    at = read(books.row_pos, (rows,))
    listed = in_range(at, books.row_counters[FREE_ROWS]) & (read(books.free_rows, (at,)) == rows)
    return in_range(rows, books.row_pos.shape[0], 1) & ~listed


def taken_pages(books: Books, pages: jax.Array) -> jax.Array:
    """bool: the id is a page's and the page is handed out."""
    count, at = books.pages.shape[0], read(books.page_pos, (pages,))
    depth = jnp.where(at < books.counters[HEAD], at - books.counters[HEAD] + count, at - books.counters[HEAD])
    inside = in_range(at, count) & ((depth if books.ring else at) < books.counters[books.free])
    return in_range(pages, count + 1, 1) & ~(inside & (read(books.pages, (at,)) == pages))


def wrapped(books: Books, rank: jax.Array) -> jax.Array:
    """Index of the rank-th entry of the ring behind its head; no sum passes int32."""
    at = (books.counters[HEAD] - books.pages.shape[0]) + rank
    return jnp.where(at < 0, at + books.pages.shape[0], at)


def take(books: Books, rank: jax.Array, wanted: jax.Array) -> jax.Array:
    """The page that is handed out as the rank-th next, where wanted."""
    at = wrapped(books, rank) if books.ring else books.counters[books.free] - 1 - rank
    return read(books.pages, (at,), wanted)


def took(books: Books, count: jax.Array) -> jax.Array:
    """`counters` after the next `count` pages were handed out."""
    counters = books.counters.at[books.free].add(-count)
    return counters.at[HEAD].set(wrapped(books, count)) if books.ring else counters


def distinct(ids: jax.Array, used: jax.Array) -> jax.Array:
    """bool[]: no two used lanes hold the same id."""
    lane = jnp.arange(ids.size)
    same = (ids[:, None] == ids[None, :]) & used[:, None] & used[None, :]
    return ~jnp.any(same & (lane[:, None] != lane[None, :]))


def number_distinct(ids: jax.Array, used: jax.Array) -> jax.Array:
    """i32[]: how many different ids the used lanes hold."""
    order = jnp.lexsort((ids, ~used))  # the used ones first, equal ones side by side
    ids, used = ids[order], used[order]
    new = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    return jnp.sum(new & used, dtype=jnp.int32)


def pages_of(books: Books, rows: jax.Array, start: jax.Array, end: jax.Array, used: jax.Array, ps: int) -> jax.Array:
    """i32[b * pages per row]: pages that begin at tokens start .. end - 1 of each used row; 0 elsewhere."""
    column = jnp.arange(0, books.req_to_token.shape[1], ps, dtype=jnp.int32)[None, :]
    held = used[:, None] & (column >= start[:, None]) & (column < end[:, None])
    slot = read(books.req_to_token, tuple(jnp.broadcast_arrays(rows[:, None], column)), held)
    return jnp.where(held, slot // ps, 0).reshape(-1)


def give_back(books: Books, pages: jax.Array) -> Books:
    """Release pages (0 = padding) in the given order; a second copy, and what is not taken, are faults."""
    candidates = taken_pages(books, pages)
    mark = SMALLEST + jnp.arange(pages.size, dtype=jnp.int32)  # below every index: the first lane of a page wins
    marked = books.page_pos.at[jnp.where(candidates, pages, 0)].min(jnp.where(candidates, mark, 2**31 - 1))
    fresh = candidates & (read(marked, (pages,)) == mark)
    rank, total = ranks(fresh)
    free = books.counters[books.free]
    at = wrapped(books, free + rank) if books.ring else free + total - 1 - rank
    refused = number_distinct(pages, (pages != 0) & ~fresh)
    return books._replace(
        pages=write(books.pages, (at,), pages, fresh),
        page_pos=write(marked, (pages,), at, fresh),
        counters=books.counters.at[books.free].add(total).at[books.free + 2].add(refused),
    )
