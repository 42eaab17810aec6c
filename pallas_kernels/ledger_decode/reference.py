"""ledger_decode in plain jax.numpy: the meaning of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.books import ALLOCATED, COMMITTED, Books
from pallas_kernels.reference_books import (
    distinct,
    lengths,
    live_rows,
    ranks,
    read,
    take,
    taken_pages,
    took,
    write,
)


def ledger_decode(*arrays: jax.Array, page_size: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_decode`. Returns the arrays of DECODED, then (loc, positions, ok)."""
    *state, rows, active = arrays
    books = Books(*state)
    table = books.req_to_token
    live = (active != 0) & (rows != 0)
    committed, allocated, owned_from = lengths(books, rows)
    position = jnp.where(live, committed, 0)
    offset = position % page_size
    has = live & (position < allocated)  # a slot that the row was given before
    wants = live & ~has
    opens = wants & (offset == 0)

    legal = live_rows(books, rows) & (position < table.shape[1]) & (owned_from <= position - offset)
    last = read(table, (rows, position - 1), live)
    goes_on = taken_pages(books, last // page_size) & (last % page_size == offset - 1)
    legal &= ~(wants & ~opens) | goes_on
    rank, total = ranks(opens)
    ok = jnp.all(~live | legal) & distinct(rows, live) & (total <= books.counters[books.free])

    done = live & ok
    fresh = take(books, rank, opens & ok) * page_size
    slot = jnp.where(has, read(table, (rows, position), has), jnp.where(opens, fresh, last + 1))
    lens = write(books.lens, (rows, jnp.full_like(rows, COMMITTED)), position + 1, done)
    lens = write(lens, (rows, jnp.full_like(rows, ALLOCATED)), jnp.maximum(position + 1, allocated), done)
    return (
        write(table, (rows, position), slot, done),
        lens,
        took(books, jnp.where(ok, total, 0)),
        jnp.where(done, slot, 0),
        jnp.where(done, position, 0),
        ok,
    )
