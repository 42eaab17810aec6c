"""What a scheduler asks of the ledger between two programs: rows that begin with cached pages, change hands, go back.

Plain functions of the ledger, to be compiled (and donated to) by each backend in the shapes that it wants.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.extend import alloc_for_extend
from kvjax.indexing import put2
from kvjax.layout import NEW_ROW, ceil_div
from kvjax.ledger import OWNED_FROM, Ledger
from kvjax.operation import int32
from kvjax.steps import release_rows


def open_row(ledger: Ledger, slots: jax.Array, n: jax.Array) -> tuple[Ledger, jax.Array, jax.Array]:
    """A new row whose first n tokens (i32[], whole pages) lie in slots (i32[t]); they stay somebody else's.

    Returns (ledger, row i32[], ok bool[]); without a free row nothing changes, and the row is 0.
    """
    ledger, rows, _, ok = alloc_for_extend(
        ledger, jnp.full(1, NEW_ROW, jnp.int32), n[None], n[None], capacity=1, prefix_loc=slots[None]
    )
    return ledger, rows[0], ok


def share_row(
    ledger: Ledger, row: jax.Array, end: jax.Array, start: jax.Array, slots: jax.Array, n: jax.Array
) -> Ledger:
    """The row owns its tokens from `end` on; tokens start .. start + n - 1 lie in slots (i32[t]) from now on.

    Row, end, start and n are i32[]; the caller has released, or handed to a tree, what lay there before.
    """
    at = jnp.arange(slots.shape[0], dtype=jnp.int32)
    table = ledger.table
    entries = put2(table.req_to_token, jnp.full(at.shape, row), start + at, slots, valid=at < n)
    lens = ledger.lens.at[row, OWNED_FROM].set(end)
    return dataclasses.replace(ledger, table=dataclasses.replace(table, req_to_token=entries), lens=lens)


def close_row(ledger: Ledger, row: jax.Array, end: jax.Array) -> Ledger:
    """Give back the row (i32[]) with its pages from token `end` (i32[]) on; those before are the tree's."""
    lens = ledger.lens.at[row, OWNED_FROM].set(end)
    return release_rows(dataclasses.replace(ledger, lens=lens), row[None])


def release_pages(ledger: Ledger, pages: jax.Array) -> Ledger:
    """Give back pages (i32[m], 0 = padding) that no row owns, in this order."""
    return dataclasses.replace(ledger, allocator=ledger.allocator.free_page_ids(int32("pages", pages, 1)))


def row_pages(ledger: Ledger, row: jax.Array) -> jax.Array:
    """i32[pages per row]: the page of each page-long stretch of the row (i32[]); behind its end anything."""
    ps = ledger.page_size
    return lax.dynamic_index_in_dim(ledger.table.req_to_token, row, keepdims=False)[::ps] // ps


def slots_of(pages: np.ndarray, n: int, page_size: int) -> np.ndarray:
    """i32[n]: the slots of the first n tokens in these pages, on the host."""
    offsets = np.arange(page_size, dtype=np.int32)
    return (pages[: ceil_div(n, page_size), None] * page_size + offsets).reshape(-1)[:n]
