"""PagedTokenToKVPoolAllocator: pages and slots in SGLang's order, all or nothing."""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import PagedTokenToKVPoolAllocator, segment_pages
from kvjax.layout import INT32_MAX
from pallas_kernels.alloc_extend import alloc_extend
from tests.inplace import assert_in_place

from_lists = PagedTokenToKVPoolAllocator.from_lists


def create(size=32, page_size=4, need_sort=False):
    return PagedTokenToKVPoolAllocator.create(size, page_size, need_sort)


def full(size=32, page_size=4, need_sort=False):
    """Every page handed out."""
    allocator, _, ok = create(size, page_size, need_sort).alloc(size, capacity=size)
    assert ok
    return allocator


def extend(allocator, prefix, seq, last, capacity=16, **kwargs):
    allocator, loc, ok = allocator.alloc_extend(prefix, seq, last, capacity=capacity, **kwargs)
    count = sum(seq) - sum(prefix) if ok else 0
    assert not loc[count:].any(), "padding is 0"
    return allocator, loc[:count].tolist() if ok else None


def decode(allocator, seq, last, active=None):
    active = jnp.ones(len(seq), bool) if active is None else jnp.array(active)
    allocator, loc, ok = allocator.alloc_decode(seq, last, active)
    assert ok or not loc.any()
    return allocator, loc.tolist() if ok else None


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


# --- SGLang's worked numbers -------------------------------------------------------------------------------------


def test_a_tail_shorter_than_a_page_is_unusable():
    a = create(22)
    assert (a.num_pages, int(a.available_size()), a.num_slots) == (5, 20, 26)
    assert a.to_lists() == ([1, 2, 3, 4, 5], [])


def test_extend_fills_the_last_page_then_takes_free_pages_in_lane_order():
    a, loc = extend(create(), [0, 0], [6, 3], [-1, -1])
    assert loc == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    a, loc = extend(a, [6, 3], [11, 4], [9, 14])
    assert loc == [10, 11, 16, 17, 18, 15]
    a, loc = decode(a, [12, 5], [18, 15])
    assert loc == [19, 20]
    assert extend(a, [12, 5], [12, 5], [19, 20])[1] == []


def test_the_exact_count_decides_and_not_the_bound():
    _, loc = extend(create(16), [0], [16], [-1], capacity=20)
    assert loc == list(range(4, 20))
    before = create(16)
    after, loc = extend(before, [0], [17], [-1], capacity=20)
    assert loc is None
    assert equal(before, after)


def test_decode_with_an_empty_pool_goes_on_inside_a_page():
    a = full(16)
    assert decode(a, [15], [17])[1] == [18]
    b, loc = decode(a, [17], [19])
    assert loc is None
    assert equal(a, b)


def test_decode_gives_padding_lanes_slot_0():
    a = from_lists([40, 41, 42], size=256, page_size=4)
    # SGLang names 164 in the third lane (page 41): seq 9 opens a page like seq 5.
    a, loc = decode(a, [5, 0, 9], [15, -1, 30])
    assert loc == [160, 0, 164]
    assert a.to_lists()[0] == [42]


def test_releases_go_to_the_front_as_one_ascending_block():
    a = full().free([20, 4])
    assert a.to_lists() == ([1, 5], [])
    a = a.free([28])
    assert a.to_lists() == ([7, 1, 5], [])
    a = a.free_group([12, 8, 9], pages=[4, 2])  # SGLang, without a check: [4, 2, 2, 3, 7, 1, 5]
    assert (a.to_lists(), int(a.faults)) == (([4, 2, 3, 7, 1, 5], []), 1)


