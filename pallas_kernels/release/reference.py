"""release in plain jax.numpy: the meaning of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.books import Books
from pallas_kernels.reference_books import (
    give_back,
    lengths,
    live_rows,
    number_distinct,
    pages_of,
    ranks,
    write,
)
from pallas_kernels.release import RELEASED


def release(*arrays: jax.Array, page_size: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.release`. Returns the arrays that it updates, in the order of RELEASED."""
    *state, rows = arrays
    books, lane = Books(*state), jnp.arange(rows.size)
    earlier = jnp.any((rows[:, None] == rows[None, :]) & (lane[None, :] < lane[:, None]), axis=1)
    used = live_rows(books, rows) & ~earlier
    now = lengths(books, rows)
    _, allocated, owned_from = now
    out = give_back(books, pages_of(books, rows, owned_from, allocated, used, page_size))

    rank, total = ranks(used)
    at = books.row_counters[0] + rank
    refused = number_distinct(rows, (rows != 0) & ~used)
    lens = books.lens
    for column, length in enumerate(now):
        lens = write(lens, (rows, jnp.full_like(rows, column)), jnp.minimum(length, 0), used)
    out = out._replace(
        lens=lens,
        free_rows=write(books.free_rows, (at,), rows, used),
        row_pos=write(books.row_pos, (rows,), at, used),
        row_counters=books.row_counters + jnp.stack([total, refused]),
    )
    return tuple(getattr(out, name) for name in RELEASED)
