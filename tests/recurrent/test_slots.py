"""MambaSlotAllocator: first in first out, groups, and releases that can not hurt."""
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import MambaSlotAllocator


def taken(result):
    allocator, slots, ok = result
    return allocator, slots.tolist(), bool(ok)


def test_slots_come_in_order_and_go_to_the_back():
    slots = MambaSlotAllocator.create(4)
    slots, got, ok = taken(slots.alloc(3, capacity=4))
    assert (got, ok) == ([1, 2, 3, 0], True)
    slots = slots.free([2, 0, 1])
    assert slots.to_lists() == ([4, 2, 1], [])
    slots, got, ok = taken(slots.alloc(4, capacity=4))
    assert (got, ok) == ([0, 0, 0, 0], False)
    assert slots.to_lists() == ([4, 2, 1], [])


def test_a_group_serves_single_slots_and_others_pass_it_by():
    """SGLang's worked example."""
    slots, got, ok = taken(MambaSlotAllocator.create(5).alloc_group_begin(3, capacity=5))
    assert (got, ok, int(slots.available_size()), int(slots.group_left)) == ([1, 2, 3, 0, 0], True, 2, 3)
    slots, got, _ = taken(slots.alloc(1, capacity=2))
    assert got == [1, 0]
    slots, got, _ = taken(slots.alloc(2, capacity=2))
    assert got == [4, 5]
    assert slots.alloc_group_end().to_lists() == ([2, 3], [])


@pytest.mark.parametrize("need", [0, 6, -1])
def test_a_group_of_nothing_or_too_many_is_not_opened(need):
    slots, got, ok = taken(MambaSlotAllocator.create(5).alloc_group_begin(need, capacity=5))
    assert (got, ok, int(slots.available_size()), int(slots.group_left)) == ([0] * 5, False, 5, 0)


def test_a_group_is_not_opened_while_one_is_open():
    slots = MambaSlotAllocator.create(5).alloc_group_begin(2, capacity=5)[0]
    slots, _, ok = taken(slots.alloc_group_begin(1, capacity=5))
    assert not ok
    assert slots.to_lists() == ([3, 4, 5], [1, 2])


def test_b34_what_is_free_put_aside_or_outside_is_refused_and_counted():
    slots = MambaSlotAllocator.create(5).alloc_group_begin(2, capacity=5)[0]
    slots = slots.alloc(1, capacity=1)[0]  # slot 1, from the group; slot 2 is still put aside
    slots = slots.free([2, 3, 6, -1, 1, 1, 0, 2])
    assert slots.to_lists() == ([3, 4, 5, 1], [2])
    assert int(slots.faults) == 5
    slots = slots.clear()
    assert (slots.to_lists(), int(slots.faults)) == (([1, 2, 3, 4, 5], []), 5)


def test_a_slot_is_live_between_taking_and_freeing():
    slots = MambaSlotAllocator.create(4).alloc(1, capacity=1)[0].alloc_group_begin(1, capacity=1)[0]
    assert slots.is_live(jnp.arange(-1, 6)).tolist() == [False, False, True, False, False, False, False]
    slots = slots.alloc(1, capacity=1)[0]
    assert slots.is_live(jnp.arange(-1, 6)).tolist() == [False, False, True, True, False, False, False]


def test_it_runs_in_a_scan_and_under_vmap_with_one_trace():
    def turn(slots, _):
        slots, got, _ = slots.alloc(2, capacity=2)
        return slots.free(got[:1]), got

    last, got = jax.jit(lambda s: jax.lax.scan(turn, s, None, length=3))(MambaSlotAllocator.create(5))
    assert got.tolist() == [[1, 2], [3, 4], [5, 1]]
    assert last.to_lists()[0] == [3, 5]
    many = jax.tree.map(lambda x: jnp.stack([x, x]), MambaSlotAllocator.create(3))
    _, got, ok = jax.vmap(lambda s, n: s.alloc(n, capacity=3))(many, jnp.array([1, 4]))
    assert (got.tolist(), ok.tolist()) == ([[1, 0, 0], [0, 0, 0]], [True, False])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        MambaSlotAllocator.create(0)
    with pytest.raises(ValueError, match="2147483647 state slots do not fit int32"):
        MambaSlotAllocator.create(2**31 - 1)
    with pytest.raises(ValueError, match="slots must be int32"):
        MambaSlotAllocator.create(3).free(np.array([1.0]))
