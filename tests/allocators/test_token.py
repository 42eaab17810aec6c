"""TokenToKVPoolAllocator: first in, first out, in SGLang's order."""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import TokenToKVPoolAllocator
from kvjax.layout import INT32_MAX
from tests.inplace import assert_in_place


def create(size=8, need_sort=False):
    return TokenToKVPoolAllocator.create(size, need_sort)


def take(allocator, need, capacity=8):
    allocator, loc, ok = allocator.alloc(need, capacity=capacity)
    return allocator, loc[:need].tolist() if ok else None


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_slots_are_handed_out_first_in_first_out_as_in_sglang():
    a, loc = take(create(), 3)
    assert loc == [1, 2, 3]
    a, loc = take(a, 2)
    assert loc == [4, 5]
    a = a.free([3, 1])
    assert a.to_lists() == ([6, 7, 8, 3, 1], [])
    a, loc = take(a, 4)
    assert loc == [6, 7, 8, 3]
    assert int(a.available_size()) == 1


def test_need_sort_stages_releases_and_merges_when_short_as_in_sglang():
    a, _ = take(create(need_sort=True), 5)
    a = a.free([3, 1]).free([5])
    assert a.to_lists() == ([6, 7, 8], [3, 1, 5])
    a, loc = take(a, 2)
    assert (loc, a.to_lists()) == ([6, 7], ([8], [3, 1, 5]))
    a, loc = take(a, 3)
    assert (loc, a.to_lists()) == ([1, 3, 5], ([8], []))


def test_a_group_is_one_release_and_a_double_free_in_it_is_counted_once():
    a, _ = take(create(6), 6)
    a = a.free_group([4, 2], pages=[6])
    assert a.to_lists() == ([4, 2, 6], [])
    a = a.free([4])  # SGLang's list would be [4, 2, 6, 4]
    assert (a.to_lists(), int(a.faults), int(a.available_size())) == (([4, 2, 6], []), 1, 3)
    assert a.free_group() is a


def test_b01_a_double_free_never_gives_a_slot_to_two_owners():
    for need_sort in (False, True):
        a, _ = take(create(4, need_sort), 4)
        a = a.free([2, 2, 0, 3]).free([2])
        assert (sorted(a.to_lists()[0] + a.to_lists()[1]), int(a.faults)) == ([2, 3], 2)
        a, loc = take(a, 2)
        assert sorted(loc) == [2, 3]
        assert take(a, 1)[1] is None


def test_garbage_is_ignored_and_counted_once_per_distinct_slot_and_call():
    a, _ = take(create(), 8)
    a = a.free([-1, -1, 9, INT32_MAX, -(2**31), 0, 0, 5])
    assert (a.to_lists(), int(a.faults)) == (([5], []), 4)
    a = a.clear()
    assert (a.to_lists(), int(a.faults)) == (([1, 2, 3, 4, 5, 6, 7, 8], []), 4)


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("need", [-1, 9, INT32_MAX, -(2**31)])
def test_what_cannot_be_served_changes_no_bit(need_sort, need):
    a, _ = take(create(need_sort=need_sort), 3)
    b, loc, ok = a.alloc(need, capacity=8)
    assert (bool(ok), loc.tolist()) == (False, [0] * 8)
    assert equal(a, b)


def test_a_merge_stays_after_a_refused_allocation():
    a = TokenToKVPoolAllocator.from_lists([8], [3, 1], size=8, need_sort=True)
    b, _, ok = a.alloc(4, capacity=8)
    assert (bool(ok), b.to_lists()) == (False, ([1, 3, 8], []))
    c, _, ok = a.alloc(9, capacity=8)  # refused for its size: SGLang would not have come to a merge
    assert not ok
    assert equal(a, c)


def test_extend_and_decode_take_one_slot_per_new_token():
    a, loc, ok = create().alloc_extend([0, 2, 3], [2, 2, 6], [-1, 5, 9], capacity=6)
    assert (bool(ok), loc.tolist()) == (True, [1, 2, 3, 4, 5, 0])
    a, loc, ok = a.alloc_decode([3, 0, 5, 1], [-1] * 4, jnp.array([True, True, False, True]))
    assert (bool(ok), loc.tolist(), a.to_lists()[0]) == (True, [6, 0, 0, 7], [8])
    b, loc, ok = a.alloc_decode([3, 1], [-1] * 2, jnp.array([True, True]))
    assert (bool(ok), loc.tolist()) == (False, [0, 0])
    assert equal(a, b)


