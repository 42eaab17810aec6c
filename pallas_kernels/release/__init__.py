"""release: finished rows and the pages that they own go back to the free lists."""

from __future__ import annotations

import jax

from pallas_kernels import arguments, registry
from pallas_kernels.books import Books, check


def release(
    books: Books, rows: jax.Array, *, page_size: int, implementation: str | None = None, interpret: bool = False
) -> Books:
    """Give back rows and their pages [owned_from, allocated), in lane order. `kvjax.release_rows` defines the meaning,
    in plain jax.numpy, for a ledger without window side, recurrent slots and staged pages.

    books: the ledger's arrays, see `pallas_kernels.books`.
    rows: i32[b], 0 = padding. A row that is not live, or comes twice, changes nothing and counts as a fault; so does
        a page that is free already, stands twice, or is none.
    page_size: tokens. implementation, interpret: see `registry.call`; the "xla" one is `kvjax.release_rows`.

    Returns the books, updated in place but for `req_to_token` and `generation`, which stay. Costs O(b) where nothing
    is released, else O(b + pages released), with b * b comparisons of rows; each different page that is refused costs
    one more look at all of them. ValueError for wrong shapes, dtypes or implementation names.
    """
    check(books, page_size)
    arguments.check_lanes({}, rows=rows)
    arrays = registry.call("release", implementation, interpret, *books, rows, page_size=page_size)
    return books._replace(**dict(zip(RELEASED, arrays, strict=True)))


RELEASED = ("lens", "free_rows", "row_pos", "row_counters", "pages", "page_pos", "counters")  # what it updates