def test_need_sort_merges_by_the_bound_as_in_sglang():
    a = full(need_sort=True).free([20, 4]).free([28])
    a = a.free_segment([12, 13, 14, 15, 8, 9, 10, 11], 4)
    assert (a.to_lists(), int(a.available_size())) == (([], [1, 5, 7, 3, 2]), 20)
    a, loc, ok = a.alloc(4, capacity=4)
    assert (bool(ok), loc.tolist(), a.to_lists()) == (True, [4, 5, 6, 7], ([2, 3, 5, 7], []))
    a = a.free([4])
    assert a.to_lists() == ([2, 3, 5, 7], [1])
    a, loc = extend(a, [0], [5], [-1])  # bound 3 <= 4: no merge
    assert (loc, a.to_lists()) == ([8, 9, 10, 11, 12], ([5, 7], [1]))
    a, loc = extend(a, [0], [2], [-1])  # bound 2 <= 2
    assert (loc, a.to_lists()) == ([20, 21], ([7], [1]))
    a, loc = extend(a, [0], [2], [-1])  # bound 2 > 1
    assert (loc, a.to_lists()) == ([4, 5], ([7], []))


def test_num_lanes_moves_the_bound_and_never_below_the_lanes_in_use():
    start = from_lists([5, 6, 7], [2], size=32, page_size=4, need_sort=True)
    assert extend(start, [0, 0], [1, 0], [-1, -1])[1] == [20]
    assert extend(start, [0, 0], [1, 0], [-1, -1], num_lanes=3)[1] == [8]
    for lanes in (0, -5, -(2**31)):
        assert extend(start, [0, 0], [1, 0], [-1, -1], num_lanes=lanes)[1] == [20]
    assert extend(start, [0, 0], [1, 0], [-1, -1], num_lanes=INT32_MAX)[1] == [8]
    short = from_lists([], [2, 1], size=32, page_size=4, need_sort=True)
    assert extend(short, [0, 0], [1, 1], [-1, -1], num_lanes=-9)[1] == [4, 8]


def test_alloc_refuses_what_is_no_whole_number_of_pages():
    a = create()
    for need in (6, -4, 36, INT32_MAX, -(2**31)):
        b, loc, ok = a.alloc(need, capacity=32)
        assert not ok
        assert not loc.any()
        assert equal(a, b)
    a, loc, ok = a.alloc(0, capacity=5)
    assert (bool(ok), loc.tolist()) == (True, [0] * 5)


# --- the known faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_sort", [False, True])
def test_b01_a_double_free_never_gives_a_page_to_two_owners(need_sort):
    a, loc, _ = create(8, need_sort=need_sort).alloc(4, capacity=4)
    assert loc.tolist() == [4, 5, 6, 7]
    a = a.free(loc).free(loc)
    assert (int(a.faults), int(a.available_size())) == (1, 8)
    a, first, _ = a.alloc(4, capacity=4)
    a, second, _ = a.alloc(4, capacity=4)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(4, 12))
    assert not a.alloc(4, capacity=4)[2]


def test_b07_capacity_is_checked_before_anything_is_taken():
    a = from_lists([1, 2], size=8, page_size=4)
    b, loc, ok = a.alloc_extend([0, 0], [5, 5], [-1, -1], capacity=16)
    assert (bool(ok), loc.tolist()) == (False, [0] * 16)
    assert equal(a, b)
    a = from_lists([2], [1], size=8, page_size=4, need_sort=True)
    a, loc = extend(a, [0], [8], [-1])
    assert (loc, a.to_lists()) == (list(range(4, 12)), ([], []))


@pytest.mark.parametrize(
    ("prefix", "seq", "last", "free", "expected"),
    [
        (6, 7, 9, [5], [10]),
        (6, 8, 9, [5], [10, 11]),
        (6, 9, 9, [5], [10, 11, 20]),
        (8, 8, 15, [5], []),
        (0, 3, -1, [1], [4, 5, 6]),
    ],
)
def test_b11_extensions_inside_one_page(prefix, seq, last, free, expected):
    assert extend(from_lists(free, size=60, page_size=4), [prefix], [seq], [last])[1] == expected


def test_b11_a_batch_of_all_kinds():
    a = from_lists([1, 2, 3, 4, 5], size=60, page_size=4)
    b, loc = extend(a, [0, 5, 8], [3, 9, 9], [-1, 36, 47])
    assert loc == [4, 5, 6, 37, 38, 39, 8, 12]
    assert b.to_lists()[0] == [4, 5]
    # A fifth token cannot lie in slot 37, at offset 1. The bare operation counts on from there; the allocator refuses.
    assert extend(a, [0, 5, 8], [3, 9, 9], [-1, 37, 47])[1] is None
    lens = [jnp.array(x, jnp.int32) for x in ([0, 5, 8], [3, 9, 9], [-1, 37, 47])]
    loc, taken, ok = alloc_extend(a.stack, a.free_pages, *lens, page_size=4, capacity=8)
    assert (loc.tolist(), int(taken), bool(ok)) == ([4, 5, 6, 38, 39, 40, 8, 12], 3, True)


