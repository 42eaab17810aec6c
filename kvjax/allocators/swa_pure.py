"""PureSWATokenToKVPoolAllocator: every layer slides, so one allocator serves both sides and a slot is its own partner.

What a window release gives back is given back altogether. The request table must forget it then: whoever releases
below the window writes 0 into the entries (kvjax.window does), or a later release of the row would free a page that
has a new owner by now.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.allocators.swa import Side, create_side, free_items
from kvjax.allocators.swa_capacity import SWACapacity
from kvjax.allocators.window_side import PagedWindow
from kvjax.indexing import in_range
from kvjax.layout import NO_LOC
from kvjax.operation import int32, mask, operation, state


@state
class PureSWATokenToKVPoolAllocator(PagedWindow):
    """Slots for models whose layers all slide (SGLang: PureSWATokenToKVPoolAllocator), at every page size.

    The contract, the order and the results are those of the one allocator inside. `free` and `free_swa` are the same;
    `free_full` does nothing, for there is no full side.
    """

    allocator: Side

    @classmethod
    def create(cls, size: int, page_size: int = 1, need_sort: bool = False) -> PureSWATokenToKVPoolAllocator:
        """Everything free. ValueError for sizes that do not fit."""
        return cls(create_side(size, page_size, need_sort))

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    @property
    def size(self) -> int:
        """Tokens; `size_full` and `size_swa` are the same number."""
        return self.allocator.size

    size_full = size_swa = size

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """(full, swa) sizes of the SWAKVPool that goes with it: it has window layers only."""
        return 0, self.size

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def mapping(self) -> jax.Array:
        """i32[size + page_size + 1]: the identity with a last entry of -1, made on demand."""
        slots = self.size + self.page_size
        return jnp.arange(slots + 1, dtype=jnp.int32).at[slots].set(NO_LOC)

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused."""
        return self.allocator.faults

    def available_size(self) -> jax.Array:
        """i32[]: tokens free or staged."""
        return self.allocator.available_size()

    full_available_size = swa_available_size = available_size

    def capacity(self) -> SWACapacity:
        """The mirror that answers capacity questions on the host, fetched from the device."""
        return SWACapacity.of(self)

    def is_free(self, pages: jax.Array) -> jax.Array:
        return self.allocator.is_free(pages)

    def owns_free_marks(self) -> tuple[jax.Array, jax.Array]:
        return self.allocator.owns_free_marks()

    @operation()
    def translate(self, loc: jax.Array) -> jax.Array:
        """i32, shape of loc: the slot itself; -1 stays -1, any other id outside the pool gives 0."""
        loc = jnp.asarray(loc)
        loc = int32("loc", loc, loc.ndim)
        return jnp.where(in_range(loc, self.size + self.page_size, NO_LOC), loc, 0)

    # --- what the ledger asks a window side (kvjax.window) ------------------------------------------------------

    forgets_window = True  # and with them the slots: the request table must not name them any more

    def room(self, full_pages: jax.Array, window_pages: jax.Array) -> jax.Array:
        """i32[]: pages that can be taken after so many came back on the full side and on the window side."""
        return self.available_size() // self.page_size + window_pages

    def broken_pairs(self) -> jax.Array:
        """bool[1]: nothing can break, for no slot is paired with another."""
        return jnp.zeros(1, bool)

    # --- taking and giving back --------------------------------------------------------------------------------

    def continues(self, prefix: jax.Array, last: jax.Array, used: jax.Array) -> jax.Array:
        return self.allocator.continues(prefix, last, used)

    @operation("capacity")
    def alloc(self, need: jax.Array, *, capacity: int) -> tuple[PureSWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """See PagedTokenToKVPoolAllocator.alloc."""
        inner, loc, ok = self.allocator.alloc(need, capacity=capacity)
        return PureSWATokenToKVPoolAllocator(inner), loc, ok

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
    ) -> tuple[PureSWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """See PagedTokenToKVPoolAllocator.alloc_extend."""
        inner, loc, ok = self.allocator.alloc_extend(
            prefix_lens, seq_lens, last_loc, capacity=capacity, num_lanes=num_lanes, implementation=implementation
        )
        return PureSWATokenToKVPoolAllocator(inner), loc, ok

    @operation("implementation")
    def alloc_decode(
        self, seq_lens: jax.Array, last_loc: jax.Array, active: jax.Array, *, implementation: str | None = None
    ) -> tuple[PureSWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """See PagedTokenToKVPoolAllocator.alloc_decode."""
        inner, loc, ok = self.allocator.alloc_decode(seq_lens, last_loc, active, implementation=implementation)
        return PureSWATokenToKVPoolAllocator(inner), loc, ok

    @operation()
    def free(self, loc: jax.Array) -> PureSWATokenToKVPoolAllocator:
        """Release the pages (or slots) of loc, i32[m], 0 = padding."""
        return PureSWATokenToKVPoolAllocator(self.allocator.free(loc))

    free_swa = free

    def free_segment(self, loc: jax.Array, start_pos: int = 0) -> PureSWATokenToKVPoolAllocator:
        """Release the pages of a row piece in row order."""
        return PureSWATokenToKVPoolAllocator(self.allocator.free_segment(loc, start_pos))

    free_swa_segment = free_segment

    @operation()
    def free_page_ids(self, pages: jax.Array) -> PureSWATokenToKVPoolAllocator:
        """Release pages (i32[j], 0 = padding) in the given order."""
        return PureSWATokenToKVPoolAllocator(self.allocator.free_page_ids(pages))

    free_swa_page_ids = free_page_ids

    def free_full(self, loc: jax.Array) -> PureSWATokenToKVPoolAllocator:
        """Nothing: there is no full side."""
        return self

    def free_full_segment(self, loc: jax.Array, start_pos: int = 0) -> PureSWATokenToKVPoolAllocator:
        """Nothing: there is no full side."""
        return self

    @operation()
    def free_group(
        self, loc: jax.Array, swa: jax.Array, full: jax.Array, segment: jax.Array
    ) -> PureSWATokenToKVPoolAllocator:
        """All items in call order, flags as in SWATokenToKVPoolAllocator.free_group; full-only items do nothing."""
        loc = int32("loc", loc, 1)
        swa, full, segment = (mask(n, v, loc.shape) for n, v in (("swa", swa), ("full", full), ("segment", segment)))
        return PureSWATokenToKVPoolAllocator(free_items(self.allocator, loc, swa, segment, full))

    @operation()
    def merge_and_sort_free(self) -> PureSWATokenToKVPoolAllocator:
        """Free and staged together, ascending. O(pool)."""
        return PureSWATokenToKVPoolAllocator(self.allocator.merge_and_sort_free())

    @operation()
    def clear(self) -> PureSWATokenToKVPoolAllocator:
        """Everything free again; the fault count stays. O(pool)."""
        return PureSWATokenToKVPoolAllocator(self.allocator.clear())
