"""SWATokenToKVPoolAllocator and its pure variant: worked examples, refusals, faults, and who may free what."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator

# Lists stand for arrays below.
SWA: Any = SWATokenToKVPoolAllocator
Pure: Any = PureSWATokenToKVPoolAllocator


def sides(a):
    return a.full_attn_allocator.to_lists(), a.swa_attn_allocator.to_lists()


def extend(a, prefix, seq, last, capacity=16):
    return a.alloc_extend([prefix], [seq], [last], capacity=capacity)


def tail(a, seq, length, prefix=0, last=-1):
    return a.alloc_extend_swa_tail([prefix], [seq], [last], length, capacity=16)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_slots_are_paired_in_fifo_order_at_page_size_1():
    """SGLANG_BEHAVIOUR section 11."""
    a = SWA.create(8, 5, 1)
    a, loc, ok = a.alloc(4, capacity=4)
    assert ok
    assert loc.tolist() == [1, 2, 3, 4]
    assert a.mapping.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, -1]
    assert not a.alloc(2, capacity=2)[2]
    a = a.free_swa([1, 2])
    assert sides(a)[1][0] == [5, 1, 2]
    a, loc, ok = a.alloc(2, capacity=2)
    assert loc.tolist() == [5, 6]
    assert a.translate(loc).tolist() == [5, 1]
    a = a.free_full([1, 2]).free([3, 4])
    assert sides(a)[0][0] == [7, 8, 1, 2, 3, 4]
    assert int(a.faults) == 0


def test_extend_and_decode_work_at_page_size_1_lane_by_lane():
    a = SWA.create(8, 6, 1)
    a, loc, ok = a.alloc_extend([0, 0], [2, 1], [-1, -1], capacity=4)
    assert ok
    assert loc.tolist() == [1, 2, 3, 0]
    a, loc, ok = a.alloc_decode([3, 9, 2], [2, -1, 3], [True, False, True])
    assert ok
    assert loc.tolist() == [4, 0, 5]
    assert a.translate(loc).tolist() == [4, 0, 5]
    assert not a.alloc_extend([0], [2], [-1], capacity=4)[2], "one slot is left on the SWA side"
    a, loc, ok = tail(a, 2, 1)
    assert ok
    assert a.translate(loc[:2]).tolist() == [0, 6]


def test_a_tail_has_partners_for_its_last_tokens_only():
    a, loc, ok = tail(SWA.create(64, 32, 4), 10, 5)
    assert ok
    assert loc[:10].tolist() == list(range(4, 14))
    assert a.translate(loc[:10]).tolist() == [0, 0, 0, 0, 0, 4, 5, 6, 7, 8]
    assert int(a.swa_available_size()) == 32 - 8


def test_pages_of_a_page_multiple_are_paired():
    a, loc, ok = SWA.create(16, 16, 4).alloc(8, capacity=8)
    assert ok
    assert a.translate(loc).tolist() == loc.tolist() == list(range(4, 12))
    assert not a.alloc(6, capacity=8)[2]


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_call_that_one_side_cannot_serve_changes_neither(need_sort):
    a = SWA.create(32, 8, 4, need_sort)
    a, loc, _ = extend(a, 0, 8, -1)
    assert same(extend(a, 0, 1, -1)[0], a)
    assert same(tail(a, 8, 1)[0], a)
    assert same(a.alloc(4, capacity=4)[0], a)
    b, got, ok = a.alloc_decode([9], [int(loc[7])], [True])
    assert not ok
    assert not got.any()
    assert same(b, a), "upstream takes the full page here and loses it"


def test_failed_extends_keep_staged_pages_apart_and_a_failed_decode_merges():
    a = SWA.create(16, 8, 4, need_sort=True)
    a, loc, _ = extend(a, 0, 8, -1)
    a = a.free(loc[4:8])
    assert sides(a) == (([3, 4], [2]), ([], [2]))
    assert same(extend(a, 0, 8, -1)[0], a)
    assert same(a.alloc(8, capacity=8)[0], a)
    b, _, ok = a.alloc_decode([5, 1], [7, -1], [True, True])
    assert not ok
    assert sides(b) == (([3, 4], [2]), ([2], [])), "two lanes are more than no free page, not more than two"


def test_an_extend_whose_partner_is_gone_or_at_another_offset_is_refused():
    a, loc, _ = extend(SWA.create(32, 32, 4), 0, 6, -1)
    last = int(loc[5])
    assert extend(a, 6, 7, last)[2]
    freed = a.free_swa([last])
    assert same(extend(freed, 6, 7, last)[0], freed)
    assert not freed.alloc_decode([7], [last], [True])[2]
    b, loc, _ = tail(SWA.create(32, 32, 4), 6, 3)  # partners at offsets 0, 1, 2 of the slots at offsets 3, 0, 1
    assert not extend(b, 6, 7, int(loc[5]))[2]
    assert not b.alloc_decode([7], [int(loc[5])], [True])[2]
    assert tail(b, 7, 1, 6, int(loc[5]))[2], "a tail takes fresh pages whatever the prefix has"


def test_a_tail_over_tokens_that_have_partners_is_refused():
    a, loc, _ = extend(SWA.create(32, 32, 4), 0, 4, -1)
    assert same(tail(a, 3, 1, 2, int(loc[1]))[0], a)


def test_a_shared_swa_page_goes_back_with_its_last_user():
    """An unaligned tail: window page 1 serves full pages 2 and 3. SGLang frees it with the first of them."""
    a, loc, _ = tail(SWA.create(64, 32, 4), 10, 5)
    first, second = loc[4:8], loc[8:10]
    a = a.free_swa(first)
    assert a.translate(loc[:10]).tolist() == [0] * 8 + [7, 8]
    assert int(a.swa_available_size()) == 32 - 8, "slot 7 of page 1 is still in use"
    a = a.free_swa_segment(second, 8)
    assert int(a.swa_available_size()) == 32
    assert sides(a)[1][0][:2] == [1, 2]
    assert int(a.faults) == 0


def test_releases_look_at_every_token_of_a_page():
    """The partner of offset 0 is missing, those behind it are not."""
    a, loc, _ = tail(SWA.create(64, 32, 4), 4, 2)
    assert a.translate(loc[:4]).tolist() == [0, 0, 4, 5]
    for release in (a.free_swa_segment(loc[:4]), a.free_segment(loc[:4]), a.free(loc[:1]), a.free_page_ids([1])):
        assert int(release.swa_available_size()) == 32
        assert not release.mapping[:-1].any()


def test_faults_are_counted_on_the_full_side_once():
    a, loc, _ = extend(SWA.create(32, 32, 4), 0, 8, -1)
    gone = a.free(loc[:8])
    assert int(gone.faults) == 0
    twice = gone.free(loc[:8])
    assert int(twice.faults) == 2
    assert int(twice.full_attn_allocator.faults) == 2
    assert same(twice.full_attn_allocator.stack, gone.full_attn_allocator.stack)
    assert int(gone.free_swa(loc[:8]).free_swa([0, -5, 900, 2]).faults) == 0, "no partner is padding"


def test_the_full_side_of_a_page_with_partners_stays():
    a, loc, _ = extend(SWA.create(32, 32, 4), 0, 8, -1)
    for refused in (a.free_full(loc[:8]), a.free_full_segment(loc[:8]), a.free_full_page_ids([1, 2, 1])):
        assert int(refused.full_available_size()) == 24
        assert int(refused.faults) == 2
    freed = a.free_swa(loc[:4]).free_full(loc[:8])
    assert int(freed.full_available_size()) == 28
    assert int(freed.faults) == 1


def group(a, *items):
    loc = [s for slots, *_ in items for s in slots]
    flags = [[bool(item[k]) for item in items for _ in item[0]] for k in (1, 2, 3)]
    return a.free_group(np.array(loc, np.int32), *(np.array(f, bool) for f in flags))


def test_a_group_looks_partners_up_in_call_order():
    a, loc, _ = extend(SWA.create(64, 64, 4), 0, 16, -1)
    first, rest = loc[:4].tolist(), loc[4:16].tolist()
    right = group(a, (first, 1, 0, 0), (first, 0, 1, 0), (rest, 1, 1, 1))
    assert int(right.faults) == 0
    assert int(right.available_size()) == 64
    assert sides(right) == (([2, 3, 4, 1, *range(5, 17)], []), ([1, 2, 3, 4, *range(5, 17)], []))
    wrong = group(a, (first, 0, 1, 0), (first, 1, 0, 0))
    assert int(wrong.faults) == 1, "the page had partners when its full side was to go"
    assert int(wrong.full_available_size()) == 48
    assert int(wrong.swa_available_size()) == 52


def test_a_segment_listed_twice_in_a_group_is_a_fault():
    a, loc, _ = extend(SWA.create(64, 64, 4), 0, 8, -1)
    piece = loc[:8].tolist()
    assert int(group(a, (piece, 1, 1, 1), (piece[4:], 1, 1, 1)).faults) == 1


def test_recycled_full_pages_bring_no_old_partners():
    """B19"""
    a = SWA.create(8, 8, 1)
    a, loc, _ = a.alloc(4, capacity=4)
    a = a.free(loc)
    a, loc, ok = tail(a, 8, 2)  # every full slot, the four of before among them
    assert ok
    assert a.translate(loc[:6]).tolist() == [0] * 6
    assert (a.translate(loc[6:8]) > 0).all()
    before = int(a.swa_available_size())
    a = a.free_swa(loc[:6])
    assert int(a.swa_available_size()) == before <= a.size_swa


def test_pages_are_never_handed_to_two_owners_after_misuse():
    a, one, _ = extend(SWA.create(32, 32, 4), 0, 8, -1)
    a = a.free(one[:8]).free(one[:8]).free_swa(one[:8]).free_full(one[:8])
    a, two, _ = extend(a, 0, 16, -1)
    a, three, ok = extend(a, 0, 16, -1)
    assert ok
    assert not set(two.tolist()) & set(three.tolist())
    assert not set(a.translate(two).tolist()) & set(a.translate(three).tolist())


def test_clear_forgets_everything_but_faults():
    a, _, _ = extend(SWA.create(32, 16, 4), 0, 8, -1)
    a = a.free([2]).clear()
    assert same(a.mapping, SWA.create(32, 16, 4).mapping)
    assert sides(a) == sides(SWA.create(32, 16, 4))
    assert int(a.faults) == 1


def test_only_one_lane_may_have_a_tail():
    with pytest.raises(ValueError, match="one request"):
        SWA.create(32, 16, 4).alloc_extend_swa_tail([0, 0], [1, 1], [-1, -1], 1, capacity=4)


def test_translate_keeps_no_location_and_gives_0_outside():
    a, _, _ = extend(SWA.create(8, 8, 4), 0, 4, -1)
    assert a.translate(jnp.array([[-1, 0, 4], [12, 13, -2]])).tolist() == [[-1, 0, 4], [0, 0, 0]]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_pure_variant_is_one_allocator_for_both_sides(page_size):
    a = Pure.create(16, page_size)
    a, loc, ok = a.alloc_extend([0], [6], [-1], capacity=8)
    assert ok
    assert a.translate(loc).tolist() == loc.tolist()
    assert a.mapping[-1] == -1
    a, more, ok = a.alloc_decode([7], [int(loc[5])], [True])
    assert ok
    taken = 16 - int(a.available_size())
    assert taken == -(-7 // page_size) * page_size
    assert same(a.free_full(loc), a)
    a = a.free_swa(loc[:4])
    assert int(a.full_available_size()) == int(a.swa_available_size()) == 16 - taken + 4
    a = a.free(jnp.concatenate([loc[4:6], more]))
    assert int(a.available_size()) == 16
    assert int(a.free_swa(loc[:1]).faults) == 1


def test_it_runs_under_vmap():
    a = SWA.create(16, 16, 4, need_sort=True)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), a)
    seq = jnp.array([[5], [16]], jnp.int32)
    zero, none = jnp.zeros((2, 1), jnp.int32), jnp.full((2, 1), -1, jnp.int32)
    many, loc, ok = jax.vmap(lambda a, p, s, x: a.alloc_extend(p, s, x, capacity=16))(many, zero, seq, none)
    assert ok.all()
    many = jax.vmap(lambda a, x: a.free(x))(many, loc)
    assert many.available_size().tolist() == [16, 16]
    assert not many.mapping[:, :-1].any()
