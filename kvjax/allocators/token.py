"""TokenToKVPoolAllocator: single slots (page size 1), first in, first out, as SGLang hands them out.

Free slots are a ring: allocations read at its head, releases append at its tail. The witness of kvjax.freelist says
which slots are free, so a double free cannot put a slot on the ring twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax import freelist
from kvjax.allocators.capacity import Capacity
from kvjax.indexing import in_range, put, take, take_short
from kvjax.layout import capacity_of, check_start_pos, pool_slots
from kvjax.operation import int32, mask, narrow, once_if, operation, same_length, state, static, unbatched

HEAD, FREE, STAGED, FAULTS = range(4)  # entries of `counters`


@state
class TokenToKVPoolAllocator:
    """Slot allocator for `size` tokens (SGLang: TokenToKVPoolAllocator). Slots 1 .. size.

    Same contract as PagedTokenToKVPoolAllocator. `alloc_extend` and `alloc_decode`, which SGLang leaves to the caller
    at page size 1, serve the ledger without a type switch there.
    """

    ring: jax.Array  # i32[size], free slots from counters[HEAD] on, wrapping
    pos: jax.Array  # i32[size + 1], witness: index in `ring`, or freelist.staged_at(index in `staged`)
    staged: jax.Array | None  # i32[size] with need_sort: freed slots in release order, waiting for a merge
    counters: jax.Array  # i32[4]: head of the ring, free slots, staged slots, faults
    size: int = static()  # tokens
    need_sort: bool = static(default=False)

    page_size = 1

    @classmethod
    def create(cls, size: int, need_sort: bool = False) -> TokenToKVPoolAllocator:
        """All slots free, in ascending order. Raises ValueError for a size below 1 or past int32."""
        pool_slots(size, 1)
        n = int(size)
        ring, pos = _all_free(n)
        staged = jnp.zeros(n, jnp.int32) if need_sort else None
        return cls(ring, pos, staged, jnp.array([0, n, 0, 0], jnp.int32), n, bool(need_sort))

    @classmethod
    def from_lists(
        cls, free: Sequence[int], staged: Sequence[int] = (), *, size: int, need_sort: bool = False
    ) -> TokenToKVPoolAllocator:
        """An allocator with the given free list (front first) and staged list, for tests. Not checked for sense."""
        base = cls.create(size, need_sort)
        if len(free) > size or len(staged) > size or (staged and not need_sort):
            raise ValueError(
                f"{len(free)} free and {len(staged)} staged slots do not fit an allocator of {size} slots "
                f"(staged slots need need_sort=True)."
            )
        ring, pos, wait = np.zeros(size, np.int32), np.full(size + 1, size, np.int32), np.zeros(size, np.int32)
        ring[: len(free)], wait[: len(staged)] = list(free), list(staged)
        pos[np.asarray(list(free), np.int32)] = np.arange(len(free), dtype=np.int32)
        pos[np.asarray(list(staged), np.int32)] = -1 - np.arange(len(staged), dtype=np.int32)
        counters = jnp.array([0, len(free), len(staged), 0], jnp.int32)
        rest = jnp.array(wait) if need_sort else None
        return cls(jnp.array(ring), jnp.array(pos), rest, counters, base.size, base.need_sort)

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Slots that the allocator owns; a slot is a page of one token."""
        return self.size

    @property
    def num_slots(self) -> int:
        """Slots of a pool that this allocator serves: size + 1."""
        return self.size + 1

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused, once per distinct slot and call. `clear` keeps the count."""
        return self.counters[..., FAULTS]

    @property
    def free_pages(self) -> jax.Array:
        """i32[]: slots that the next allocation is served from."""
        return self.counters[..., FREE]

    @property
    def staged_pages(self) -> jax.Array:
        """i32[]: slots waiting for a merge (need_sort)."""
        return self.counters[..., STAGED]

    def available_size(self) -> jax.Array:
        """i32[]: tokens in free and staged slots."""
        return self.free_pages + self.staged_pages

    def capacity(self) -> Capacity:
        """The mirror that answers capacity questions on the host, fetched from the device."""
        unbatched("capacity", self.counters, 1)
        return Capacity.of(self)

    def to_lists(self) -> tuple[list[int], list[int]]:
        """(free slots, next one first; staged slots in release order), read to the host."""
        unbatched("to_lists", self.counters, 1)
        head, free, staged, _ = np.asarray(self.counters).tolist()
        waiting = [] if self.staged is None else np.asarray(self.staged)[:staged].tolist()
        return np.roll(np.asarray(self.ring), -head)[:free].tolist(), waiting

    def is_free(self, slots: jax.Array) -> jax.Array:
        """bool, shape of slots: the slot is free or staged; False for ids out of range."""
        at = take_short(self.pos, slots)
        behind_head = at - self.counters[HEAD]
        behind_head = jnp.where(behind_head < 0, behind_head + self.size, behind_head)
        found = in_range(at, self.size) & (behind_head < self.free_pages) & (take_short(self.ring, at) == slots)
        if self.staged is not None:
            back = freelist.staged_at(at)
            found |= in_range(back, self.staged_pages) & (take_short(self.staged, back) == slots)
        return found & in_range(slots, self.size + 1, 1)

    def owns_free_marks(self) -> tuple[jax.Array, jax.Array]:
        """i32[size + 1]: how often each slot is listed (free, staged) and i32[]: entries that name no slot. O(pool)."""
        lane = jnp.arange(self.size, dtype=jnp.int32)
        listed, live = [take(self.ring, self._at(lane))], [lane < self.free_pages]
        if self.staged is not None:
            listed.append(self.staged)
            live.append(lane < self.staged_pages)
        return freelist.occurrences(jnp.concatenate(listed), jnp.concatenate(live), self.size)

    # --- taking ------------------------------------------------------------------------------------------------

    @operation("capacity")
    def alloc(self, need: ArrayLike, *, capacity: int) -> tuple[TokenToKVPoolAllocator, jax.Array, jax.Array]:
        """The first `need` (i32[]) free slots. Returns (allocator, loc i32[capacity], 0 behind the last, ok)."""
        width, need = capacity_of(capacity), int32("need", need, 0)
        return self._alloc(need, (need >= 0) & (need <= width), width)

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
    ) -> tuple[TokenToKVPoolAllocator, jax.Array, jax.Array]:
        """sum(seq - prefix) slots, back to back in batch order: what SGLang's caller does at page size 1.

        prefix_lens, seq_lens: i32[b]; last_loc, num_lanes and implementation play no part (every token opens a page,
        and there is nothing to choose: the slots are one slice of the ring). Returns
        (allocator, loc i32[capacity], ok); seq < prefix and more than `capacity` new tokens are refused.
        """
        width = capacity_of(capacity)
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        same_length(prefix_lens=prefix, seq_lens=seq, last_loc=int32("last_loc", last_loc, 1))
        new, legal = freelist.new_tokens(prefix, seq, width)
        return self._alloc(jnp.sum(new, dtype=jnp.int32), legal, width)

    @operation("implementation")
    def alloc_decode(
        self, seq_lens: jax.Array, last_loc: jax.Array, active: jax.Array, *, implementation: str | None = None
    ) -> tuple[TokenToKVPoolAllocator, jax.Array, jax.Array]:
        """One slot for every active lane of length >= 1, in lane order. Returns (allocator, loc i32[b], ok)."""
        seq = int32("seq_lens", seq_lens, 1)
        b = same_length(seq_lens=seq, last_loc=int32("last_loc", last_loc, 1))
        active = mask("active", active, (b,))
        rank, total = freelist.exclusive_rank(active & (seq > 0))
        out, slots, ok = self._alloc(total, jnp.all(~active | (seq >= 0)), b)
        return out, jnp.where(active & (seq > 0), take(slots, rank), 0), ok

    def _alloc(
        self, need: jax.Array, legal: jax.Array, width: int
    ) -> tuple[TokenToKVPoolAllocator, jax.Array, jax.Array]:
        now = self._merged(legal & (need > self.free_pages))
        ok = legal & (need <= now.free_pages)
        taken = jnp.where(ok, need, 0)
        rank = jnp.arange(width, dtype=jnp.int32)
        loc = jnp.where(rank < taken, now._front(rank, width), 0)
        head = now._at(taken)
        counters = now.counters.at[HEAD].set(jnp.where(head == self.size, 0, head)).at[FREE].add(-taken)
        return dataclasses.replace(now, counters=counters), loc, ok

    def _front(self, rank: jax.Array, width: int) -> jax.Array:
        """The slot that is handed out as the rank-th next, i32, shape of rank; rank below `width` where it is used.

        Read through two windows of the ring, at its head and at its beginning, where the head's one wraps to.
        """
        width, head = min(width, self.size), self.counters[HEAD]
        start = jnp.minimum(head, self.size - width)
        window = jnp.concatenate([lax.dynamic_slice(self.ring, (start,), (width,)), self.ring[:width]])
        at = head + rank
        return take(window, jnp.where(at < self.size, at - start, at - self.size + width))

    def continues(self, prefix: jax.Array, last: jax.Array, used: jax.Array) -> jax.Array:
        """bool[b]: every lane does, for a prefix never ends inside a page of one token."""
        return jnp.ones(prefix.shape, bool)

    def _at(self, rank: jax.Array) -> jax.Array:
        """Ring index of the rank-th entry behind the head, 0 <= rank <= size; no sum passes int32."""
        at = (self.counters[HEAD] - self.size) + rank
        return jnp.where(at < 0, at + self.size, at)

    # --- giving back -------------------------------------------------------------------------------------------

    @operation()
    def free(self, loc: jax.Array) -> TokenToKVPoolAllocator:
        """Append the slots (i32[m], 0 = padding) to the free list (need_sort: to the staged list) as given."""
        return self._free(int32("loc", loc, 1))

    def free_page_ids(self, pages: jax.Array) -> TokenToKVPoolAllocator:
        """The same as `free`: a slot is a page of one token."""
        return self.free(pages)

    def free_segment(self, loc: jax.Array, start_pos: int = 0) -> TokenToKVPoolAllocator:
        """The same as `free`: every position starts a page of one token."""
        check_start_pos(start_pos, 1)
        return self.free(loc)

    def free_group(
        self,
        tokens: jax.Array | None = None,
        segments: Sequence[tuple[jax.Array, int]] = (),
        pages: jax.Array | None = None,
    ) -> TokenToKVPoolAllocator:
        """One release of tokens, then segments, then pages, concatenated; SGLang keeps call order, so pass mixed items
        in one of them."""
        for _, start_pos in segments:
            check_start_pos(start_pos, 1)
        parts = [p for p in (tokens, *(loc for loc, _ in segments), pages) if p is not None]
        slots = [int32("the slots of a group", narrow(p), 1) for p in parts]
        return self.free(jnp.concatenate(slots)) if slots else self

    def _free(self, slots: jax.Array) -> TokenToKVPoolAllocator:
        if slots.shape[0] == 0:
            return self
        slots = freelist.two_or_more(slots)
        candidates = in_range(slots, self.size + 1, 1) & ~self.is_free(slots)
        pos, fresh = freelist.first_occurrences(slots, self.pos, candidates)
        faults = freelist.count_distinct(slots, (slots != 0) & ~fresh)
        rank, total = freelist.exclusive_rank(fresh)
        counters = self.counters.at[FAULTS].add(faults)
        if self.staged is None:
            at = self._at(jnp.where(fresh, self.free_pages + rank, 0))
            ring = put(self.ring, at, slots, valid=fresh)
            pos = put(pos, slots, at, valid=fresh, lower=1)
            return dataclasses.replace(self, ring=ring, pos=pos, counters=counters.at[FREE].add(total))
        at = self.staged_pages + rank
        staged = put(self.staged, at, slots, valid=fresh)
        pos = put(pos, slots, freelist.staged_at(at), valid=fresh, lower=1)
        return dataclasses.replace(self, staged=staged, pos=pos, counters=counters.at[STAGED].add(total))

    # --- housekeeping ------------------------------------------------------------------------------------------

    @operation()
    def merge_and_sort_free(self) -> TokenToKVPoolAllocator:
        """Free and staged slots together, ascending; nothing happens when no slot is staged. O(pool)."""
        return self._merged(jnp.ones((), bool))

    @operation()
    def clear(self) -> TokenToKVPoolAllocator:
        """Every slot free again, ascending, nothing staged; the fault count stays. O(pool)."""
        ring, pos = _all_free(self.size)
        return dataclasses.replace(self, ring=ring, pos=pos, counters=_counts(self.size, self.faults))

    def _merged(self, wanted: jax.Array) -> TokenToKVPoolAllocator:
        if self.staged is None:
            return self

        def merge(a: TokenToKVPoolAllocator) -> TokenToKVPoolAllocator:
            listed = a.owns_free_marks()[0] > 0
            at, total = freelist.exclusive_rank(listed)
            ring = put(a.ring, at, jnp.arange(a.size + 1, dtype=jnp.int32), valid=listed)
            pos = jnp.where(listed, at, a.pos)
            return dataclasses.replace(a, ring=ring, pos=pos, counters=_counts(total, a.faults))

        return once_if(wanted & (self.staged_pages > 0), merge, self)


def _all_free(n: int) -> tuple[jax.Array, jax.Array]:
    slot = jnp.arange(n + 1, dtype=jnp.int32)
    return slot[1:], slot - 1


def _counts(free, faults) -> jax.Array:
    """Counters of an allocator whose ring starts at index 0 and which has nothing staged."""
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (0, free, 0, faults)])
