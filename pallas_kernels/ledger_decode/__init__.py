"""ledger_decode: a decode step's whole bookkeeping, from the rows to the slots of their next tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, registry
from pallas_kernels.books import Books, check


def ledger_decode(
    books: Books,
    rows: jax.Array,
    active: jax.Array | None,
    *,
    page_size: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Books, jax.Array, jax.Array, jax.Array]:
    """A slot for the next token of every active row, all or nothing. `kvjax.alloc_for_decode` defines the meaning,
    in plain jax.numpy (SGLang: alloc_for_decode), for a ledger without window side, recurrent slots and staged pages.

    books: the ledger's arrays, see `pallas_kernels.books`.
    rows: i32[b], 0 = lane not in use. active: bool[b]; the other lanes take nothing. None: every lane in use is active.
    page_size: tokens. implementation, interpret: see `registry.call`; the "xla" one is `kvjax.alloc_for_decode`.

    Returns (books, loc i32[b], positions i32[b], ok bool[]): the page table, `lens` and `counters` are updated in
    place; loc and positions are 0 on lanes that are not active, and everywhere with the books as they were where ok is
    False. Costs O(b), with b * b comparisons of rows. ValueError for wrong shapes, dtypes or implementation names.
    """
    check(books, page_size)
    if active is None:
        active = rows  # a lane in use is not 0; a constant mask would be a kernel of its own
        arguments.check_lanes({}, rows=rows)
    else:
        arguments.check_lanes({"active": jnp.bool_}, rows=rows, active=active)
    arrays = registry.call("ledger_decode", implementation, interpret, *books, rows, active, page_size=page_size)
    *updated, loc, positions, ok = arrays
    return books._replace(**dict(zip(DECODED, updated, strict=True))), loc, positions, ok


DECODED = ("req_to_token", "lens", "counters")  # what it updates