@pytest.mark.parametrize("how", ["free", "free_segment", "free_group", "free_page_ids"])
@pytest.mark.parametrize("need_sort", [False, True])
def test_garbage_is_ignored_and_counted_once_per_distinct_page_and_call(how, need_sort):
    a = full(need_sort=need_sort).free_page_ids([8])
    free = [8]
    if how == "free_page_ids":
        out, faults = a.free_page_ids([-1, -1, 9, INT32_MAX, 0, 8, 8, 3, 3]), 5  # the second 3 too
    elif how == "free_segment":
        slots = [-1, 1, 2, 36, INT32_MAX, 0, 32, 12]
        out, faults = a.free_segment(np.repeat(slots, 4)), 5
    else:
        slots = [-1, -4, 1, 3, 36, INT32_MAX, -(2**31), 0, 32, 33, 12, 14]
        out, faults = (a.free(slots) if how == "free" else a.free_group(slots)), 6
    lists = out.to_lists()
    assert (lists[1] if need_sort else lists[0]) == ([*free, 3] if need_sort else [3, *free])
    assert int(out.faults) == faults
    assert int(out.clear().faults) == faults


def test_padding_is_not_counted():
    a = full()
    out = a.free_group([0, 0], (([0] * 8, 0),), [0])
    assert int(out.free([0]).free_segment([0] * 4).free_page_ids([0]).faults) == 0
    assert equal(out, a)
    assert a.free_group().to_lists() == ([], [])


def test_a_group_is_one_call_when_faults_are_counted():
    a = full().free_page_ids([8, 3])
    # page 8 among the tokens, the segment and the ids; page 0 by slots 1 and 2; page 3 twice among the ids
    out = a.free_group([32, 1, -1], (([33, 34, 35, 32, 2, 2, 2, 2], 0),), [8, 3, 3, -1, 4])
    assert int(out.faults) == 4  # pages 8, 0, -1, 3
    assert out.to_lists()[0] == [4, 8, 3]


def test_a_page_that_a_group_lists_twice_is_released_by_the_first():
    out = full().free_group([12], pages=[3, 2])
    assert (out.to_lists()[0], int(out.faults)) == ([2, 3], 1)


