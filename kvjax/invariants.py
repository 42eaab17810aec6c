"""check_invariants: does the ledger still add up? Flags under jit, a readable report on the host.

Sums are not enough: free plus held stays balanced while a page has two owners. So every page is asked who lists it
free, which rows own it and which rows or trees refer to it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from kvjax import freelist
from kvjax.indexing import in_range, put
from kvjax.layout import ceil_div, page_of, round_up
from kvjax.ledger import WINDOW_FROM, Ledger, Table, as_ledger
from kvjax.operation import int32, narrow, operation, state, unbatched
from kvjax.rows import HybridReqToTokenPool
from kvjax.rows.hybrid import EMPTY, NOTHING, STAGE

MEANING = {
    "free_and_live": "on the free list and in a live row",
    "listed_twice": "listed free more than once",
    "listed_outside": "entries of the free list, or of tree_pages, that name no page",
    "owned_twice": "owned by more than one row, or by a row and the prefix tree",
    "lost": "neither free nor owned by a row nor in the prefix tree",
    "borrowed_from_nobody": "used by a row that does not own it, and owned by nobody",
    "broken_entry": "rows whose slots do not fill their pages in order, or that hold a page twice",
    "committed_gt_allocated": "rows with more committed than allocated tokens, or lengths outside the row",
    "row_listed_twice": "rows listed free more than once, or that do not exist",
    "free_row_has_tokens": "free rows that still have a length",
    "unpaired_token": "rows with tokens that a window may see and that have no slot on the window side",
    "broken_pair": "pages of the window side that are free and used at once, lost, or whose users are miscounted",
    "slot_free_and_held": "state slots listed free (or put aside) and held by a row or from outside",
    "slot_listed_twice": "state slots listed free more than once, or (0) entries that name no slot",
    "slot_held_twice": "state slots held twice: by two rows, twice by one, or by a row and from outside",
    "slot_lost": "state slots neither free nor held",
    "broken_slots": "rows whose state slots do not exist, or that hold some and are free",
}
OF_SLOTS = ("slot_free_and_held", "slot_listed_twice", "slot_held_twice", "slot_lost")
OF_ROWS = (
    *("broken_entry", "committed_gt_allocated", "row_listed_twice", "free_row_has_tokens"),
    *("unpaired_token", "broken_slots"),
)


@state
class Invariants:
    """One bool[] per broken rule (see MEANING); all False for a sound ledger."""

    free_and_live: jax.Array
    listed_twice: jax.Array
    listed_outside: jax.Array
    owned_twice: jax.Array
    lost: jax.Array
    borrowed_from_nobody: jax.Array
    broken_entry: jax.Array
    committed_gt_allocated: jax.Array
    row_listed_twice: jax.Array
    free_row_has_tokens: jax.Array
    unpaired_token: jax.Array
    broken_pair: jax.Array
    slot_free_and_held: jax.Array
    slot_listed_twice: jax.Array
    slot_held_twice: jax.Array
    slot_lost: jax.Array
    broken_slots: jax.Array

    def any(self) -> jax.Array:
        """bool[]: some rule is broken."""
        return jnp.any(jnp.stack([getattr(self, f.name) for f in dataclasses.fields(self)]), axis=0)


@operation()
def check_invariants(
    ledger: Ledger, tree_pages: jax.Array | None = None, tree_slots: jax.Array | None = None
) -> Invariants:
    """Flags of the broken rules; O(pool + table), for tests and debugging.

    tree_pages: i32[k], pages that a prefix tree owns (0 = padding): rows may begin with them, and they may be in no
    row at all. tree_slots: i32[k], state slots that somebody other than a row holds (0 = padding).
    """
    offenders = _offenders(ledger, tree_pages, tree_slots)
    return Invariants(**{name: jnp.any(where) for name, where in offenders.items()})


def report(ledger: Ledger, tree_pages: jax.Array | None = None, tree_slots: jax.Array | None = None) -> str:
    """The broken rules with the pages, rows or state slots concerned, read to the host; "" for a sound ledger."""
    unbatched("report", as_ledger("report", ledger).lens, 2)
    found = jax.device_get(_jitted_offenders(ledger, narrow(tree_pages), narrow(tree_slots)))
    lines = []
    for name in MEANING:  # jit returns dicts by alphabet
        ids = np.flatnonzero(found[name])
        if name == "listed_outside" and len(ids):
            lines.append(f"{name}: {MEANING[name]}")
        elif len(ids):
            kind = "rows" if name in OF_ROWS else "slots" if name in OF_SLOTS else "pages"
            shown = ", ".join(map(str, ids[:16])) + (f", ... ({len(ids)} in all)" if len(ids) > 16 else "")
            lines.append(f"{name}: {MEANING[name]}; {kind} {shown}")
    return "\n".join(lines)


def assert_sound(ledger: Ledger, tree_pages: jax.Array | None = None, tree_slots: jax.Array | None = None) -> None:
    """`checkify.check` every rule: raises through `checkify.checkify` under jit, and at once outside."""
    flags = check_invariants(ledger, tree_pages, tree_slots)
    for field in dataclasses.fields(flags):
        checkify.check(~getattr(flags, field.name), f"kvjax ledger: {field.name} ({MEANING[field.name]})")


def _offenders(ledger: Ledger, tree_pages: jax.Array | None, tree_slots: jax.Array | None) -> dict[str, jax.Array]:
    """For every rule, which pages (bool[num_pages + 1]), rows (bool[size + 1]) or state slots break it."""
    table, ps, pages = as_ledger("check_invariants", ledger).table, ledger.page_size, ledger.allocator.num_pages
    listed, outside = ledger.allocator.owns_free_marks()

    free_row, no_row = freelist.occurrences(
        table.free_rows_list, jnp.arange(table.size) < table.num_free_rows, table.size
    )
    row = jnp.arange(table.size + 1)
    live = (free_row == 0) & (row > 0)
    allocated, committed, own = ledger.allocated, ledger.committed, ledger.owned_from

    column = jnp.arange(ceil_div(table.max_context_len, ps), dtype=jnp.int32) * ps
    page = page_of(table.req_to_token[:, ::ps], ps)
    used = live[:, None] & (column < allocated[:, None])
    position = jnp.arange(table.max_context_len, dtype=jnp.int32)
    inside = live[:, None] & (position < allocated[:, None])
    unpaired, pair = jnp.zeros(live.shape, bool), jnp.zeros(1, bool)
    if ledger.slides:
        allocator, begin = ledger.allocator, ledger.lens[:, WINDOW_FROM, None]
        if allocator.forgets_window:  # what a window release gave back, the table does not name any more
            used &= (column >= begin) | (page != 0)
            inside &= (position >= begin) | (table.req_to_token != 0)
        slot = allocator.window_loc(*jnp.broadcast_arrays(row[:, None], position), table.req_to_token)
        unpaired = jnp.any(inside & (position >= begin) & (slot <= 0), axis=1)
        pair = allocator.broken_pairs()
    owned_by, bad_page = _count(page, used & (column >= own[:, None]), pages)
    borrowed_by, bad_borrowed = _count(page, used & (column < own[:, None]), pages)

    tree = jnp.zeros(pages + 1, bool)
    if tree_pages is not None:
        named = int32("tree_pages", tree_pages, 1)
        tree = put(tree, named, True, lower=1)
        outside += jnp.sum((named != 0) & ~in_range(named, pages + 1, 1), dtype=jnp.int32)
    real = jnp.arange(pages + 1) > 0

    head = jnp.repeat(page * ps, ps, axis=1, total_repeat_length=page.shape[1] * ps)[:, : table.max_context_len]
    broken = jnp.any(inside & (table.req_to_token != head + position % ps), axis=1)
    ordered = jnp.sort(jnp.where(used, page, 0), axis=1)
    broken |= jnp.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0), axis=1)
    lengths = (committed > allocated) | (committed < 0) | (allocated > table.max_context_len)
    lengths |= (own < 0) | (own % ps != 0) | (own > round_up(allocated, ps))

    return {
        "free_and_live": (listed > 0) & ((owned_by + borrowed_by > 0) | tree),
        "listed_twice": listed > 1,
        "listed_outside": outside[None] > 0,
        "owned_twice": owned_by + tree.astype(jnp.int32) > 1,
        "lost": real & (listed == 0) & (owned_by == 0) & ~tree,
        "borrowed_from_nobody": (borrowed_by > 0) & (owned_by == 0) & ~tree & (listed == 0),
        "broken_entry": broken | bad_page | bad_borrowed,
        "committed_gt_allocated": live & lengths,
        "row_listed_twice": (free_row > 1) | ((row == 0) & (no_row > 0)),
        "free_row_has_tokens": ~live & jnp.any(ledger.lens != 0, axis=1),
        "unpaired_token": unpaired,
        "broken_pair": pair,
        **_slot_offenders(table, live, tree_slots),
    }


def _slot_offenders(table: Table, live: jax.Array, tree_slots: jax.Array | None) -> dict[str, jax.Array]:
    """The rules of state slots: which slots (bool[slots + 1]) or rows break them; nothing without such slots."""
    if not isinstance(table, HybridReqToTokenPool):
        return {**dict.fromkeys(OF_SLOTS, jnp.zeros(1, bool)), "broken_slots": jnp.zeros(1, bool)}
    listed, outside = table.slots.owns_free_marks()
    holds = table.cursor[:, STAGE] != NOTHING
    entries, used = table.working[:, None], holds[:, None]
    if table.tracking is not None:
        entries = jnp.concatenate([entries, table.tracking], axis=1)
        used = jnp.concatenate([used, holds[:, None] & (table.tracking != EMPTY)], axis=1)
    held, broken = _count(entries, used, table.slots.size)
    if tree_slots is not None:
        slots = int32("tree_slots", tree_slots, 1)
        held += freelist.occurrences(slots, slots != 0, table.slots.size)[0]
    real = jnp.arange(table.slots.size + 1) > 0
    return {
        "slot_free_and_held": (listed > 0) & (held > 0),
        "slot_listed_twice": (listed > 1) | (~real & (outside > 0)),
        "slot_held_twice": held > 1,
        "slot_lost": real & (listed == 0) & (held == 0),
        "broken_slots": broken | (holds & ~live),
    }


def _count(page: jax.Array, used: jax.Array, pages: int) -> tuple[jax.Array, jax.Array]:
    """How many used entries name each page: i32[pages + 1]; bool[rows]: the row names a page that does not exist."""
    times, _ = freelist.occurrences(page.reshape(-1), used.reshape(-1), pages)
    return times, jnp.any(used & ~in_range(page, pages + 1, 1), axis=1)


_jitted_offenders = jax.jit(_offenders)
