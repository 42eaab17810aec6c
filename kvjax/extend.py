"""`alloc_for_extend`: rows and slots for a chunk of prefill, as SGLang's function of that name does on the host.

What is asked becomes a `Chunk`, which is judged first; then pages beyond the kept prefixes go back, new ones are
taken, and the table and the lengths are written. A call that is refused changes nothing; only, where an allocator with
need_sort would have merged its staged pages first, as SGLang's does, the merge stays.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.freelist import all_distinct
from kvjax.indexing import in_range, put, put2, take, take2
from kvjax.kernels import books_of, serves, with_books
from kvjax.layout import NEW_ROW, NO_LOC, ceil_div, page_of, positive, round_down, round_up
from kvjax.ledger import ALLOCATED, COMMITTED, OWNED_FROM, WINDOW_FROM, Ledger, as_ledger, row_pages
from kvjax.operation import int32, once_if, operation, same_length
from kvjax.ragged import lanes_of
from kvjax.window import edge, needed_from
from pallas_kernels.ledger_extend import ledger_extend


@operation("capacity", "implementation")
def alloc_for_extend(
    ledger: Ledger,
    rows: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    capacity: int,
    prefix_loc: jax.Array | None = None,
    owned_from: jax.Array | None = None,
    num_lanes: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[Ledger, jax.Array, jax.Array, jax.Array]:
    """Rows and slots for one chunk of prefill, all or nothing (SGLang: alloc_for_extend).

    rows: i32[b]; -1 takes a new row, a positive row is one that the request holds (a later chunk), 0 is a lane not in
        use, which must have seq == prefix. A held row with seq == prefix stays as it is.
    prefix_lens, seq_lens: i32[b], tokens before and after the chunk. A held row keeps its first `prefix` tokens: pages
        beyond the one that the prefix ends in go back before anything is taken, so nothing is lost when a row is
        resumed below what it was given.
    prefix_loc: i32[b, t], slots of the first `prefix` tokens of a new row (a prefix found elsewhere); None: new rows
        start empty.
    owned_from: i32[b], page-aligned, for new rows: pages before it stay somebody else's. None: every prefix page does.
    implementation: "xla", a kernel's name, or None for the best of the platform (`pallas_kernels.registry`); ValueError
        where a kernel is named that cannot serve this ledger (kvjax.kernels says which ones it can).
    Refused (ok == False, nothing changed): a row that is not live or appears twice, seq past the row's width, a prefix
        longer than the row's committed tokens, a prefix that ends inside a page which the row does not own, a prefix
        in prefix_loc whose slots do not lie in their pages in order, one whose window the window layers do not hold any
        more, and whatever the allocator refuses.
        Taken on trust: that the whole pages of such a prefix are handed out, and those from owned_from on are nobody
        else's. So pass only slots that a live row or a prefix tree holds: a free page that is named here may be handed
        out by the same call. `check_invariants` sees it while the page is free, or when one row holds it twice.

    Returns (ledger, rows i32[b] with the new rows filled in, loc i32[capacity]: new slots back to back in lane order,
    ok bool[]). On failure rows and loc are 0.
    """
    ps, width = as_ledger("alloc_for_extend", ledger).page_size, positive("capacity", capacity)
    rows, prefix, seq = int32("rows", rows, 1), int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
    batch = same_length(rows=rows, prefix_lens=prefix, seq_lens=seq)
    if prefix_loc is not None and jnp.shape(prefix_loc)[-1:] == (0,):
        prefix_loc = None  # nothing was found
    found_elsewhere = None if prefix_loc is None and owned_from is None else "prefix_loc and owned_from"
    sizes = {"page_size": ps, "capacity": width}
    if serves("ledger_extend", implementation, ledger, rows, prefix, seq, reason=found_elsewhere, **sizes):
        books, rows, loc, ok = ledger_extend(
            books_of(ledger), rows, prefix, seq, page_size=ps, capacity=width, implementation=implementation
        )
        return with_books(ledger, books), rows, loc, ok
    if batch == 0:
        return ledger, rows, jnp.zeros(width, jnp.int32), jnp.ones((), jnp.bool_)

    chunk = _asked(ledger, rows, prefix, seq, prefix_loc, owned_from)
    surplus = _surplus(chunk, ps)
    legal = _is_legal(ledger, chunk) & _begins_with_kept_pages(ledger, chunk, surplus)
    # b lanes of at most max_context_len tokens can pass int32 only in tables that no device holds.
    fits = legal & _has_room(ledger, chunk, surplus) & (jnp.sum(seq - prefix, dtype=jnp.int32) <= width)
    # Pages that held rows have beyond their prefix go back first, but only if the whole call will then succeed.
    allocator = once_if(
        fits & jnp.any(surplus.pages > 0), lambda a: a.free_page_ids(surplus.ids(ledger, rows)), ledger.allocator
    )
    new, seq = jnp.where(legal, seq - prefix, 0), jnp.where(legal, seq, prefix - 1)
    allocator, loc, ok = allocator.alloc_extend(  # refuses seq < prefix before it merges anything
        prefix, seq, chunk.last, capacity=width, num_lanes=num_lanes, implementation=implementation
    )
    table, new_rows, _ = ledger.table.alloc_rows(chunk.wants & ok)
    rows = jnp.where(ok, jnp.where(chunk.wants, new_rows, rows), 0)

    entries = table.req_to_token
    if chunk.found is not None:
        row = jnp.broadcast_to(rows[:, None], chunk.found.loc.shape)
        entries = put2(entries, row, chunk.found.column, chunk.found.loc, valid=chunk.found.named & ok)
    lane, offset, valid = lanes_of(new, width)
    entries = put2(entries, rows[lane], prefix[lane] + offset, loc, valid=valid & ok)
    after = [seq, seq, chunk.own]
    if ledger.slides:
        begin = allocator.window_start(prefix, edge(prefix, ledger.window, ps))
        begin = jnp.where(chunk.wants, begin, jnp.minimum(chunk.now[:, WINDOW_FROM], round_up(prefix, ps)))
        after.append(jnp.maximum(begin, allocator.overwritten(seq)))
    lens = put(ledger.lens, rows, jnp.stack(after, axis=1), valid=ok & (chunk.wants | chunk.grows), lower=1)
    return Ledger(table.with_entries(entries), allocator, lens, ledger.window), rows, loc, ok


class Found(NamedTuple):
    """Prefixes of new rows that were found elsewhere."""

    loc: jax.Array  # i32[b, t], prefix_loc
    column: jax.Array  # i32[b, t], the token that each entry belongs to
    named: jax.Array  # bool[b, t], entries that become a row's


class Chunk(NamedTuple):
    """What a call asks for, lane by lane, and what the ledger holds there."""

    rows: jax.Array
    prefix: jax.Array
    seq: jax.Array
    wants: jax.Array  # bool[b]: a new row
    held: jax.Array  # bool[b]: a row that goes on
    grows: jax.Array  # bool[b]; a held lane that does not grow is not in use: its row stays as it is
    now: jax.Array  # i32[b, columns of lens], of held rows; row 0 otherwise
    holds: jax.Array  # i32[b], tokens that the prefix may name
    own: jax.Array  # i32[b], owned_from afterwards
    last: jax.Array  # i32[b], slot of the prefix's last token, -1 without one
    found: Found | None


def _asked(
    ledger: Ledger,
    rows: jax.Array,
    prefix: jax.Array,
    seq: jax.Array,
    prefix_loc: jax.Array | None,
    owned_from: jax.Array | None,
) -> Chunk:
    ps = ledger.page_size
    wants, held = rows == NEW_ROW, rows > 0
    now = take(ledger.lens, rows)
    own = jnp.where(wants, round_up(prefix, ps), jnp.minimum(now[:, OWNED_FROM], round_up(prefix, ps)))
    holds = jnp.where(held, now[:, COMMITTED], 0)
    last = jnp.where(held & (prefix > 0), take2(ledger.table.req_to_token, rows, prefix - 1), NO_LOC)
    if owned_from is not None:
        asked = int32("owned_from", owned_from, 1)
        same_length(rows=rows, owned_from=asked)
        own = jnp.where(wants, asked, own)
    found = None
    if prefix_loc is not None:
        loc = int32("prefix_loc", prefix_loc, 2)
        same_length(rows=rows, prefix_loc=loc)
        holds = jnp.where(wants, loc.shape[1], holds)
        lane = jnp.arange(rows.shape[0], dtype=jnp.int32)
        last = jnp.where(wants & (prefix > 0), take2(loc, lane, prefix - 1), last)
        column = jnp.broadcast_to(jnp.arange(loc.shape[1], dtype=jnp.int32), loc.shape)
        found = Found(loc, column, wants[:, None] & (column < prefix[:, None]))
    return Chunk(rows, prefix, seq, wants, held, seq > prefix, now, holds, own, last, found)


def _is_legal(ledger: Ledger, chunk: Chunk) -> jax.Array:
    """bool[]: the lanes make sense, one by one and together; memory is not asked about."""
    ps, table, allocator = ledger.page_size, ledger.table, ledger.allocator
    rows, prefix, seq = chunk.rows, chunk.prefix, chunk.seq
    wants, grows, own = chunk.wants, chunk.grows, chunk.own
    goes_on = ~grows | (prefix % ps == 0) | (own <= round_down(prefix, ps))  # in a page that is the row's own
    legal = jnp.all(
        jnp.where(rows == 0, seq == prefix, (wants | table.is_live(rows)) & (prefix <= chunk.holds))
        & (prefix >= 0)
        & (seq >= prefix)
        & (seq <= table.max_context_len)
        & (~wants | ((own % ps == 0) & (own >= 0) & (own <= round_up(prefix, ps))))
        & goes_on
        & allocator.continues(prefix, chunk.last, grows)
    )
    if chunk.found is not None:
        seen = chunk.found.named
        if ledger.slides and allocator.forgets_window:  # what left the window has no slots any more
            seen &= chunk.found.column >= needed_from(prefix, ledger.window)[:, None]
        legal &= jnp.all(_lies_in_order(chunk.found, allocator.num_pages, ps) | ~seen)
    legal &= all_distinct(rows, chunk.held) & (jnp.sum(wants, dtype=jnp.int32) <= table.available_size())
    if ledger.slides:
        first = needed_from(prefix, ledger.window)
        there = allocator.window_there(first, chunk.now[:, WINDOW_FROM], chunk.now[:, ALLOCATED])
        if chunk.found is not None:
            lane = jnp.arange(rows.shape[0], dtype=jnp.int32)
            there = jnp.where(wants, allocator.may_begin(take2(chunk.found.loc, lane, first)), there)
        legal &= jnp.all(there | ~(wants | grows) | (prefix == 0))
    return legal


class Surplus(NamedTuple):
    """What held rows have beyond the prefix that they keep: tokens keep .. given - 1 of each."""

    keep: jax.Array  # i32[b]
    given: jax.Array  # i32[b]
    pages: jax.Array  # i32[b], 0 where nothing goes back

    def ids(self, ledger: Ledger, rows: jax.Array) -> jax.Array:
        """i32[b * pages per row]: the pages, row after row; 0 elsewhere."""
        return row_pages(ledger.table, rows, self.keep, self.given, self.pages > 0, ledger.page_size)


def _surplus(chunk: Chunk, page_size: int) -> Surplus:
    keep = jnp.maximum(round_up(chunk.prefix, page_size), chunk.now[:, OWNED_FROM])
    given = chunk.now[:, ALLOCATED]
    pages = jnp.maximum(ceil_div(given, page_size) - ceil_div(keep, page_size), 0)
    return Surplus(keep, given, jnp.where(chunk.held & chunk.grows, pages, 0))


def _begins_with_kept_pages(ledger: Ledger, chunk: Chunk, surplus: Surplus) -> jax.Array:
    """bool[]: no new row begins with a page that this very call gives back."""
    if chunk.found is None:
        return jnp.ones((), jnp.bool_)
    begun = jnp.where(chunk.found.named, page_of(chunk.found.loc, ledger.page_size), NO_LOC)[:, :: ledger.page_size]
    return once_if(
        jnp.any(surplus.pages > 0),
        lambda ok: ok & ~_shares_a_page(begun, surplus.ids(ledger, chunk.rows)),
        jnp.ones((), jnp.bool_),
    )


def _has_room(ledger: Ledger, chunk: Chunk, surplus: Surplus) -> jax.Array:
    """bool[]: there are pages enough once the surplus is back."""
    ps, back = ledger.page_size, jnp.sum(surplus.pages, dtype=jnp.int32)
    needed = jnp.where(chunk.grows, ceil_div(chunk.seq, ps) - ceil_div(chunk.prefix, ps), 0)
    if ledger.slides:  # below window_from the window side has nothing to give back
        held_from = jnp.maximum(surplus.keep, chunk.now[:, WINDOW_FROM])
        of_window = jnp.maximum(ceil_div(surplus.given, ps) - ceil_div(held_from, ps), 0)
        of_window = jnp.where(chunk.held & chunk.grows, of_window, 0)
        room = ledger.allocator.room(back, jnp.sum(of_window, dtype=jnp.int32))
    else:
        room = ledger.allocator.available_size() // ps + back
    return jnp.sum(needed, dtype=jnp.int32) <= room


def _lies_in_order(found: Found, num_pages: int, page_size: int) -> jax.Array:
    """bool[b, t]: the slot is one of the pool's, and lies in its page where the token of its column does."""
    page = page_of(found.loc, page_size)
    real = in_range(page, num_pages + 1, 1) & (found.loc % page_size == found.column % page_size)
    first = found.column // page_size * page_size
    begin = jnp.take_along_axis(found.loc, first, axis=1)  # of prefix_loc: nothing new is laid down
    return real & (page == page_of(begin, page_size))


def _shares_a_page(some: jax.Array, others: jax.Array) -> jax.Array:
    """bool[]: a page id > 0 of some i32[b, n] is among others i32[b * m]. Lane by lane: all pairs would be many."""
    wanted, lanes = jnp.where(some > 0, some, NO_LOC).reshape(-1, 1), others.reshape(some.shape[0], -1)
    return lax.fori_loop(0, lanes.shape[0], lambda i, hit: hit | jnp.any(wanted == lanes[i]), jnp.zeros((), jnp.bool_))
