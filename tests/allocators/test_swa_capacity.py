"""Admission on both sides of a window allocator."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvjax.allocators.capacity import CapacityHooks
from kvjax.allocators.swa_capacity import SWACapacity
from kvjax.prefix import RadixCache


def test_both_sides_are_asked():
    a, _, _ = SWATokenToKVPoolAllocator.create(64, 32, 4).alloc(jnp.int32(8), capacity=8)
    now = SWACapacity.of(a)
    assert (now.full_available, now.swa_available, now.available_size()) == (56, 24, 24)
    assert now.admits(55, 23)
    assert not now.admits(56, 23), "strictly less than what is there"
    assert not now.admits(55, 24)
    assert now.admits(56, 24, full_evictable=4, swa_evictable=4)
    assert not now.admits(56, 24, full_evictable=4, swa_evictable=4, swa_kept=4)
    assert now.decodes(6)
    assert not now.decodes(7)


def test_the_pure_variant_has_one_number_for_both():
    now = SWACapacity.of(PureSWATokenToKVPoolAllocator.create(32, 4))
    assert now.full_available == now.swa_available == 32


def test_a_ring_is_charged_once_for_each_new_row():
    ring = SWARingTokenToKVPoolAllocator.create(64, 4, 3, 6)
    assert SWACapacity.of(ring, 2).swa_available == 16
    last = SWACapacity.of(ring, 1)
    assert last.available_size() == 64
    assert last.admits(63, 0), "the last ring may be taken"
    assert not last.admits(63, 0, swa_kept=8)
    none = SWACapacity.of(ring, 0)
    assert not none.admits(1, 0)
    assert none.admits(1, 0, new_row=False), "a row that goes on has its ring"
    with pytest.raises(ValueError, match="counted in rows"):
        SWACapacity.of(ring)


def test_a_mirror_outside_its_pool_is_refused():
    with pytest.raises(ValueError, match="-4 available window tokens came for a side of 16"):
        SWACapacity(8, -4, 4, 32, 16)
    with pytest.raises(ValueError, match="36 available full tokens came for a side of 32"):
        SWACapacity(36, 8, 4, 32, 16)


def test_every_allocator_answers_the_same_questions():
    """A scheduler needs no type switches: `CapacityHooks` on all of them."""
    ring = SWARingTokenToKVPoolAllocator.create(64, 4, 3, 6)
    mirrors = {
        "token": TokenToKVPoolAllocator.create(64).capacity(),
        "paged": PagedTokenToKVPoolAllocator.create(64, 4).capacity(),
        "dual": SWATokenToKVPoolAllocator.create(64, 32, 4).capacity(),
        "pure": PureSWATokenToKVPoolAllocator.create(64, 4).capacity(),
        "ring": ring.capacity(free_rows=3),
        "state slots": MambaSlotAllocator.create(5).capacity(),
    }
    assert all(isinstance(m, CapacityHooks) for m in mirrors.values())
    assert {n: m.available_size() for n, m in mirrors.items()} == {
        "token": 64, "paged": 64, "dual": 32, "pure": 64, "ring": 64, "state slots": 5
    }  # fmt: skip
    assert {n: m.request_slot_reserve(False) for n, m in mirrors.items() if m.request_slot_reserve(False)} == {
        "ring": ring.ring
    }
    assert mirrors["ring"].request_slot_reserve(True) == 0
    assert {n: m.prealloc_ceiling_fits(64, 40) for n, m in mirrors.items()} == {
        "token": None, "paged": None, "dual": False, "pure": True, "ring": False, "state slots": None
    }  # fmt: skip
    assert mirrors["dual"].max_new_tokens_for_memory(20, 100) == 64 - 20 - 4 - 1
    unaligned = PagedTokenToKVPoolAllocator.create(100, 16).capacity()  # 96 tokens in pages, 100 as SGLang counts
    assert [unaligned.max_new_tokens_for_memory(n, 50, 100) for n in (0, 10, 33, 60, 100)] == [50, 50, 35, 19, 0]
    assert mirrors["dual"].prealloc_fits(10, 5, 10, 5)
    assert not mirrors["dual"].prealloc_fits(10, 5, 10, 4)


def test_eviction_goes_on_until_both_sides_have_room():
    tree = RadixCache(4, window=8)
    slots = np.arange(4, 36, dtype=np.int32)
    tree.insert(np.arange(8), slots[:8])
    tree.insert(np.arange(50, 58), slots[8:16])
    tree.insert(np.arange(90, 98), slots[16:24])
    now = SWACapacity(8, 0, 4, 64, 32)
    evicted, pieces = now.evict_to_free_tokens(tree, 12)
    assert (evicted.full_available, evicted.swa_available) == (24, 16)
    assert np.concatenate(pieces).tolist() == slots[:16].tolist(), "least recently used first, whole leaves"
    same, none = evicted.evict_to_free_tokens(tree, 16)
    assert (same, none) == (evicted, [])
    last, pieces, enough = evicted.check_decode_capacity(tree, 40)
    assert (last.full_available, last.swa_available, len(pieces), enough) == (32, 24, 1, False)
    assert now.evict_to_free_tokens(None, 12) == (now, [])
