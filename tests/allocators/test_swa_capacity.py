"""Admission on both sides of a window allocator."""

import jax.numpy as jnp
import pytest

from kvjax import PureSWATokenToKVPoolAllocator, SWARingTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvjax.allocators.swa_capacity import SWACapacity


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


def test_a_negative_mirror_is_refused():
    with pytest.raises(ValueError, match="-4 window tokens"):
        SWACapacity(8, -4, 4)
