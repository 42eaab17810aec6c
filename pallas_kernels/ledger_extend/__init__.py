"""ledger_extend: rows and slots for one chunk of prefill, and everything that is written down about them."""

from __future__ import annotations

import jax

from pallas_kernels import arguments, registry
from pallas_kernels.books import Books, check

# What it updates, in place.
EXTENDED = ("req_to_token", "lens", "generation", "row_counters", "pages", "page_pos", "counters")


def ledger_extend(
    books: Books,
    rows: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    page_size: int,
    capacity: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Books, jax.Array, jax.Array, jax.Array]:
    """Rows and slots for one chunk of prefill, all or nothing. `kvjax.alloc_for_extend` defines the meaning (SGLang:
    alloc_for_extend), for a ledger without window side, recurrent slots and staged pages, and for rows that begin
    empty.

    books: the ledger's arrays, see `pallas_kernels.books`.
    rows: i32[b]; -1 takes a new row, a positive row goes on, 0 is a lane not in use.
    prefix_lens, seq_lens: i32[b], tokens before and after the chunk. Pages that a row holds beyond its prefix go back
        first. Lengths are data: one compilation serves them all.
    capacity: new tokens of a call, at most; the length of loc. page_size: tokens.
    implementation, interpret: see `registry.call`.

    Returns (books, rows i32[b] with the new ones filled in, loc i32[capacity]: new slots back to back in lane order,
    ok bool[]). Where ok is False rows and loc are 0. ValueError for wrong shapes, dtypes or implementation names.
    """
    check(books, page_size)
    arguments.check_size("capacity", capacity)
    arguments.check_lanes({}, rows=rows, prefix_lens=prefix_lens, seq_lens=seq_lens)
    arrays, static = (*books, rows, prefix_lens, seq_lens), {"page_size": page_size, "capacity": capacity}
    *updated, rows, loc, ok = registry.call("ledger_extend", implementation, interpret, *arrays, **static)
    return books._replace(**dict(zip(EXTENDED, updated, strict=True))), rows, loc, ok
