"""MambaSlotAllocator: the slots of recurrent state, one or a few per request, first in, first out.

The free slots are a token allocator's ring. A group puts slots aside for calls that follow (SGLang reserves what a
batch will need, then takes it request by request); they are neither free nor anybody's until then.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax import freelist
from kvjax.allocators.capacity import Capacity
from kvjax.allocators.token import TokenToKVPoolAllocator
from kvjax.indexing import in_range, put, take
from kvjax.layout import INT32_MAX, capacity_of, positive
from kvjax.operation import int32, operation, state

NEXT, END, FAULTS = range(3)  # entries of `counters`


@state
class MambaSlotAllocator:
    """Slots 1 .. size of a state pool (SGLang: MambaSlotAllocator). Slot 0 is the sink and is never handed out.

    Freed slots are appended to the free list as given; a slot that is free, put aside, outside the pool or named
    twice is ignored and counted in `faults`.
    """

    ring: TokenToKVPoolAllocator  # the free slots
    group: jax.Array  # i32[size], the slots put aside are group[counters[NEXT] : counters[END]]
    group_pos: jax.Array  # i32[size + 1], witness: where in `group` each slot was put (kvjax.freelist)
    counters: jax.Array  # i32[3]: the first slot of the group that is left, the end of the group, faults

    @classmethod
    def create(cls, size: int) -> MambaSlotAllocator:
        """All slots free, in ascending order, no group. ValueError for a size below 1 or past int32."""
        slots = positive("size", size)
        if slots >= INT32_MAX:
            raise ValueError(f"{slots} state slots do not fit int32 (at most {INT32_MAX - 1}); make the pool smaller.")
        group, pos = jnp.zeros(slots, jnp.int32), jnp.full(slots + 1, slots, jnp.int32)
        return cls(TokenToKVPoolAllocator.create(slots), group, pos, jnp.zeros(3, jnp.int32))

    @property
    def size(self) -> int:
        """Slots that can be handed out."""
        return self.ring.size

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused, once per distinct slot and call. `clear` keeps the count."""
        return self.ring.faults + self.counters[..., FAULTS]

    @property
    def group_left(self) -> jax.Array:
        """i32[]: slots put aside and not taken yet."""
        return self.counters[..., END] - self.counters[..., NEXT]

    def available_size(self) -> jax.Array:
        """i32[]: free slots; those put aside do not count."""
        return self.ring.available_size()

    def capacity(self) -> Capacity:
        """The mirror that answers capacity questions on the host, in slots, fetched from the device."""
        return self.ring.capacity()

    def to_lists(self) -> tuple[list[int], list[int]]:
        """(free slots, slots put aside), next one first, read to the host."""
        start, end, _ = np.asarray(self.counters).tolist()
        return self.ring.to_lists()[0], np.asarray(self.group)[start:end].tolist()

    def is_live(self, slots: jax.Array) -> jax.Array:
        """bool, shape of slots: the slot is handed out; False for slot 0 and ids out of range."""
        return in_range(slots, self.size + 1, 1) & ~self.ring.is_free(slots) & ~self._put_aside(slots)

    def _put_aside(self, slots: jax.Array) -> jax.Array:
        at = take(self.group_pos, slots)
        return in_range(at, self.counters[END]) & (at >= self.counters[NEXT]) & (take(self.group, at) == slots)

    def owns_free_marks(self) -> tuple[jax.Array, jax.Array]:
        """i32[size + 1]: how often each slot is listed (free, put aside), i32[]: entries that name no slot. O(pool)."""
        lane = jnp.arange(self.size, dtype=jnp.int32)
        aside = (lane >= self.counters[NEXT]) & (lane < self.counters[END])
        free, outside = self.ring.owns_free_marks()
        group, more = freelist.occurrences(self.group, aside, self.size)
        return free + group, outside + more

    @operation("capacity")
    def alloc(self, need: ArrayLike, *, capacity: int) -> tuple[MambaSlotAllocator, jax.Array, jax.Array]:
        """The first `need` (i32[]) free slots, or none. Returns (allocator, slots i32[capacity], 0 behind, ok).

        A need of 1 is served from the group while one is open; any other need passes it by (SGLang's rule).
        """
        width, need = capacity_of(capacity), int32("need", need, 0)
        drains = (need == 1) & (self.group_left > 0)
        ring, slots, ok = self.ring.alloc(jnp.where(drains, 0, need), capacity=width)
        # NEXT is a place of the list, or its end, and then nothing drains: no check, one slice.
        first = lax.dynamic_index_in_dim(self.group, self.counters[NEXT], keepdims=False)
        slots = slots.at[0].set(jnp.where(drains, first, slots[0]))
        counters = self.counters.at[NEXT].add(drains.astype(jnp.int32))
        return dataclasses.replace(self, ring=ring, counters=counters), slots, ok

    @operation()
    def free(self, slots: jax.Array) -> MambaSlotAllocator:
        """Append the slots (i32[m], 0 = padding) to the free list as given."""
        slots = int32("slots", slots, 1)
        if slots.shape[0] == 0:
            return self
        aside = self._put_aside(slots)
        counters = self.counters.at[FAULTS].add(freelist.count_distinct(slots, aside))
        return dataclasses.replace(self, ring=self.ring.free(jnp.where(aside, 0, slots)), counters=counters)

    @operation("capacity")
    def alloc_group_begin(self, need: ArrayLike, *, capacity: int) -> tuple[MambaSlotAllocator, jax.Array, jax.Array]:
        """Put `need` (i32[]) slots aside. Returns (allocator, slots i32[capacity], 0 behind the last, ok).

        Refused, and no group is opened: a need of 0 or past what is free, and a group while one is open.
        """
        width, need = capacity_of(capacity), int32("need", need, 0)
        allowed = (need > 0) & (self.group_left == 0)
        ring, slots, ok = self.ring.alloc(jnp.where(allowed, need, -1), capacity=width)
        lane, taken = jnp.arange(width, dtype=jnp.int32), jnp.where(ok, need, 0)
        group = put(self.group, lane, slots, valid=lane < taken)
        pos = put(self.group_pos, slots, lane, valid=lane < taken, lower=1)
        counters = (
            self.counters.at[NEXT].multiply(jnp.where(ok, 0, 1)).at[END].set(jnp.where(ok, taken, self.counters[END]))
        )
        return dataclasses.replace(self, ring=ring, group=group, group_pos=pos, counters=counters), slots, ok

    @operation("capacity")
    def alloc_group_end(self, *, capacity: int | None = None) -> MambaSlotAllocator:
        """Append what is left of the group to the free list; nothing happens without a group.

        capacity: the longest group that can be open; None: every slot.
        """
        width = self.size if capacity is None else min(capacity_of(capacity), self.size)
        at = self.counters[NEXT] + jnp.arange(width, dtype=jnp.int32)
        left = jnp.where(at < self.counters[END], take(self.group, at), 0)
        ended = self.counters.at[NEXT].add(jnp.minimum(self.group_left, width))
        return dataclasses.replace(self, ring=self.ring.free(left), counters=ended)

    @operation()
    def clear(self) -> MambaSlotAllocator:
        """Every slot free again, ascending, no group; the fault count stays. O(pool)."""
        counters = jnp.stack([jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), self.counters[FAULTS]])
        return dataclasses.replace(self, ring=self.ring.clear(), counters=counters)