@pytest.mark.parametrize(("prefix", "seq"), [([2], [1]), ([-1], [1]), ([0], [7]), ([0, 0], [4, 4])])
def test_extend_refuses_wrong_lengths_and_too_many_tokens(prefix, seq):
    a = create()
    b, loc, ok = a.alloc_extend(prefix, seq, [-1] * len(seq), capacity=6)
    assert (bool(ok), loc.any()) == (False, False)
    assert equal(a, b)


def test_decode_refuses_a_negative_length_on_an_active_lane_only():
    a = create()
    assert not a.alloc_decode([-1], [-1], jnp.array([True]))[2]
    assert a.alloc_decode([-1], [-1], jnp.array([False]))[2]


def test_from_lists_wraps_nothing_and_is_free_knows_staged_slots():
    a = TokenToKVPoolAllocator.from_lists([7, 2], [4], size=8, need_sort=True)
    assert a.to_lists() == ([7, 2], [4])
    assert a.is_free(jnp.arange(-1, 10)).tolist() == [i in (7, 2, 4) for i in range(-1, 10)]
    assert (a.num_pages, a.num_slots, a.page_size) == (8, 9, 1)
    with pytest.raises(ValueError, match="2 free and 1 staged slots do not fit an allocator of 8"):
        TokenToKVPoolAllocator.from_lists([7, 2], [4], size=8)


@pytest.mark.parametrize("size", [0, -3, 2.5, INT32_MAX])
def test_create_refuses_sizes_that_make_no_pool(size):
    with pytest.raises(ValueError, match=str(size)):
        create(size)


def test_wrong_arguments_raise_with_both_values():
    a = create()
    with pytest.raises(ValueError, match="loc must be int32, got float32"):
        a.free(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"need must have rank 0, got shape \(1,\)"):
        a.alloc(jnp.zeros(1, jnp.int32), capacity=4)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        a.alloc(1, capacity=0)
    with pytest.raises(ValueError, match="prefix_lens has 1 lanes but seq_lens has 2"):
        a.alloc_extend([0], [1, 2], [-1], capacity=4)
    with pytest.raises(ValueError, match="seq_lens has 2 lanes but last_loc has 1"):
        a.alloc_decode([1, 2], [-1], jnp.array([True, True]))
    with pytest.raises(ValueError, match=r"active must have shape \(1,\).*got \(2,\)"):
        a.alloc_decode([1], [-1], jnp.array([True, True]))


def cycle(a):
    a, loc, _ = a.alloc(3, capacity=4)
    a, more, _ = a.alloc_extend(jnp.array([0, 1]), jnp.array([2, 2]), jnp.array([-1, 1]), capacity=4)
    return a.free(jnp.concatenate([more[::-1], loc[:2]]))


@pytest.mark.parametrize("need_sort", [False, True])
def test_jit_scan_while_and_vmap_agree_with_eager_calls(need_sort):
    start = eager = create(11, need_sort)
    for _ in range(4):
        eager = cycle(eager)
    jitted = start
    for _ in range(4):
        jitted = jax.jit(cycle)(jitted)
    scanned, _ = lax.scan(lambda a, _: (cycle(a), None), start, None, length=4)
    _, looped = lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, cycle(c[1])), (0, start))
    stacked = jax.vmap(lambda a, n: lax.fori_loop(0, n, lambda _, b: cycle(b), a), in_axes=(None, 0))(
        start, jnp.array([4, 1])
    )
    for other in (jitted, scanned, looped, jax.tree.map(lambda x: x[0], stacked)):
        assert equal(other, eager)
        assert jax.tree.structure(other) == jax.tree.structure(start)
    assert equal(jax.tree.map(lambda x: x[1], stacked), cycle(start))


@pytest.mark.compiled
@pytest.mark.parametrize("need_sort", [False, True])
def test_every_operation_updates_a_donated_allocator_in_place(need_sort):
    a, n = create(2**18, need_sort), jnp.zeros((), jnp.int32)
    lanes, slots = jnp.zeros(8, jnp.int32), jnp.zeros(128, jnp.int32)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(a))
    taking = 3 * state if need_sort else 4096  # the sorted merge, when it happens, walks over the lists
    assert_in_place(lambda a, n: a.alloc(n, capacity=64)[0], a, n, temp=taking)
    assert_in_place(lambda a, x: a.alloc_extend(x, x, x, capacity=64)[0], a, lanes, temp=taking)
    assert_in_place(lambda a, x: a.alloc_decode(x, x, x > 0)[0], a, lanes, temp=taking)
    assert_in_place(lambda a: a.merge_and_sort_free(), a, temp=taking)
    assert_in_place(lambda a, x: a.free(x), a, slots, temp=16_384)
    assert_in_place(lambda a, x: a.free_group(x, ((x, 0),), x), a, slots, temp=32_768)
