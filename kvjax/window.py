"""Sliding windows in the ledger: where window layers keep a row's tokens, and what they give back.

With n tokens written, no window reaches below n - window + 1, so every page below `edge(n)` goes back: in a decode step
before anything is allocated (`alloc_for_decode` does it), in an extend after the chunk was read (`release_window`).
The allocator decides what that means: SWATokenToKVPoolAllocator frees the partners, PureSWATokenToKVPoolAllocator
frees the slots and the request table forgets them, a ring is simply overwritten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.indexing import put, put2, take, take2
from kvjax.layout import INT32_MIN, page_of, positive, round_down
from kvjax.operation import int32, once_if, operation
from kvjax.rows import HybridReqToTokenPool, ReqToTokenPool

ALLOCATED, OWNED_FROM, WINDOW_FROM = 1, 2, 3  # columns of Ledger.lens


def edge(written: jax.Array, window: int | None, page_size: int) -> jax.Array:
    """i32, shape of written: the tokens below it, whole pages, are out of every window; 0 without a window."""
    if window is None:
        return jnp.zeros_like(written)
    return round_down(jnp.maximum(written - window, 0), page_size)


def needed_from(length: jax.Array, window: int | None) -> jax.Array:
    """i32, shape of length: the first token that the window of token `length` (the next one) reaches."""
    return jnp.zeros_like(length) if window is None else jnp.maximum(length - window + 1, 0)


def give_back(ledger: Any, rows: jax.Array, written: jax.Array, used: jax.Array, pages: int) -> Any:
    """The ledger without up to `pages` pages per used row that lie below edge(written); oldest first.

    rows, written: i32[b]; used: bool[b], no row twice among them. Pages before owned_from are somebody else's.
    """
    table, allocator, ps = ledger.table, ledger.allocator, ledger.page_size
    if ledger.window is None or not allocator.releases_window:
        return ledger
    now = take(ledger.lens, rows)
    out = edge(written, ledger.window, ps)
    start = jnp.maximum(now[:, WINDOW_FROM], jnp.minimum(now[:, OWNED_FROM], out))
    stop = jnp.minimum(out, start + pages * ps)
    used &= stop > now[:, WINDOW_FROM]

    column = start[:, None] + jnp.arange(pages * ps, dtype=jnp.int32)
    row = jnp.broadcast_to(rows[:, None], column.shape)
    gone = used[:, None] & (column < stop[:, None])
    slot = take2(table.req_to_token, row, column)
    page = jnp.where(gone, page_of(slot, ps), 0)[:, ::ps].reshape(-1)
    allocator = once_if(jnp.any(page > 0), lambda a: a.free_swa_page_ids(page), allocator)
    if allocator.forgets_window:  # a minimum, for XLA's CPU backend would copy the table to write a constant
        entries = put2(table.req_to_token, row, column, jnp.minimum(slot, 0), valid=gone)
        table = table.with_entries(entries)
    lens = put(ledger.lens, rows, now.at[:, WINDOW_FROM].set(stop), valid=used, lower=1)
    return dataclasses.replace(ledger, table=table, allocator=allocator, lens=lens)


@operation("max_tokens")
def release_window(ledger: Any, rows: jax.Array, after: jax.Array | None = None, *, max_tokens: int) -> Any:
    """Give back what the rows' windows have left behind: the end of an extend, when its chunk has been read.

    rows: i32[b], 0 = padding. max_tokens: the most tokens that a row has got since its last release; at most
    max_tokens // page_size + 1 pages per row go back, what is left waits for the next call. Rows that are not live or
    appear twice are passed over. Without a window, and with a ring, nothing happens.
    after: i32 of any shape, computed from what the program reads through the mapping (the window slots themselves, the
    sampled tokens). XLA copies the mapping when nothing says that those reads come first. The values play no part;
    the smallest int32 must not be among them.
    """
    rows = int32("rows", rows, 1)
    if after is not None:
        rows = jnp.where(jnp.min(after) > INT32_MIN, rows, 0)
    lane = jnp.arange(rows.shape[0])
    again = jnp.any((rows[:, None] == rows[None, :]) & (lane[None, :] < lane[:, None]), axis=1)
    used = ledger.table.is_live(rows) & ~again
    pages = positive("max_tokens", max_tokens) // ledger.page_size + 1
    return give_back(ledger, rows, take(ledger.committed, rows), used, pages)


@operation()
def window_loc(ledger: Any, rows: jax.Array, positions: jax.Array, loc: jax.Array | None = None) -> jax.Array:
    """i32: slots of tokens in the window layers' pool, for writes (KVWriteLoc.swa_loc) and for gathered reads.

    Ask after the tokens were allocated. rows, positions: i32 of shapes that broadcast; loc: the tokens' full slots in
    the broadcast shape (None: looked up in the request table). 0 for padding and for what the window layers do not
    hold: released tokens, and in a ring those that the row's newest `ring` tokens have overwritten, so that a longer
    chunk writes its end only.
    """
    rows, positions = jnp.broadcast_arrays(jnp.asarray(rows), jnp.asarray(positions))
    rows, positions = int32("rows", rows, rows.ndim), int32("positions", positions, rows.ndim)
    loc = _full_loc(ledger.table, rows, positions) if loc is None else int32("loc", loc, rows.ndim)
    if loc.shape != rows.shape:
        raise ValueError(f"loc has shape {loc.shape}, but rows and positions broadcast to {rows.shape}.")
    now = take(ledger.lens, rows)  # a recycled row still names the slots of the one before: nothing past `allocated`
    there = (rows > 0) & (positions >= now[..., WINDOW_FROM]) & (positions < now[..., ALLOCATED])
    return jnp.where(there, ledger.allocator.window_loc(rows, positions, loc), 0)


@operation("count")
def window_pages(ledger: Any, rows: jax.Array, first_page: jax.Array, *, count: int) -> jax.Array:
    """i32[b, count]: pages, in the window layers' pool, of tokens from first_page * page_size on, for page-table reads.

    rows, first_page: i32[b]. 0 for padding, for released pages and behind the row. A window of w tokens lies in at most
    w // page_size + 2 pages, the first one needed_from(position) // page_size.
    """
    rows, first = int32("rows", rows, 1), int32("first_page", first_page, 1)
    ps = ledger.page_size
    column = (first[:, None] + jnp.arange(positive("count", count), dtype=jnp.int32)) * ps
    row = jnp.broadcast_to(rows[:, None], column.shape)
    there = (row > 0) & (column < take(ledger.allocated, rows)[:, None])
    loc = ledger.allocator.window_loc(row, column, _full_loc(ledger.table, row, column))
    return jnp.where(there, page_of(loc, ps), 0)


def _full_loc(table: ReqToTokenPool | HybridReqToTokenPool, rows: jax.Array, positions: jax.Array) -> jax.Array:
    inside = (rows > 0) & (positions >= 0) & (positions < table.max_context_len)
    return jnp.where(inside, take2(table.req_to_token, rows, positions), 0)
