"""SWARingTokenToKVPoolAllocator: window layers live in a ring of fixed size per request row, and need no allocator.

Token `position` of row `row` lies at slot `row * ring + position % ring` of the window pool. The ring holds the window
and whatever one program writes ahead of it, so a program may write all its tokens of a row and read afterwards.
Capacity on this side is counted in rows. Row 0's whole ring is padding: nothing is ever addressed there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.allocators.swa import Side, create_side, free_items, opened_pages
from kvjax.allocators.swa_capacity import SWACapacity
from kvjax.allocators.window_side import FullSide
from kvjax.freelist import new_tokens
from kvjax.indexing import in_range
from kvjax.layout import INT32_MAX, NO_LOC, PAD_SLOT, positive, round_down, round_up
from kvjax.operation import int32, mask, operation, same_length, state, static


@state
class SWARingTokenToKVPoolAllocator(FullSide):
    """A full-side allocator beside one ring per row (SGLang: SWATokenToKVPoolAllocator with swa_req_ring_size).

    Slots are taken and given back on the full side only; releases on the SWA side do nothing, for a ring is overwritten
    and goes back with its row. `translate` therefore gives 0: only row and position name a ring slot (`ring_loc`).
    """

    full_attn_allocator: Side
    rows: int = static()  # request rows 1 .. rows
    window: int = static()  # tokens that a window layer sees, the newest included
    ring: int = static()  # slots per row, a multiple of the page; SGLang's ring cost

    @classmethod
    def create(
        cls, size: int, page_size: int, rows: int, window: int, max_write: int = 1, need_sort: bool = False
    ) -> SWARingTokenToKVPoolAllocator:
        """Everything free. size: tokens of the full side. rows: rows of the request table.

        max_write: the most tokens that one program writes to one row (the chunk of an extend; 1 for decode alone).
        ValueError for sizes below 1 or slots past int32.
        """
        full = create_side(size, page_size, need_sort)
        tokens = positive("window", window) + positive("max_write", max_write) - 1
        ring = round_up(tokens, full.page_size)
        if (positive("rows", rows) + 1) * ring > INT32_MAX:
            raise ValueError(
                f"{rows} rows with rings of {ring} slots need {(rows + 1) * ring} slots, but locations are int32 and "
                f"reach {INT32_MAX}; use fewer rows or a shorter ring."
            )
        return cls(full, int(rows), int(window), ring)

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        return self.full_attn_allocator.page_size

    @property
    def size_full(self) -> int:
        """Tokens of the full side."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Slots in the rings of all rows, the padding row's ring not among them."""
        return self.rows * self.ring

    @property
    def size(self) -> int:
        """The smaller side (SGLang's size)."""
        return min(self.size_full, self.size_swa)

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """(full, swa) sizes of the SWAKVPool that goes with it, which has (rows + 1) * ring window slots."""
        return self.size_full, (self.rows + 1) * self.ring - self.page_size

    @property
    def num_pages(self) -> int:
        return self.full_attn_allocator.num_pages

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused."""
        return self.full_attn_allocator.faults

    def available_size(self) -> jax.Array:
        """i32[]: tokens free or staged on the full side; a row has its ring already."""
        return self.full_attn_allocator.available_size()

    full_available_size = available_size

    def swa_available_size(self, free_rows: jax.Array) -> jax.Array:
        """i32[]: ring slots of `free_rows` rows (`ReqToTokenPool.available_size()`)."""
        return free_rows * self.ring

    def capacity(self, free_rows: int) -> SWACapacity:
        """The mirror that answers capacity questions on the host, fetched from the device; free_rows: of the table."""
        return SWACapacity.of(self, free_rows)

    @operation()
    def translate(self, loc: jax.Array) -> jax.Array:
        """i32, shape of loc: 0, for no full slot has a partner of its own; -1 stays -1."""
        loc = jnp.asarray(loc)
        return jnp.where(int32("loc", loc, loc.ndim) == NO_LOC, NO_LOC, 0)

    @operation()
    def ring_loc(self, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """i32: window slots of tokens; rows and positions i32 of shapes that broadcast. 0 for row 0 and outside."""
        rows, positions = jnp.broadcast_arrays(jnp.asarray(rows), jnp.asarray(positions))
        rows, positions = int32("rows", rows, rows.ndim), int32("positions", positions, rows.ndim)
        real = in_range(rows, self.rows + 1, 1) & (positions >= 0)
        at = jnp.where(real, rows, 0) * self.ring + jnp.where(real, positions, 0) % self.ring
        return jnp.where(real, at, PAD_SLOT)

    def usable_prefix(self, length: int, window_layers: int = 1) -> int:
        """How much of a cached prefix of `length` tokens a fresh ring can go on from, in whole pages.

        The tree keeps no rings, so the window before the next token is computed again to fill one. What a window layer
        sees there depends on the window of the layer below: with `window_layers` of them on top of each other the
        result is exact only when so many windows are computed again. 1 is SGLang's rule.
        """
        if length < 0:
            raise ValueError(f"a prefix has 0 tokens or more, got {length}.")
        return max(0, round_down(length - positive("window_layers", window_layers) * self.window, self.page_size))

    # --- what the ledger asks a window side (kvjax.window) ------------------------------------------------------

    releases_window = False  # a ring is overwritten
    forgets_window = False

    def window_loc(self, rows: jax.Array, positions: jax.Array, loc: jax.Array) -> jax.Array:
        """See ring_loc; full slots play no part."""
        return self.ring_loc(rows, positions)

    def window_there(self, first: jax.Array, window_from: jax.Array, allocated: jax.Array) -> jax.Array:
        """bool[b]: no token from `first` on is overwritten in a row that was given `allocated` tokens."""
        return first >= allocated - self.ring

    def may_begin(self, first_loc: jax.Array) -> jax.Array:
        """Always: a new row's ring is empty whatever its prefix (`usable_prefix` says where to begin)."""
        return jnp.ones(first_loc.shape, bool)

    def window_start(self, prefix: jax.Array, edge: jax.Array) -> jax.Array:
        """i32[b]: a ring holds nothing of a prefix that was found elsewhere."""
        return prefix

    def overwritten(self, written: jax.Array) -> jax.Array:
        """i32[b]: tokens below are lost once `written` tokens are there."""
        return jnp.maximum(written - self.ring, 0)

    def room(self, full_pages: jax.Array, window_pages: jax.Array) -> jax.Array:
        """i32[]: pages that can be taken after so many came back on the full side."""
        return self.available_size() // self.page_size + full_pages

    def check_rows(self, rows: int, window: int | None) -> None:
        """ValueError unless the request table has the rings' rows and the ledger their window."""
        if (rows, window) != (self.rows, self.window):
            raise ValueError(
                f"the rings are for {self.rows} rows and a window of {self.window}, but the ledger has {rows} rows "
                f"and a window of {window}; create them with the same numbers."
            )

    def broken_pairs(self) -> jax.Array:
        """bool[1]: nothing can break, for no slot is paired with another."""
        return jnp.zeros(1, bool)

    # --- taking and giving back: the full side's, see PagedTokenToKVPoolAllocator --------------------------------

    def continues(self, prefix: jax.Array, last: jax.Array, used: jax.Array) -> jax.Array:
        return self.full_attn_allocator.continues(prefix, last, used)

    @operation("capacity")
    def alloc(self, need: jax.Array, *, capacity: int) -> tuple[SWARingTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """`need` tokens, a multiple of the page (upstream's would ask the SWA side, which has no allocator here)."""
        need = int32("need", need, 0)
        need = jnp.where(need <= self.available_size(), need, -1)
        full, loc, ok = self.full_attn_allocator.alloc(need, capacity=capacity)
        return self._with(full), loc, ok

    @operation("capacity", "implementation")
    def alloc_extend(
        self,
        prefix_lens: jax.Array,
        seq_lens: jax.Array,
        last_loc: jax.Array,
        *,
        capacity: int,
        num_lanes: jax.Array | None = None,
        implementation: str | None = None,
    ) -> tuple[SWARingTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """As in PagedTokenToKVPoolAllocator, except that a failed check moves nothing, merges included."""
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        same_length(prefix_lens=prefix, seq_lens=seq)
        new, _ = new_tokens(prefix, seq, capacity)
        fits = opened_pages(prefix, new, self.page_size) <= self.available_size() // self.page_size
        full, loc, ok = self.full_attn_allocator.alloc_extend(
            prefix,
            jnp.where(fits, seq, prefix - 1),  # out of order: refused before anything is merged
            last_loc,
            capacity=capacity,
            num_lanes=num_lanes,
            implementation=implementation,
        )
        return self._with(full), loc, ok & fits

    @operation("capacity", "implementation")
    def alloc_extend_swa_tail(
        self,
        prefix_lens: jax.Array,
        seq_lens: jax.Array,
        last_loc: jax.Array,
        swa_tail_len: jax.Array,
        *,
        capacity: int,
        implementation: str | None = None,
    ) -> tuple[SWARingTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """One lane's extension; the tail's tokens lie in the row's ring, so its length is only checked."""
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        tail = int32("swa_tail_len", swa_tail_len, 0)
        if prefix.shape[0] != 1:
            raise ValueError(f"alloc_extend_swa_tail serves one request, got {prefix.shape[0]} lanes.")
        new, _ = new_tokens(prefix, seq, capacity)
        seq = jnp.where((tail >= 0) & (tail <= new), seq, prefix - 1)
        return self.alloc_extend(
            prefix, seq, last_loc, capacity=capacity, num_lanes=jnp.int32(1), implementation=implementation
        )

    @operation("implementation")
    def alloc_decode(
        self, seq_lens: jax.Array, last_loc: jax.Array, active: jax.Array, *, implementation: str | None = None
    ) -> tuple[SWARingTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """As in PagedTokenToKVPoolAllocator."""
        full, loc, ok = self.full_attn_allocator.alloc_decode(seq_lens, last_loc, active, implementation=implementation)
        return self._with(full), loc, ok

    @operation()
    def free(self, loc: jax.Array) -> SWARingTokenToKVPoolAllocator:
        return self._with(self.full_attn_allocator.free(loc))

    free_full = free

    def free_segment(self, loc: jax.Array, start_pos: int = 0) -> SWARingTokenToKVPoolAllocator:
        return self._with(self.full_attn_allocator.free_segment(loc, start_pos))

    free_full_segment = free_segment

    @operation()
    def free_page_ids(self, pages: jax.Array) -> SWARingTokenToKVPoolAllocator:
        return self._with(self.full_attn_allocator.free_page_ids(pages))

    def free_swa(self, loc: jax.Array) -> SWARingTokenToKVPoolAllocator:
        """Nothing: a ring goes back with its row."""
        return self

    def free_swa_segment(self, loc: jax.Array, start_pos: int = 0) -> SWARingTokenToKVPoolAllocator:
        """Nothing: a ring goes back with its row."""
        return self

    def free_swa_page_ids(self, pages: jax.Array) -> SWARingTokenToKVPoolAllocator:
        """Nothing: a ring goes back with its row."""
        return self

    @operation()
    def free_group(
        self, loc: jax.Array, swa: jax.Array, full: jax.Array, segment: jax.Array
    ) -> SWARingTokenToKVPoolAllocator:
        """All items in call order, flags as in SWATokenToKVPoolAllocator.free_group; SWA-only items do nothing."""
        loc = int32("loc", loc, 1)
        swa, full, segment = (mask(n, v, loc.shape) for n, v in (("swa", swa), ("full", full), ("segment", segment)))
        return self._with(free_items(self.full_attn_allocator, loc, full, segment, swa))

    @operation()
    def merge_and_sort_free(self) -> SWARingTokenToKVPoolAllocator:
        return self._with(self.full_attn_allocator.merge_and_sort_free())

    @operation()
    def clear(self) -> SWARingTokenToKVPoolAllocator:
        return self._with(self.full_attn_allocator.clear())

    def _with(self, full: Side) -> SWARingTokenToKVPoolAllocator:
        return dataclasses.replace(self, full_attn_allocator=full)