@pytest.mark.parametrize("width", [8, 64, 65, 72, 200])
def test_token_sets_of_any_width_release_each_page_once_ascending(width):
    rng = np.random.default_rng(width)
    for whole in (True, False):
        a = full(512)
        pages = rng.choice(np.arange(1, 129), width // 4, replace=False)
        slots = (pages[:, None] * 4 + np.arange(4)).reshape(-1)
        if not whole:
            slots = rng.permutation(slots)[: width - 3]
        out = a.free(np.pad(slots, (0, width - len(slots))))
        assert out.to_lists()[0] == sorted({int(s) // 4 for s in slots})
        assert int(out.faults) == 0


def test_segment_pages_in_row_order_with_the_partly_filled_last_one():
    assert segment_pages(jnp.array([12, 13, 14, 15, 8, 9]), 4, 4).tolist() == [3, 2]
    a = full().free_segment([12, 13, 14, 15, 8, 9], 8)
    assert a.to_lists()[0] == [3, 2]
    with pytest.raises(ValueError, match="page boundary, got start_pos 6 with pages of 4; start it at 4"):
        a.free_segment([12], 6)


def test_start_pos_is_no_part_of_the_compile_key(caplog):
    a, loc = full(), jnp.zeros(44, jnp.int32)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        a.free_segment(loc, 0)
        assert any("_free_group" in record.getMessage() for record in caplog.records)
        caplog.clear()
        for start in range(4, 400, 4):
            a.free_segment(loc, start)
    assert not any("_free_group" in record.getMessage() for record in caplog.records)


# --- wrong use that the state can show ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "seq", "last"),
    [
        (3, 2, 6),  # seq < prefix
        (-1, 2, 6),
        (0, 17, -1),  # more than the capacity
        (0, INT32_MAX, -1),
        (3, 5, 5),  # last_loc at the wrong offset
        (3, 5, -1),
        (3, 5, 2),  # page 0
        (3, 5, 10),  # a free page
        (3, 5, 130),  # a page that does not exist
        (3, 5, -2),
    ],
)
@pytest.mark.parametrize("need_sort", [False, True])
def test_wrong_use_of_extend_is_refused_and_changes_no_bit(prefix, seq, last, need_sort):
    a, loc = extend(create(need_sort=need_sort), [0], [3], [-1])
    assert loc == [4, 5, 6]
    b, loc = extend(a, [prefix], [seq], [last])
    assert loc is None
    assert equal(a, b)
    assert extend(a, [3], [5], [6])[1] == [7, 8]


@pytest.mark.parametrize(("seq", "last"), [(-1, -1), (4, 5), (4, -1), (4, 2), (4, 10), (4, 130), (4, INT32_MAX)])
def test_wrong_use_of_decode_is_refused_on_active_lanes_only(seq, last):
    a, _ = extend(create(), [0], [3], [-1])
    b, loc = decode(a, [seq, 4], [last, 6])
    assert loc is None
    assert equal(a, b)
    assert decode(a, [seq, 4], [last, 6], [False, True])[1] == [0, 7]


def test_a_refused_call_does_not_merge_unless_memory_is_short():
    a = from_lists([], [2, 1], size=32, page_size=4, need_sort=True)
    for prefix, seq in (([3], [2]), ([0], [99])):
        assert equal(a, a.alloc_extend(prefix, seq, [-1], capacity=16)[0])
    assert equal(a, a.alloc(6, capacity=16)[0])
    assert equal(a, a.alloc_decode([-1], [-1], jnp.array([True]))[0])
    for out in (a.alloc(12, capacity=16)[0], a.alloc_extend([0], [12], [-1], capacity=16)[0]):
        assert out.to_lists() == ([1, 2], [])


# --- host-side errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "page_size", "shown"),
    [
        (0, 4, "size must be at least 1, got 0"),
        (8, 0, "page_size must be at least 1, got 0"),
        (3, 4, "3 tokens.*of 4"),
        (8.5, 4, "8.5"),
        (INT32_MAX, 4, str(INT32_MAX + 4)),
        (8, -4, "-4"),
    ],
)
def test_create_refuses_sizes_that_make_no_pool(size, page_size, shown):
    with pytest.raises(ValueError, match=shown):
        create(size, page_size)


def test_wrong_arguments_raise_with_both_values():
    a = create()
    with pytest.raises(ValueError, match="loc must be int32, got float32"):
        a.free(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"pages must have rank 1, got shape \(1, 1\)"):
        a.free_page_ids([[1]])
    with pytest.raises(ValueError, match="capacity must be at least 1, got -2"):
        a.alloc(4, capacity=-2)
    with pytest.raises(ValueError, match="prefix_lens has 1 lanes but seq_lens has 2"):
        a.alloc_extend([0], [1, 2], [-1], capacity=4)
    with pytest.raises(ValueError, match="seq_lens has 1 lanes but last_loc has 2"):
        a.alloc_decode([1], [-1, -1], jnp.array([True]))
    with pytest.raises(ValueError, match="active must be bool, got int32"):
        a.alloc_decode([1], [-1], jnp.array([1]))
    with pytest.raises(ValueError, match="9 free and 0 staged pages do not fit an allocator of 8 pages"):
        from_lists(range(9), size=32, page_size=4)
    with pytest.raises(ValueError, match=r"1 free and 1 staged pages.*need_sort=True"):
        from_lists([1], [2], size=32, page_size=4)


# --- transformations ------------------------------------------------------------------------------------------------


def cycle(a):
    a, loc, _ = a.alloc_extend(jnp.array([0, 0]), jnp.array([6, 3]), jnp.array([-1, -1]), capacity=12)
    a, more, _ = a.alloc_decode(jnp.array([7, 4]), loc[jnp.array([5, 8])], jnp.array([True, True]))
    a, whole, _ = a.alloc(8, capacity=8)
    return a.free(loc[:6][::-1]).free_group(whole[:4], ((whole[4:], 0),), more // 4)


@pytest.mark.parametrize("need_sort", [False, True])
def test_jit_scan_while_and_vmap_agree_with_eager_calls(need_sort):
    start = eager = create(32, need_sort=need_sort)
    after = []
    for _ in range(4):
        eager = cycle(eager)
        after.append(eager)

    def twice(allocator):
        return lax.scan(lambda c, _: (cycle(c), None), allocator, None, length=2)[0]

    def loop(allocator, turns):
        return lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, twice(c[1])), (0, allocator))[1]

    looped = jax.jit(loop)(start, 2)
    stacked = jax.jit(jax.vmap(loop, in_axes=(None, 0)))(start, jnp.array([2, 1]))
    assert equal(looped, after[3])
    assert equal(jax.tree.map(lambda x: x[0], stacked), after[3])
    assert equal(jax.tree.map(lambda x: x[1], stacked), after[1])
    assert jax.tree.structure(looped) == jax.tree.structure(stacked) == jax.tree.structure(start)
    assert eager.to_lists() != start.to_lists()


