"""The small programs between extend and decode: rows that begin with cached pages, change hands and go back.

They are `kvjax.serving.rows`, compiled once in one shape each. An engine without a prefix cache needs two of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.indexing import put
from kvjax.layout import ceil_div, page_of, round_down
from kvjax.ledger import Ledger
from kvjax.serving import rows
from models.programs import Program, abstract

RELEASE_WIDTH = 1024  # pages that one release takes back at most; more go in several

# Owners of a page that are no row, in `build_page_rows`.
FREE_PAGE, TREE_PAGE = 0, -1


def build_open(ledger: Ledger, width: int) -> Program:
    """open(ledger, slots i32[width], n i32[]) -> (ledger, i32[2]: the new row, ok)."""

    def open_row(ledger, slots, n):
        ledger, row, ok = rows.open_row(ledger, slots, n)
        return ledger, jnp.stack([row, ok.astype(jnp.int32)])

    return Program("open_row", open_row, (0,), (abstract(ledger), _ids(width), _ids()))


def build_close(ledger: Ledger) -> Program:
    """close(ledger, row i32[], end i32[]) -> ledger: the row goes back, with its pages from token `end` on."""
    return Program("close_row", rows.close_row, (0,), (abstract(ledger), _ids(), _ids()))


def build_share(ledger: Ledger, width: int) -> Program:
    """share(ledger, row, end, start, slots i32[width], n) -> ledger, as `kvjax.serving.rows.share_row`."""
    return Program("share_row", rows.share_row, (0,), (abstract(ledger), _ids(), _ids(), _ids(), _ids(width), _ids()))


def build_release(ledger: Ledger) -> Program:
    """release(ledger, pages i32[min(1024, pages of the pool)]) -> ledger: pages that the tree lets go; 0 = padding."""
    width = min(RELEASE_WIDTH, ledger.allocator.num_pages)
    return Program("release_pages", rows.release_pages, (0,), (abstract(ledger), _ids(width)))


def build_row_pages(ledger: Ledger) -> Program:
    """row_pages(ledger, row i32[]) -> i32[pages per row]. Reads only."""
    return Program("row_pages", rows.row_pages, (), (abstract(ledger), _ids()))


def build_page_rows(ledger: Ledger) -> Program:
    """page_rows(ledger) -> i32[pages + 1]: the row that owns each page; 0: it is free, -1: neither, so a tree has it.

    Reads only; O(table + pool).
    """

    def page_rows(ledger):
        ps, table, pages = ledger.page_size, ledger.table, ledger.allocator.num_pages
        first = jnp.arange(ceil_div(table.max_context_len, ps), dtype=jnp.int32) * ps
        owned = (first < ledger.allocated[:, None]) & (first >= round_down(ledger.owned_from, ps)[:, None])
        row = jnp.broadcast_to(jnp.arange(table.size + 1, dtype=jnp.int32)[:, None], owned.shape)
        page = page_of(table.req_to_token[:, ::ps], ps)
        listed, _ = ledger.allocator.owns_free_marks()
        nobody = jnp.where((listed == 0) & (jnp.arange(pages + 1) > 0), TREE_PAGE, FREE_PAGE).astype(jnp.int32)
        return put(nobody, page.reshape(-1), row.reshape(-1), valid=owned.reshape(-1), lower=1)

    return Program("page_rows", page_rows, (), (abstract(ledger),))


def _ids(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
