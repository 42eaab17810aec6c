"""HybridReqToTokenPool: a request table whose rows also hold slots of recurrent state."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax import freelist
from kvjax.allocators.mamba_slots import MambaSlotAllocator
from kvjax.indexing import in_range, put, put2, take, take2
from kvjax.layout import NEW_ROW, PAD_SLOT
from kvjax.operation import int32, mask, operation, same_length, state, static
from kvjax.rows.req_to_token import ReqToTokenPool

EMPTY = -1  # a tracking entry without a slot; in `alloc`, a slot that is wanted
STAGE, NEXT, LAST = range(3)  # columns of `cursor`
NOTHING, TAKEN, READY = range(3)  # stages of a row


@state
class HybridReqToTokenPool:
    """Rows, a working slot for each, and up to two tracking slots (SGLang: HybridReqToTokenPool).

    The working slot holds the state that the next token continues; tracking slots hold checkpoints of it for a prefix
    tree. A row, its working slot and its first tracking slots are taken together or not at all. The tables keep what a
    freed row held; `working_slots` and `tracking_slots` do not show it: they answer 0 for a row that holds nothing,
    and for one whose slots were taken but not yet handed over (kvjax.recurrent.take), so that a stale slot is neither
    read nor written.
    """

    table: ReqToTokenPool
    slots: MambaSlotAllocator
    working: jax.Array  # i32[size + 1], working slot of each row
    tracking: jax.Array | None  # i32[size + 1, width], EMPTY or a slot; None without tracking
    cursor: jax.Array  # i32[size + 1, 3]: stage, next tracking entry to be written, the one written last
    refused: jax.Array  # i32[]: calls for slots of rows that hold none
    initial_tracking: int = static()  # tracking slots that a row takes at first

    @classmethod
    def create(
        cls,
        size: int,
        max_context_len: int,
        mamba_slots: int,
        extra_buffer: bool = False,
        overlap: bool = True,
        lazy: bool = False,
    ) -> HybridReqToTokenPool:
        """All rows and slots free. Raises ValueError for sizes below 1 or past int32, or fewer slots than a row takes.

        extra_buffer: rows have tracking slots: two entries when overlap, else one. lazy (with overlap): a row takes
        one at first, and `set_track` fills the other when it is needed.
        """
        table, slots = ReqToTokenPool.create(size, max_context_len), MambaSlotAllocator.create(mamba_slots)
        width = (2 if overlap else 1) if extra_buffer else 0
        initial = min(width, 1) if lazy else width
        if slots.size < 1 + initial:
            raise ValueError(
                f"a row takes {1 + initial} state slots, but there are {slots.size}; pass mamba_slots of at least that."
            )
        tracking = jnp.zeros((table.size + 1, width), jnp.int32) if width else None
        zero = jnp.zeros((), jnp.int32)
        working, cursor = jnp.zeros(table.size + 1, jnp.int32), jnp.zeros((table.size + 1, 3), jnp.int32)
        return cls(table, slots, working, tracking, cursor, zero, initial)

    # --- the table, as the ledger knows it ---------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Rows that can be handed out."""
        return self.table.size

    @property
    def max_context_len(self) -> int:
        """Tokens per row."""
        return self.table.max_context_len

    @property
    def req_to_token(self) -> jax.Array:
        """i32[size + 1, max_context_len], slot of each token of each row."""
        return self.table.req_to_token

    def with_entries(self, req_to_token: jax.Array) -> HybridReqToTokenPool:
        """The pool with these entries in its table instead."""
        return dataclasses.replace(self, table=self.table.with_entries(req_to_token))

    @property
    def free_rows_list(self) -> jax.Array:
        """i32[size], free rows."""
        return self.table.free_rows_list

    @property
    def num_free_rows(self) -> jax.Array:
        """i32[]: free rows, whether or not there are slots for them."""
        return self.table.num_free_rows

    @property
    def generation(self) -> jax.Array:
        """i32[size + 1], how often each row was handed out."""
        return self.table.generation

    def is_live(self, rows: jax.Array) -> jax.Array:
        """bool, shape of rows: the row is handed out."""
        return self.table.is_live(rows)

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def tracking_width(self) -> int:
        """Tracking entries per row: 0, 1 or 2."""
        return 0 if self.tracking is None else self.tracking.shape[-1]

    @property
    def slots_per_row(self) -> int:
        """State slots that a new row takes."""
        return 1 + self.initial_tracking

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases of rows and slots that were refused."""
        return self.table.faults + self.slots.faults + self.refused

    def available_size(self) -> jax.Array:
        """i32[]: requests that can be admitted: free rows for which there are slots too."""
        return jnp.minimum(self.table.available_size(), self.slots.available_size() // self.slots_per_row)

    def holds_slots(self, rows: jax.Array) -> jax.Array:
        """bool, shape of rows: the row is live and has state slots."""
        return self.is_live(rows) & (take2(self.cursor, rows, jnp.full_like(rows, STAGE)) != NOTHING)

    def is_ready(self, rows: jax.Array) -> jax.Array:
        """bool, shape of rows: the row has state slots and their state was handed over."""
        return self.is_live(rows) & (take2(self.cursor, rows, jnp.full_like(rows, STAGE)) == READY)

    @operation()
    def working_slots(self, rows: jax.Array) -> jax.Array:
        """i32[b]: the slot that each row's step reads and writes; 0, the sink, for rows that are not ready."""
        rows = int32("rows", rows, 1)
        return jnp.where(self.is_ready(rows), take(self.working, rows), PAD_SLOT)

    def slots_taken(self, rows: jax.Array) -> jax.Array:
        """i32[(1 + width) * b]: every slot of rows i32[b] that were just taken, working slots first; 0 for none."""
        columns = [take(self.working, rows)]
        if self.tracking is not None:
            columns += [take(self.tracking[:, index], rows) for index in range(self.tracking_width)]
        return jnp.concatenate([jnp.where((rows > 0) & (column > 0), column, PAD_SLOT) for column in columns])

    @operation()
    def tracking_slots(self, rows: jax.Array, index: jax.Array) -> jax.Array:
        """i32[b]: tracking entry index[b] of each row; 0 where it is empty or the row is not ready."""
        rows, index = int32("rows", rows, 1), int32("index", index, 1)
        same_length(rows=rows, index=index)
        if self.tracking is None:
            return jnp.zeros_like(rows)
        found = take2(self.tracking, rows, index)
        return jnp.where(self.is_ready(rows) & in_range(index, self.tracking_width), jnp.maximum(found, 0), PAD_SLOT)

    def next_track(self, rows: jax.Array) -> jax.Array:
        """i32, shape of rows: the tracking entry that the row's next checkpoint writes."""
        return take2(self.cursor, rows, jnp.full_like(rows, NEXT))

    def last_track(self, rows: jax.Array) -> jax.Array:
        """i32, shape of rows: the tracking entry that holds the newest checkpoint (SGLang: keep_idx)."""
        return take2(self.cursor, rows, jnp.full_like(rows, LAST))

    # --- taking ------------------------------------------------------------------------------------------------

    @operation()
    def alloc_rows(self, want: jax.Array) -> tuple[HybridReqToTokenPool, jax.Array, jax.Array]:
        """A row with all its slots for every lane that wants one, or none at all.

        want: bool[b]. Returns (pool, rows i32[b], 0 on other lanes and on failure, ok bool[]). The state in the slots
        is not touched here; until it was handed over the rows' slots read as 0.
        """
        want = mask("want", want, (jnp.size(want),))
        pool, rows, _, _, ok = self._alloc(jnp.where(want, NEW_ROW, 0), None, None, None)
        return pool, rows, ok

    @operation()
    def alloc(
        self,
        rows: jax.Array,
        working: jax.Array | None = None,
        tracking: jax.Array | None = None,
        has_tracking: jax.Array | None = None,
    ) -> tuple[HybridReqToTokenPool, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Rows and slots for a batch whose requests may hold some of them already; all or nothing (SGLang: alloc).

        rows: i32[b]; -1: a new row, > 0: the request's row, 0: a lane not in use.
        working: i32[b]; -1: a new slot, > 0: one that the request holds. None: a new one for each new row.
        tracking: i32[b, width], has_tracking: bool[b]: the entries of lanes that have them; the others take
            `initial_tracking` new slots. None: lanes with a new row have none.
        Slots go to the lanes in order, each lane's working slot before its tracking slots. The tables are written for
        every lane in use.
        Refused: too few rows or slots, a row that is not live or appears twice, a row that holds other slots than
        the call says, a held slot that is free.
        Returns (pool, rows, working i32[b], tracking i32[b, width], ok); 0 on lanes not in use and on failure.
        """
        return self._alloc(rows, working, tracking, has_tracking)

    def _alloc(self, rows, working, tracking, has_tracking):
        rows = int32("rows", rows, 1)
        b, width = rows.shape[0], self.tracking_width
        wants, held = rows == NEW_ROW, rows > 0
        used, holding = wants | held, self.holds_slots(rows)
        if working is None:
            working = jnp.where(held & holding, take(self.working, rows), jnp.where(used, EMPTY, 0))
        if has_tracking is None:
            has_tracking = held & holding
        if tracking is None:
            tracking = jnp.zeros((b, width), jnp.int32) if self.tracking is None else take(self.tracking, rows)
        working, tracking = int32("working", working, 1), int32("tracking", tracking, 2)
        has = mask("has_tracking", has_tracking, (b,)) & used
        same_length(rows=rows, working=working)
        if tracking.shape != (b, width):
            raise ValueError(f"tracking must be [lanes, entries per row] = {(b, width)}, got {tracking.shape}.")

        fresh = used & (working == EMPTY)  # lanes that take a working slot
        kept = used & ~fresh
        legal = jnp.where(rows == 0, True, wants | self.is_live(rows)) & (~kept | self.slots.is_live(working))
        legal &= freelist.all_distinct(working, kept)
        legal &= ~holding | (kept & (working == take(self.working, rows)) & (has | (width == 0)))
        if self.tracking is not None:
            entry = ~has[:, None] | (tracking == EMPTY) | self.slots.is_live(tracking)
            same = ~holding[:, None] | (tracking == take(self.tracking, rows))
            legal &= jnp.all(entry & same, axis=1)
        need = jnp.where(fresh, 1, 0) + jnp.where(used & ~has, self.initial_tracking, 0)
        before, total = freelist.exclusive_sum(need) if b else (need, jnp.zeros((), jnp.int32))
        ok = jnp.all(legal) & freelist.all_distinct(rows, held)
        ok &= jnp.sum(wants, dtype=jnp.int32) <= self.table.available_size()
        ok &= total <= self.slots.available_size()

        table, new_rows, _ = self.table.alloc_rows(wants & ok)
        rows = jnp.where(ok, jnp.where(wants, new_rows, rows), 0)
        ring, taken, _ = self.slots.ring.alloc(jnp.where(ok, total, 0), capacity=max(1, b * self.slots_per_row))
        working = jnp.where(fresh, take(taken, before), working)
        if width:
            column = jnp.arange(width, dtype=jnp.int32)
            at = (before + fresh)[:, None] + column
            new = jnp.where(column < self.initial_tracking, take(taken, at), EMPTY)
            tracking = jnp.where(has[:, None], tracking, new)
        working = jnp.where(used & ok, working, 0)
        tracking = jnp.where((used & ok)[:, None], tracking, 0)

        start = jnp.broadcast_to(jnp.array([TAKEN, 0, max(0, self.initial_tracking - 1)], jnp.int32), (b, 3))
        pool = dataclasses.replace(
            self,
            table=table,
            slots=dataclasses.replace(self.slots, ring=ring),
            working=put(self.working, rows, working, lower=1),
            tracking=None if self.tracking is None else put(self.tracking, rows, tracking, lower=1),
            cursor=put(self.cursor, rows, start, valid=~holding, lower=1),
        )
        return pool, rows, working, tracking, ok

    @operation()
    def mark_ready(self, rows: jax.Array) -> HybridReqToTokenPool:
        """Say that the state of these rows' slots (i32[m], 0 = padding) was handed over; rows without slots stay."""
        rows = int32("rows", rows, 1)
        stage = jnp.full_like(rows, STAGE)
        return dataclasses.replace(self, cursor=put2(self.cursor, rows, stage, READY, valid=self.holds_slots(rows)))

    # --- checkpoints -------------------------------------------------------------------------------------------

    @operation()
    def advance_track(self, rows: jax.Array, when: jax.Array) -> tuple[HybridReqToTokenPool, jax.Array]:
        """A checkpoint's bookkeeping: last = next; next = the other entry. Entries without a slot are passed over.

        rows: i32[b], when: bool[b]. Returns (pool, slots i32[b]: where the checkpoint goes, 0 on lanes without one:
        not `when`, a row that is not ready, no tracking, an empty entry). The state itself is copied by
        `kvjax.recurrent.checkpoint`.
        """
        rows, when = int32("rows", rows, 1), mask("when", when, jnp.shape(rows))
        if self.tracking is None:
            return self, jnp.zeros_like(rows)
        index = self.next_track(rows)
        other = (index + 1) % self.tracking_width
        index, other = (
            jnp.where(self.tracking_slots(rows, index) > 0, index, other),
            jnp.where(self.tracking_slots(rows, index) > 0, other, index),
        )
        slots = jnp.where(when, self.tracking_slots(rows, index), 0)
        after = jnp.where(self.tracking_slots(rows, other) > 0, other, index)
        columns = jnp.stack([jnp.full_like(rows, READY), after, index], axis=1)
        return dataclasses.replace(self, cursor=put(self.cursor, rows, columns, valid=slots > 0, lower=1)), slots

    @operation()
    def set_track(
        self, rows: jax.Array, index: jax.Array, slots: jax.Array
    ) -> tuple[HybridReqToTokenPool, jax.Array, jax.Array]:
        """Put a slot in a tracking entry, or EMPTY (-1) to empty it (SGLang: set_ping_pong_slot).

        rows, index, slots: i32[b]; row 0 is padding. A filled entry counts as the newest checkpoint. What the entry
        held is the caller's, who frees it or keeps it. Refused as a whole: a row without slots or named twice, an
        index outside the entries, a slot that is not handed out.
        Returns (pool, the rows' entries i32[b, width] afterwards, ok).
        """
        rows, index, slots = int32("rows", rows, 1), int32("index", index, 1), int32("slots", slots, 1)
        same_length(rows=rows, index=index, slots=slots)
        used = rows != 0
        legal = self.holds_slots(rows) & in_range(index, self.tracking_width)
        legal &= (slots == EMPTY) | self.slots.is_live(slots)
        ok = jnp.all(legal | ~used) & freelist.all_distinct(rows, used)
        if self.tracking is None:
            return self, jnp.zeros((rows.shape[0], 0), jnp.int32), ok
        tracking = put2(self.tracking, rows, index, slots, valid=used & ok)
        cursor = put2(self.cursor, rows, jnp.full_like(rows, LAST), index, valid=used & ok & (slots != EMPTY))
        return dataclasses.replace(self, tracking=tracking, cursor=cursor), take(tracking, rows), ok

    @operation()
    def donate(
        self, rows: jax.Array, index: jax.Array, new_slots: jax.Array
    ) -> tuple[HybridReqToTokenPool, jax.Array, jax.Array]:
        """Give a tracked state away and put a new slot in its place (SGLang: donate).

        rows, index, new_slots: i32[b]; row 0 is padding. Refused as a whole: what `set_track` refuses, an empty
        entry, an EMPTY new slot. Returns (pool, the slots given away i32[b], now the caller's; 0 on failure, ok).
        """
        rows, index, new = int32("rows", rows, 1), int32("index", index, 1), int32("new_slots", new_slots, 1)
        same_length(rows=rows, index=index, new_slots=new)
        used = rows != 0
        if self.tracking is None:
            return self, jnp.zeros_like(rows), ~jnp.any(used)
        old = take2(self.tracking, rows, index)
        legal = self.holds_slots(rows) & in_range(index, self.tracking_width) & (old > 0) & self.slots.is_live(new)
        ok = jnp.all(legal | ~used) & freelist.all_distinct(rows, used)
        tracking = put2(self.tracking, rows, index, new, valid=used & ok)
        cursor = put2(self.cursor, rows, jnp.full_like(rows, LAST), index, valid=used & ok)
        return dataclasses.replace(self, tracking=tracking, cursor=cursor), jnp.where(used & ok, old, 0), ok

    # --- giving back -------------------------------------------------------------------------------------------

    @operation()
    def free_mamba(self, rows: jax.Array, keep: jax.Array | None = None) -> HybridReqToTokenPool:
        """Free the slots of rows (i32[m], 0 = padding): the working slot, then the tracking slots, row after row.

        keep: i32[m], the tracking entry that stays handed out, for its new owner; -1 or None: none. The rows stay
        live, and their table entries keep stale slots. A row that holds no slots changes nothing and counts in faults.
        """
        rows = int32("rows", rows, 1)
        keep = jnp.full_like(rows, EMPTY) if keep is None else int32("keep", keep, 1)
        same_length(rows=rows, keep=keep)
        used = self.holds_slots(rows) & freelist.is_first(rows)
        refused = freelist.count_distinct(rows, (rows != 0) & ~used)
        return self._free_mamba(rows, used, keep, refused)

    def _free_mamba(self, rows, used, keep, refused) -> HybridReqToTokenPool:
        columns = [take(self.working, rows)[:, None]]
        if self.tracking is not None:
            entries = take(self.tracking, rows)
            given = (entries != EMPTY) & (jnp.arange(self.tracking_width, dtype=jnp.int32) != keep[:, None])
            columns.append(jnp.where(given, entries, 0))
        going = jnp.where(used[:, None], jnp.concatenate(columns, axis=1), 0)
        return dataclasses.replace(
            self,
            slots=self.slots.free(going.reshape(-1)),
            cursor=put2(self.cursor, rows, jnp.full_like(rows, STAGE), NOTHING, valid=used),
            refused=self.refused + refused,
        )

    @operation()
    def free_rows(self, rows: jax.Array) -> HybridReqToTokenPool:
        """Free rows (i32[m], 0 = padding) and the slots that they still hold, in the given order.

        SGLang leaves the slots of a freed row to whoever calls free_mamba_cache first; here none is lost.
        """
        rows = int32("rows", rows, 1)
        none = jnp.full_like(rows, EMPTY)
        pool = self._free_mamba(rows, self.holds_slots(rows) & freelist.is_first(rows), none, jnp.zeros((), jnp.int32))
        return dataclasses.replace(pool, table=self.table.free_rows(rows))

    @operation()
    def clear(self) -> HybridReqToTokenPool:
        """Every row and slot free again, both slot tables zero; generations, entries and fault counts stay."""
        return dataclasses.replace(
            self,
            table=self.table.clear(),
            slots=self.slots.clear(),
            working=jnp.zeros_like(self.working),
            tracking=None if self.tracking is None else jnp.zeros_like(self.tracking),
            cursor=jnp.zeros_like(self.cursor),
        )