def test_vmap_merges_only_the_lanes_that_are_short():
    plenty = from_lists([5, 6, 7], [2], size=32, page_size=4, need_sort=True)
    short = from_lists([7], [6, 2], size=32, page_size=4, need_sort=True)
    both = jax.tree.map(lambda *x: jnp.stack(x), plenty, short)
    out, loc, ok = jax.vmap(lambda a: a.alloc(8, capacity=8))(both)
    assert ok.all()
    assert loc[:, ::4].tolist() == [[20, 24], [8, 24]]
    assert jax.tree.map(lambda x: x[0], out).to_lists() == ([7], [2])
    assert jax.tree.map(lambda x: x[1], out).to_lists() == ([7], [])


@pytest.mark.compiled
@pytest.mark.parametrize("need_sort", [False, True])
def test_every_operation_updates_a_donated_allocator_in_place(need_sort):
    a, n = create(2**20, 4, need_sort), jnp.zeros((), jnp.int32)  # 2**18 pages
    lanes, slots = jnp.zeros(8, jnp.int32), jnp.zeros(128, jnp.int32)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(a))
    taking = 3 * state if need_sort else 4096  # the sorted merge, when it happens, walks over the lists
    assert_in_place(lambda a, n: a.alloc(n, capacity=64)[0], a, n, temp=taking)
    assert_in_place(lambda a, x: a.alloc_extend(x, x, x, capacity=64)[0], a, lanes, temp=taking)
    assert_in_place(lambda a, x: a.alloc_decode(x, x, x > 0)[0], a, lanes, temp=taking)
    assert_in_place(lambda a: a.merge_and_sort_free(), a, temp=taking)
    assert_in_place(lambda a, x: a.free(x), a, slots, temp=16_384)
    assert_in_place(lambda a, x: a.free_segment(x), a, slots, temp=16_384)
    assert_in_place(lambda a, x: a.free_page_ids(x), a, slots, temp=16_384)
    assert_in_place(lambda a, x: a.free_group(x, ((x, 0),), x), a, slots, temp=32_768)


def test_a_lane_near_the_end_of_int32_moves_no_other_lanes_slots():
    largest = 2**31 - 1
    for page_size in (3, 7):
        allocator = PagedTokenToKVPoolAllocator.create(60, page_size)
        _, loc, ok = allocator.alloc_extend([largest, 0], [largest, 5], [-1, -1], capacity=8)
        assert bool(ok)
        assert loc.tolist() == [*range(page_size, page_size + 5), 0, 0, 0]


def test_refused_extends_name_no_slot():
    largest = 2**31 - 1
    allocator = PagedTokenToKVPoolAllocator.create(64, 16)
    for prefix, seq in ((largest, largest - 1), (largest - 1, largest), (9, largest)):
        _, loc, ok = allocator.alloc_extend([prefix], [seq], [0], capacity=8)
        assert not bool(ok)
        assert not loc.any()
