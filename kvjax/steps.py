"""The other operations of a ledger: a decode step's slots, finished rows given back, tokens taken back.

`alloc_for_decode` does what SGLang's function of that name does on the host (slots, table), inside the program.
`release_rows` gives back everything a finished row owns, its slots of recurrent state included.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.freelist import all_distinct, is_first
from kvjax.indexing import put, put2, take, take2
from kvjax.kernels import books_of, serves, with_books
from kvjax.layout import NO_LOC, round_down
from kvjax.ledger import ALLOCATED, COMMITTED, OWNED_FROM, WINDOW_FROM, Ledger, as_ledger, row_pages
from kvjax.operation import int32, mask, once_if, operation, same_length
from kvjax.window import give_back, needed_from
from pallas_kernels.ledger_decode import ledger_decode
from pallas_kernels.release import release


@operation("implementation")
def alloc_for_decode(
    ledger: Ledger, rows: jax.Array, active: jax.Array | None = None, *, implementation: str | None = None
) -> tuple[Ledger, jax.Array, jax.Array, jax.Array]:
    """A slot for the next token of every active row, all or nothing (SGLang: alloc_for_decode).

    rows: i32[b], 0 = lane not in use; active: bool[b] (None: every row > 0). The next token's position is the row's
    committed length; a slot that the row already has there (allocated > committed) is used again. Refused: a row that
    is not live or appears twice, a full row, a page which the row does not own. With a window, each active row first
    gives back at most one page that is out of it; when the call then fails for memory, that release stays.
    implementation: see `kvjax.alloc_for_extend`.
    Returns (ledger, loc i32[b], positions i32[b], ok bool[]); 0 on lanes that are not active and on failure.
    """
    ps, table, rows = as_ledger("alloc_for_decode", ledger).page_size, ledger.table, int32("rows", rows, 1)
    if active is not None:
        active = mask("active", active, rows.shape)
    if serves("ledger_decode", implementation, ledger, rows, rows, page_size=ps):
        books, loc, position, ok = ledger_decode(
            books_of(ledger), rows, active, page_size=ps, implementation=implementation
        )
        return with_books(ledger, books), loc, position, ok
    if rows.shape[0] == 0:
        return ledger, rows, rows, jnp.ones((), jnp.bool_)
    live = rows != 0
    if active is not None:
        live &= active
    now = take(ledger.lens, rows)
    position = jnp.where(live, now[:, COMMITTED], 0)
    has = live & (position < now[:, ALLOCATED])
    legal = jnp.all(
        ~live
        | table.is_live(rows)
        & (position < table.max_context_len)
        & (now[:, OWNED_FROM] <= round_down(position, ps))  # the token's page is the row's own
    ) & all_distinct(rows, live)
    if ledger.slides:
        ledger = give_back(ledger, rows, position, live & legal, pages=1)
        table, now = ledger.table, take(ledger.lens, rows)
    last = jnp.where(live & (position > 0), take2(table.req_to_token, rows, position - 1), NO_LOC)
    opened = live & ~has & legal
    allocator, loc, ok = ledger.allocator.alloc_decode(
        jnp.where(opened, position + 1, 0), last, opened, implementation=implementation
    )
    ok &= legal
    done = live & ok
    loc = jnp.where(has & ok, take2(table.req_to_token, rows, position), loc)
    entries = put2(table.req_to_token, rows, position, loc, valid=done)
    after = [position + 1, jnp.maximum(position + 1, now[:, ALLOCATED]), now[:, OWNED_FROM]]
    if ledger.slides:
        after.append(jnp.maximum(now[:, WINDOW_FROM], allocator.overwritten(position + 1)))
    lens = put(ledger.lens, rows, jnp.stack(after, axis=1), valid=done, lower=1)
    out = Ledger(table.with_entries(entries), allocator, lens, ledger.window)
    return out, jnp.where(done, loc, 0), jnp.where(done, position, 0), ok


@operation("implementation")
def release_rows(ledger: Ledger, rows: jax.Array, *, implementation: str | None = None) -> Ledger:
    """Give back rows (i32[m], 0 = padding) and the pages that they own, [owned_from, allocated), in lane order.

    The pages go back as one group, as SGLang's do when requests of a batch finish together. A row that is not live
    changes nothing and counts in the table's faults. implementation: see `kvjax.alloc_for_extend`.
    """
    ps, table, rows = as_ledger("release_rows", ledger).page_size, ledger.table, int32("rows", rows, 1)
    if serves("release", implementation, ledger, rows, page_size=ps):
        return with_books(ledger, release(books_of(ledger), rows, page_size=ps, implementation=implementation))
    used = table.is_live(rows) & is_first(rows)
    now = take(ledger.lens, rows)
    owned = used & (now[:, ALLOCATED] > now[:, OWNED_FROM])

    # Only when something is released: [m, pages per row] lanes are many for a decode step that finishes nobody.
    allocator = once_if(
        jnp.any(owned),
        lambda a: a.free_page_ids(row_pages(table, rows, now[:, OWNED_FROM], now[:, ALLOCATED], owned, ps)),
        ledger.allocator,
    )
    # A constant 0 would do, but XLA's CPU backend then copies the table: nothing says that `now` was read before.
    lens = put(ledger.lens, rows, jnp.minimum(now, 0), valid=used, lower=1)
    return Ledger(table.free_rows(rows), allocator, lens, ledger.window)


@operation()
def set_committed(ledger: Ledger, rows: jax.Array, committed_lens: jax.Array) -> tuple[Ledger, jax.Array]:
    """Say how many tokens of each row count, at most what it was given: how a step takes tokens back.

    rows, committed_lens: i32[b]; row 0 is padding. The slots behind stay with the row and are used again by the next
    decode, or go back with the row. Returns (ledger, ok); refused as a whole when a row is not live, appears twice,
    its length is outside [0, allocated], or the window before it is gone (then resume with alloc_for_extend, from 0).
    """
    as_ledger("set_committed", ledger)
    rows, wanted = int32("rows", rows, 1), int32("committed_lens", committed_lens, 1)
    same_length(rows=rows, committed_lens=wanted)
    now, used = take(ledger.lens, rows), rows != 0
    legal = ~used | (ledger.table.is_live(rows) & (wanted >= 0) & (wanted <= now[:, ALLOCATED]))
    if ledger.slides:
        first = needed_from(wanted, ledger.window)
        legal &= ~used | ledger.allocator.window_there(first, now[:, WINDOW_FROM], now[:, ALLOCATED])
    ok = jnp.all(legal) & all_distinct(rows, used)
    lens = put(ledger.lens, rows, now.at[:, COMMITTED].set(wanted), valid=ok, lower=1)
    return dataclasses.replace(ledger, lens=lens), ok
