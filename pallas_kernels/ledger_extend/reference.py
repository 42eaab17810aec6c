"""ledger_extend in plain jax.numpy: the meaning of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import ceil_div
from pallas_kernels.books import ALLOCATED, COMMITTED, FREE_ROWS, OWNED_FROM, Books
from pallas_kernels.ledger_extend import EXTENDED
from pallas_kernels.reference_books import (
    distinct,
    give_back,
    lengths,
    live_rows,
    pages_of,
    ranks,
    read,
    take,
    taken_pages,
    took,
    write,
)

NEW_ROW = -1


def ledger_extend(*arrays: jax.Array, page_size: int, capacity: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_extend`. Returns the arrays of EXTENDED, then (rows, loc, ok)."""
    *state, rows, prefix, seq = arrays
    books, ps = Books(*state), page_size
    table, batch = books.req_to_token, rows.size
    wants, held, grows = rows == NEW_ROW, rows > 0, seq > prefix
    committed, allocated, owned_from = lengths(books, rows)
    started, stopped = ceil_div(prefix, ps), ceil_div(seq, ps)  # pages that the prefix and that the row touches
    own = jnp.where(wants, started * ps, jnp.minimum(owned_from, started * ps))
    last = read(table, (rows, prefix - 1), held)
    inside = grows & (prefix % ps != 0)  # the chunk begins in a page that the row has

    def goes_on(books):
        page, offset = last // ps, (prefix - 1) % ps
        return ~inside | (taken_pages(books, page) & (last % ps == offset))

    named = (wants | live_rows(books, rows)) & (prefix <= jnp.where(held, committed, 0))
    legal = jnp.where(rows == 0, seq == prefix, named) & (prefix >= 0) & (seq >= prefix) & (seq <= table.shape[1])
    legal &= (~inside | (own <= prefix - prefix % ps)) & goes_on(books)
    _, new_rows = ranks(wants)
    legal = jnp.all(legal) & distinct(rows, held) & (new_rows <= books.row_counters[FREE_ROWS])

    # Pages that a row has beyond its prefix go back, but only if the whole call will then succeed.
    keep = jnp.maximum(started * ps, owned_from)
    surplus = jnp.where(held & grows, jnp.maximum(ceil_div(allocated, ps) - ceil_div(keep, ps), 0), 0)
    new = jnp.where(legal & grows, seq - prefix, 0)
    needed = jnp.where(new > 0, stopped - started, 0)
    fits = legal & (jnp.sum(new, dtype=jnp.int32) <= capacity)
    fits &= jnp.sum(needed, dtype=jnp.int32) <= books.counters[books.free] + jnp.sum(surplus, dtype=jnp.int32)
    books = lax.cond(
        fits & jnp.any(surplus > 0),
        lambda b: give_back(b, pages_of(b, rows, keep, allocated, surplus > 0, ps)),
        lambda b: b,
        books,
    )
    # A table in which two rows name one page may end here: the page that goes on has just gone back.
    ok = fits & jnp.all(goes_on(books)) & (jnp.sum(needed, dtype=jnp.int32) <= books.counters[books.free])

    rank, taken = ranks(wants & ok)
    named = read(books.free_rows, (books.row_counters[FREE_ROWS] - taken + rank,), wants & ok)
    rows = jnp.where(ok, jnp.where(wants, named, rows), 0)
    generation = write(books.generation, (rows,), read(books.generation, (rows,)) + 1, wants & ok)

    new, needed = jnp.where(ok, new, 0), jnp.where(ok, needed, 0)
    token, lane = jnp.arange(capacity, dtype=jnp.int32), jnp.arange(batch, dtype=jnp.int32)
    before = lane[None, :] < lane[:, None]
    start = jnp.sum(jnp.where(before, new, 0), axis=1, dtype=jnp.int32)
    first = jnp.sum(jnp.where(before, needed, 0), axis=1, dtype=jnp.int32)  # rank of the lane's first new page
    mine = (start[None, :] <= token[:, None]) & (token[:, None] < (start + new)[None, :])
    valid, of = jnp.any(mine, axis=1), jnp.argmax(mine, axis=1)
    position = prefix[of] + token - start[of]
    nth = position // ps - started[of]  # negative: still the page that the prefix ends in
    page = take(books, first[of] + nth, valid & (nth >= 0))
    slot = jnp.where(nth >= 0, page * ps + position % ps, last[of] + 1 + token - start[of])
    loc = jnp.where(valid, slot, 0)

    lens = books.lens
    for column, length in ((COMMITTED, seq), (ALLOCATED, seq), (OWNED_FROM, own)):
        lens = write(lens, (rows, jnp.full_like(rows, column)), length, ok & (rows > 0) & (wants | grows))
    out = books._replace(
        req_to_token=write(table, (rows[of], position), loc, valid),
        lens=lens,
        generation=generation,
        row_counters=books.row_counters.at[FREE_ROWS].add(-taken),
        counters=took(books, jnp.sum(needed, dtype=jnp.int32)),
    )
    return (*(getattr(out, name) for name in EXTENDED), rows, loc, ok)
