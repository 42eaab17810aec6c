"""The ledger: a request table and an allocator as one pytree, and the operations that span both.

`alloc_for_extend` and `alloc_for_decode` do what SGLang's functions of these names do on the host (rows, slots, table),
inside the program; `release_rows` gives back everything a finished row owns, its slots of recurrent state included.
The table may be a hybrid one. The ledger is generic over its allocator: it uses only `page_size`, `continues`,
`alloc_extend`, `alloc_decode`, `free_page_ids`, `available_size` and `clear`. An allocator with a window side
(kvjax.allocators.swa and its neighbours) has the questions of its section "what the ledger asks" besides. These
branches are static: a ledger without a window side compiles to the program it had.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.allocators import (
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvjax.freelist import all_distinct, is_first
from kvjax.indexing import in_range, put, put2, take, take2
from kvjax.kernels import books_of, serves, with_books
from kvjax.layout import NEW_ROW, NO_LOC, ceil_div, page_of, positive, round_down, round_up
from kvjax.operation import int32, mask, once_if, operation, same_length, state, static
from kvjax.ragged import lanes_of
from kvjax.rows import HybridReqToTokenPool, ReqToTokenPool
from kvjax.window import edge, give_back, needed_from
from pallas_kernels.ledger_decode import ledger_decode
from pallas_kernels.ledger_extend import ledger_extend
from pallas_kernels.release import release

Table = ReqToTokenPool | HybridReqToTokenPool
WindowAllocator = SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator | SWARingTokenToKVPoolAllocator
Allocator = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator | WindowAllocator

COMMITTED, ALLOCATED, OWNED_FROM, WINDOW_FROM = range(4)  # columns of `lens`; the last one only with a window side


@state
class Ledger:
    """Who holds what: rows, the slots of their tokens, and how much of each row is its own."""

    table: Table
    allocator: Any  # one of `Allocator`
    # i32[size + 1, 3], tokens: committed, allocated, owned_from of each row; 0 for free rows. With a window side there
    # is a fourth column, window_from: the window layers hold the row's tokens from there on.
    lens: jax.Array
    window: int | None = static(default=None)  # tokens that a window layer sees; None: nothing is ever released early

    @classmethod
    def create(cls, table: Table, allocator: Allocator, window: int | None = None) -> Ledger:
        """A ledger without live rows over a fresh request table and a fresh allocator.

        window: tokens that a window layer sees, the newest included; None keeps everything (and is all that an
        allocator without a window side allows). ValueError for other types, and when it does not fit the allocator.
        """
        if not isinstance(table, Table) or not isinstance(allocator, Allocator):
            raise ValueError(
                f"a ledger is made of a request table and an allocator, got {type(table).__name__} and "
                f"{type(allocator).__name__}; pass Ledger.create(ReqToTokenPool, allocator)."
            )
        slides = isinstance(allocator, WindowAllocator)
        if window is not None and not slides:
            raise ValueError(
                f"a window of {window} needs an allocator with a window side, got {type(allocator).__name__}; "
                "use SWATokenToKVPoolAllocator, PureSWATokenToKVPoolAllocator or SWARingTokenToKVPoolAllocator."
            )
        if isinstance(allocator, SWARingTokenToKVPoolAllocator):
            allocator.check_rows(table.size, window)
        lens = jnp.zeros((table.size + 1, 4 if slides else 3), jnp.int32)
        return cls(table, allocator, lens, None if window is None else positive("window", window))

    @property
    def slides(self) -> bool:
        """Whether the allocator has a window side."""
        return self.lens.shape[-1] > WINDOW_FROM

    @property
    def page_size(self) -> int:
        """Tokens per page; 1 with the token allocator."""
        return self.allocator.page_size

    @property
    def committed(self) -> jax.Array:
        """i32[size + 1]: tokens of each row whose KV is in the pool, or will be when the step ends."""
        return self.lens[..., COMMITTED]

    @property
    def allocated(self) -> jax.Array:
        """i32[size + 1]: tokens of each row that have a slot; at least `committed`."""
        return self.lens[..., ALLOCATED]

    @property
    def owned_from(self) -> jax.Array:
        """i32[size + 1], page-aligned: pages before it belong to a prefix tree or to another row."""
        return self.lens[..., OWNED_FROM]

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases of rows and of pages that were refused."""
        return self.table.faults + self.allocator.faults

    def check_pool(self, pool: Any) -> None:
        """ValueError unless every slot that the allocator can hand out exists in the pool, and no other.

        A pool with fewer slots would drop writes that the ledger believes in; one with more is wasted memory.
        """
        if not hasattr(pool, "size") or not hasattr(pool, "page_size"):
            raise ValueError(f"check_pool needs a KV pool with a size and a page_size, got {type(pool).__name__}.")
        wanted = self.allocator.pool_sizes if self.slides else self.allocator.size
        holds = getattr(pool, "sizes", pool.size)
        if self.slides and isinstance(holds, tuple):  # no layers of one kind: nothing is ever written there
            wanted = tuple(want if has else 0 for want, has in zip(wanted, holds, strict=True))
        if (holds, pool.page_size) != (wanted, self.allocator.page_size):
            raise ValueError(
                f"the allocator hands out slots of {wanted} tokens in pages of "
                f"{self.allocator.page_size}, but {type(pool).__name__} holds {holds} in pages of "
                f"{pool.page_size}; create both with the same size and page_size."
            )

    @operation()
    def clear(self) -> Ledger:
        """No live rows, every page free; generations and fault counts stay."""
        return Ledger(self.table.clear(), self.allocator.clear(), jnp.zeros_like(self.lens), self.window)


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
        in prefix_loc whose slots do not lie in their pages in order, one whose window the
        window layers do not hold any more, and whatever the allocator refuses.
        Taken on trust: that the whole pages of such a prefix are handed out, and those from owned_from on are nobody
        else's. `check_invariants` sees it where they are not.

    Returns (ledger, rows i32[b] with the new rows filled in, loc i32[capacity]: new slots back to back in lane order,
    ok bool[]). On failure rows and loc are 0.
    """
    width, ps, table = positive("capacity", capacity), ledger.page_size, ledger.table
    rows, prefix, seq = int32("rows", rows, 1), int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
    b = same_length(rows=rows, prefix_lens=prefix, seq_lens=seq)
    if prefix_loc is not None and jnp.shape(prefix_loc)[-1:] == (0,):
        prefix_loc = None  # nothing was found
    found_elsewhere = None if prefix_loc is None and owned_from is None else "prefix_loc and owned_from"
    sizes = {"page_size": ps, "capacity": width}
    if serves("ledger_extend", implementation, ledger, rows, prefix, seq, reason=found_elsewhere, **sizes):
        books, rows, loc, ok = ledger_extend(
            books_of(ledger), rows, prefix, seq, page_size=ps, capacity=width, implementation=implementation
        )
        return with_books(ledger, books), rows, loc, ok
    wants, held = rows == NEW_ROW, rows > 0
    now = take(ledger.lens, rows)  # of held rows; row 0 otherwise
    own = jnp.where(wants, round_up(prefix, ps), jnp.minimum(now[:, OWNED_FROM], round_up(prefix, ps)))
    grows = seq > prefix  # a held lane that does not grow is not in use: its row stays as it is
    holds = jnp.where(held, now[:, COMMITTED], 0)  # tokens that a prefix may name
    last = jnp.where(held & (prefix > 0), take2(table.req_to_token, rows, prefix - 1), NO_LOC)
    if owned_from is not None:
        asked = int32("owned_from", owned_from, 1)
        same_length(rows=rows, owned_from=asked)
        own = jnp.where(wants, asked, own)
    if prefix_loc is not None:
        found = int32("prefix_loc", prefix_loc, 2)
        same_length(rows=rows, prefix_loc=found)
        holds = jnp.where(wants, found.shape[1], holds)
        lane = jnp.arange(b, dtype=jnp.int32)
        last = jnp.where(wants & (prefix > 0), take2(found, lane, prefix - 1), last)
        column = jnp.broadcast_to(jnp.arange(found.shape[1], dtype=jnp.int32), found.shape)
        named = wants[:, None] & (column < prefix[:, None])  # entries that become a row's

    legal = jnp.all(
        jnp.where(rows == 0, seq == prefix, (wants | table.is_live(rows)) & (prefix <= holds))
        & (prefix >= 0)
        & (seq >= prefix)
        & (seq <= table.max_context_len)
        & (~wants | ((own % ps == 0) & (own >= 0) & (own <= round_up(prefix, ps))))
        & _may_continue(prefix, own, ps, grows)
        & ledger.allocator.continues(prefix, last, grows)
    )
    if prefix_loc is not None:
        seen = named
        if ledger.slides and ledger.allocator.forgets_window:  # what left the window has no slots any more
            seen &= column >= needed_from(prefix, ledger.window)[:, None]
        legal &= jnp.all(_lies_in_order(ledger.allocator, found, column, ps) | ~seen)
    legal &= all_distinct(rows, held) & (jnp.sum(wants, dtype=jnp.int32) <= table.available_size())
    if ledger.slides:
        first = needed_from(prefix, ledger.window)
        there = ledger.allocator.window_there(first, now[:, WINDOW_FROM], now[:, ALLOCATED])
        if prefix_loc is not None:
            there = jnp.where(wants, ledger.allocator.may_begin(take2(found, lane, first)), there)
        legal &= jnp.all(there | ~(wants | grows) | (prefix == 0))

    # Pages that held rows have beyond their prefix go back first, but only if the whole call will then succeed.
    keep = jnp.maximum(round_up(prefix, ps), now[:, OWNED_FROM])
    given = now[:, ALLOCATED]
    surplus = jnp.where(held & grows, jnp.maximum(ceil_div(given, ps) - ceil_div(keep, ps), 0), 0)
    if prefix_loc is not None:  # a new row cannot begin with a page that this very call gives back
        begun = jnp.where(named, page_of(found, ps), NO_LOC)[:, ::ps]
        legal = once_if(
            legal & jnp.any(surplus > 0),
            lambda ok: ok & ~_shares_a_page(begun, _row_pages(table, rows, keep, given, surplus > 0, ps)),
            legal,
        )
    needed = jnp.where(grows, ceil_div(seq, ps) - ceil_div(prefix, ps), 0)
    if ledger.slides:  # below window_from the window side has nothing to give back
        held_from = jnp.maximum(keep, now[:, WINDOW_FROM])
        of_window = jnp.where(held & grows, jnp.maximum(ceil_div(given, ps) - ceil_div(held_from, ps), 0), 0)
        room = ledger.allocator.room(jnp.sum(surplus, dtype=jnp.int32), jnp.sum(of_window, dtype=jnp.int32))
    else:
        room = ledger.allocator.available_size() // ps + jnp.sum(surplus, dtype=jnp.int32)
    # b lanes of at most max_context_len tokens can pass int32 only in tables that no device holds.
    fits = legal & (jnp.sum(needed, dtype=jnp.int32) <= room) & (jnp.sum(seq - prefix, dtype=jnp.int32) <= width)
    allocator = once_if(
        fits & jnp.any(surplus > 0),
        lambda a: a.free_page_ids(_row_pages(table, rows, keep, given, surplus > 0, ps)),
        ledger.allocator,
    )
    new, seq = jnp.where(legal, seq - prefix, 0), jnp.where(legal, seq, prefix - 1)
    allocator, loc, ok = allocator.alloc_extend(  # refuses seq < prefix before it merges anything
        prefix, seq, last, capacity=width, num_lanes=num_lanes, implementation=implementation
    )
    table, new_rows, _ = table.alloc_rows(wants & ok)
    rows = jnp.where(ok, jnp.where(wants, new_rows, rows), 0)

    entries = table.req_to_token
    if prefix_loc is not None:
        row = jnp.broadcast_to(rows[:, None], found.shape)
        entries = put2(entries, row, column, found, valid=named & ok)
    lane, offset, valid = lanes_of(new, width)
    entries = put2(entries, rows[lane], prefix[lane] + offset, loc, valid=valid & ok)
    after = [seq, seq, own]
    if ledger.slides:
        begin = allocator.window_start(prefix, edge(prefix, ledger.window, ps))
        begin = jnp.where(wants, begin, jnp.minimum(now[:, WINDOW_FROM], round_up(prefix, ps)))
        after.append(jnp.maximum(begin, allocator.overwritten(seq)))
    lens = put(ledger.lens, rows, jnp.stack(after, axis=1), valid=ok & (wants | grows), lower=1)
    return Ledger(table.with_entries(entries), allocator, lens, ledger.window), rows, loc, ok


@operation("implementation")
def alloc_for_decode(
    ledger: Ledger, rows: jax.Array, active: jax.Array | None = None, *, implementation: str | None = None
) -> tuple[Ledger, jax.Array, jax.Array, jax.Array]:
    """A slot for the next token of every active row, all or nothing (SGLang: alloc_for_decode).

    rows: i32[b], 0 = lane not in use; active: bool[b] (None: every row > 0). The next token's position is the row's
    committed length; a slot that the row already has there (allocated > committed) is used again. Refused: a row that
    is not live or appears twice, a full row, a page which the row does not own. With a window, each active row first
    gives back at most one page that is out of it; when the call then fails for memory, that release stays.
    implementation: see `alloc_for_extend`.
    Returns (ledger, loc i32[b], positions i32[b], ok bool[]); 0 on lanes that are not active and on failure.
    """
    rows, table, ps = int32("rows", rows, 1), ledger.table, ledger.page_size
    if active is not None:
        active = mask("active", active, rows.shape)
    if serves("ledger_decode", implementation, ledger, rows, rows, page_size=ps):
        books, loc, position, ok = ledger_decode(
            books_of(ledger), rows, active, page_size=ps, implementation=implementation
        )
        return with_books(ledger, books), loc, position, ok
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
    changes nothing and counts in the table's faults. implementation: see `alloc_for_extend`.
    """
    rows, table, ps = int32("rows", rows, 1), ledger.table, ledger.page_size
    if serves("release", implementation, ledger, rows, page_size=ps):
        return with_books(ledger, release(books_of(ledger), rows, page_size=ps, implementation=implementation))
    used = table.is_live(rows) & is_first(rows)
    now = take(ledger.lens, rows)
    owned = used & (now[:, ALLOCATED] > now[:, OWNED_FROM])

    # Only when something is released: [m, pages per row] lanes are many for a decode step that finishes nobody.
    allocator = once_if(
        jnp.any(owned),
        lambda a: a.free_page_ids(_row_pages(table, rows, now[:, OWNED_FROM], now[:, ALLOCATED], owned, ps)),
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


def _may_continue(prefix: jax.Array, owned_from: jax.Array, page_size: int, grows: jax.Array) -> jax.Array:
    """bool[b]: nothing is written, or the page that the prefix ends inside (if any) is the row's own."""
    return ~grows | (prefix % page_size == 0) | (owned_from <= round_down(prefix, page_size))


def _lies_in_order(allocator: Any, loc: jax.Array, column: jax.Array, page_size: int) -> jax.Array:
    """bool, shape of loc: the slot is one of the pool's, and lies in its page where the token of its column does."""
    page = page_of(loc, page_size)
    real = in_range(page, allocator.num_pages + 1, 1) & (loc % page_size == column % page_size)
    begin = jnp.take_along_axis(loc, column // page_size * page_size, axis=1)  # of loc: nothing new is laid down
    return real & (page == page_of(begin, page_size))


def _shares_a_page(some: jax.Array, others: jax.Array) -> jax.Array:
    """bool[]: a page id > 0 of some i32[b, n] is among others i32[b * m]. Lane by lane: all pairs would be many."""
    wanted, lanes = jnp.where(some > 0, some, NO_LOC).reshape(-1, 1), others.reshape(some.shape[0], -1)
    return lax.fori_loop(0, lanes.shape[0], lambda i, hit: hit | jnp.any(wanted == lanes[i]), jnp.zeros((), jnp.bool_))


def _row_pages(
    table: Table, rows: jax.Array, start: jax.Array, end: jax.Array, used: jax.Array, page_size: int
) -> jax.Array:
    """i32[m * pages per row]: pages of tokens [start, end) of each used row, row after row; 0 elsewhere."""
    first = jnp.arange(ceil_div(table.max_context_len, page_size), dtype=jnp.int32) * page_size
    column = jnp.broadcast_to(first, (rows.shape[0], first.shape[0]))
    held = used[:, None] & (column >= start[:, None]) & (column < end[:, None])
    slot = take2(table.req_to_token, jnp.broadcast_to(rows[:, None], column.shape), column)
    return jnp.where(held, page_of(slot, page_size), 0).reshape(-1)
