"""The ledger: extend, decode and release across request table and allocator."""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    check_invariants,
    release_rows,
    set_committed,
)
from kvjax.invariants import report
from tests.inplace import assert_in_place


def create(page_size=4, size=48, rows=4, context=24, need_sort=False):
    allocator = (
        TokenToKVPoolAllocator.create(size, need_sort)
        if page_size == 1
        else PagedTokenToKVPoolAllocator.create(size, page_size, need_sort)
    )
    return Ledger.create(ReqToTokenPool.create(rows, context), allocator)


LANES, KNOWN = 6, 8  # one shape for all calls: one compilation per kind of ledger


def padded(values, fill=0):
    return [*values] + [fill] * (LANES - len(values))


def extend(ledger, rows, prefix, seq, capacity=64, prefix_loc=None, owned_from=None) -> tuple[Any, Any, Any]:
    """alloc_for_extend with padded lanes -> (ledger, rows, new slots or None where it was refused)."""
    more = {}
    if prefix_loc is not None:
        more["prefix_loc"] = np.zeros((LANES, KNOWN), np.int32)
        for lane, slots in enumerate(prefix_loc):
            more["prefix_loc"][lane, : len(slots)] = slots
    if owned_from is not None:
        more["owned_from"] = padded(owned_from)
    lanes = padded(rows), padded(prefix), padded(seq)
    ledger, given, loc, ok = alloc_for_extend(ledger, *lanes, capacity=capacity, **more)
    count = sum(seq) - sum(prefix) if ok else 0
    assert not loc[count:].any(), "padding is 0"
    assert not given[len(rows) if ok else 0 :].any()
    return ledger, given[: len(rows)].tolist(), loc[:count].tolist() if ok else None


def decode(ledger, rows, active=None) -> tuple[Any, Any]:
    """alloc_for_decode with padded lanes -> (ledger, (slots, positions) or None where it was refused)."""
    if active is not None:
        active = jnp.array(padded(active, True))
    ledger, loc, position, ok = alloc_for_decode(ledger, padded(rows), active)
    n = len(rows) if ok else 0
    assert not jnp.stack([loc, position])[:, n:].any()
    return ledger, (loc[:n].tolist(), position[:n].tolist()) if ok else None


def release(ledger, rows) -> Any:
    return release_rows(ledger, padded(rows))


def commit(ledger, rows, lengths) -> tuple[Any, bool]:
    ledger, ok = set_committed(ledger, padded(rows), padded(lengths))
    return ledger, bool(ok)


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def available(ledger):
    return int(ledger.allocator.available_size())


def lens(ledger, row):
    return ledger.lens[row].tolist()


# --- extend -----------------------------------------------------------------------------------------------------


def test_new_rows_get_pages_in_lane_order_and_their_table_is_written():
    ledger, rows, loc = extend(create(), [-1, 0, -1], [0, 0, 0], [6, 0, 3])
    assert rows == [3, 0, 4]
    assert loc == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert ledger.table.req_to_token[3, :7].tolist() == [4, 5, 6, 7, 8, 9, 0]
    assert ledger.table.req_to_token[4, :4].tolist() == [12, 13, 14, 0]
    assert not ledger.table.req_to_token[0].any()
    assert ledger.committed.tolist() == ledger.allocated.tolist() == [0, 0, 0, 6, 3]
    assert ledger.table.generation.tolist() == [0, 0, 0, 1, 1]
    assert report(ledger) == ""


def test_a_later_chunk_goes_on_where_the_row_ends():
    ledger, rows, _ = extend(create(), [-1, -1], [0, 0], [6, 3])
    ledger, same, loc = extend(ledger, rows, [6, 3], [11, 4])
    assert (same, loc) == (rows, [10, 11, 16, 17, 18, 15])
    assert ledger.table.req_to_token[rows[0], :11].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18]
    assert ledger.table.generation.tolist() == [0, 0, 0, 1, 1], "a held row is not handed out again"
    assert report(ledger) == ""


def test_b13_page_lists_of_a_batch_are_those_of_each_request_alone():
    ledger = create()
    ledger, (a, b), _ = extend(ledger, [-1, -1], [0, 0], [5, 2])
    alone, (c,), _ = extend(release(ledger, [a]), [-1], [0], [5])

    def pages(ledger, row, n):
        return (ledger.table.req_to_token[row, :n:4] // 4).tolist()

    assert pages(ledger, a, 5) == [1, 2]
    assert pages(ledger, b, 2) == [3]
    assert pages(alone, c, 5) == [1, 2]
    assert pages(alone, b, 2) == [3]


def test_b17_resuming_below_gives_back_whole_pages_behind_the_prefix():
    ledger, (row,), _ = extend(create(1), [-1], [0], [10])
    ledger, ok = commit(ledger, [row], [7])
    assert ok
    before = available(ledger)
    ledger, _, loc = extend(ledger, [row], [7], [10])
    assert available(ledger) == before
    assert len(loc) == 3
    assert report(ledger) == ""

    ledger, (row,), _ = extend(create(4), [-1], [0], [10])  # pages 1, 2, 3
    ledger, _ = commit(ledger, [row], [7])
    sixth = int(ledger.table.req_to_token[row, 6])
    ledger, _, loc = extend(ledger, [row], [7], [8])
    assert loc == [sixth + 1], "position 7 keeps its slot"
    assert ledger.allocator.to_lists()[0][0] == 3, "the page from position 8 on went back"
    assert lens(ledger, row) == [8, 8, 0]
    assert report(ledger) == ""


def test_what_a_row_gives_back_counts_for_the_same_call():
    ledger, (row,), _ = extend(create(4, size=12), [-1], [0], [12])
    assert available(ledger) == 0
    ledger, rows, loc = extend(ledger, [row, -1], [4, 0], [5, 3])
    assert (rows[0], loc) == (row, [8, 12, 13, 14])
    assert report(ledger) == ""


def test_a_shared_prefix_is_written_but_not_owned():
    ledger, _, loc = extend(create(), [-1], [0], [10])
    prefix = [loc[:8]]
    ledger, (second,), new = extend(ledger, [-1], [8], [10], prefix_loc=prefix)
    assert ledger.table.req_to_token[second, :10].tolist() == loc[:8] + new
    assert lens(ledger, second) == [10, 10, 8]
    assert report(ledger) == ""
    ledger = release(ledger, [second])
    assert available(ledger) == 48 - 12, "only the page behind the prefix goes back"
    assert report(ledger) == ""


def test_owned_from_says_where_the_own_pages_of_a_prefix_begin():
    ledger = create()
    allocator, loc, _ = ledger.allocator.alloc(8, capacity=8)
    ledger = Ledger(ledger.table, allocator, ledger.lens)
    tree = jnp.array([1], jnp.int32)
    ledger, (row,), new = extend(ledger, [-1], [6], [7], prefix_loc=[loc[:6]], owned_from=[4])
    assert new == [10], "the second page is the row's, so it is filled up"
    assert report(ledger, tree) == ""
    ledger = release(ledger, [row])
    assert ledger.allocator.to_lists()[0][0] == 2
    assert report(ledger, tree) == ""


@pytest.mark.parametrize(
    ("rows", "prefix", "seq", "kwargs"),
    [
        ([3], [0], [4], {}),  # the row is free
        ([5], [0], [4], {}),
        ([-2], [0], [4], {}),
        ([4, 4], [10, 10], [11, 11], {}),  # twice
        ([0], [0], [1], {}),  # a lane that is not in use
        ([4], [11], [12], {}),  # longer than the row
        ([4], [10], [25], {}),  # past the table
        ([4], [2], [1], {}),  # seq < prefix, with pages to give back
        ([4], [-1], [1], {}),
        ([4, 0], [2, -1], [3, -1], {}),
        ([4, -1], [2, 1], [3, 2], {}),  # a new row without prefix_loc
        ([4, -1], [2, 9], [3, 10], {"prefix_loc": [[0] * 8] * 2}),  # with a prefix_loc that is too short
        ([4, -1], [2, 2], [3, 3], {"prefix_loc": [[0, 0], [0, 1]], "owned_from": [0, 0]}),  # last_loc in page 0
        ([4, -1], [2, 2], [3, 3], {"prefix_loc": [[0, 0], [8, 9]], "owned_from": [0, 0]}),  # in a page that goes back
        ([4, -1], [2, 2], [3, 3], {"prefix_loc": [[0, 0], [4, 5]]}),  # in a page of somebody else
        ([4, -1], [2, 4], [3, 5], {"prefix_loc": [[0] * 4, [4, 5, 6, 7]], "owned_from": [0, 2]}),
        ([4, -1], [2, 4], [3, 5], {"prefix_loc": [[0] * 4, [4, 5, 6, 7]], "owned_from": [0, 8]}),
        ([4, -1], [2, 4], [3, 5], {"prefix_loc": [[0] * 4, [4, 5, 6, 7]], "owned_from": [0, -4]}),
        ([4, -1], [2, 0], [3, 24], {"capacity": 24}),  # more tokens than the capacity
        ([4, -1, -1], [2, 0, 0], [3, 24, 24], {}),  # memory short, even with what would go back
        ([4, -1, -1, -1, -1], [2, 0, 0, 0, 0], [3, 1, 1, 1, 1], {}),  # rows short
    ],
)
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_refused_extend_changes_no_bit(rows, prefix, seq, kwargs, need_sort):
    ledger, held, _ = extend(create(need_sort=need_sort), [-1], [0], [10])
    assert held == [4]
    after, _, loc = extend(ledger, rows, prefix, seq, **kwargs)
    assert loc is None
    assert equal(ledger, after)


def test_a_refused_extend_does_not_even_merge():
    ledger, rows, _ = extend(create(size=8, need_sort=True), [-1], [0], [8])
    ledger = release(ledger, rows)
    assert ledger.allocator.to_lists() == ([], [1, 2])
    after, _, loc = extend(ledger, [2], [0], [4])
    assert loc is None
    assert equal(ledger, after)


# --- decode -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_decode_gives_each_active_row_the_next_slot(page_size):
    ledger, (a, b), _ = extend(create(page_size), [-1, -1], [0, 0], [3, 4])
    for step in range(5):
        ledger, (loc, position) = decode(ledger, [a, 0, b])
        assert position == [3 + step, 0, 4 + step]
        assert loc[1] == 0
        for lane, row in ((0, a), (2, b)):
            assert ledger.table.req_to_token[row, position[lane]] == loc[lane]
        assert report(ledger) == ""
    assert lens(ledger, a) == [8, 8, 0]


def test_decode_skips_lanes_that_are_not_active():
    ledger, (a, b), _ = extend(create(), [-1, -1], [0, 0], [3, 4])
    ledger, out = decode(ledger, [a, b], [False, True])
    assert out == ([0, 12], [0, 4])
    assert (lens(ledger, a), lens(ledger, b)) == ([3, 3, 0], [5, 5, 0])


def test_decode_uses_a_slot_again_that_the_row_already_has():
    ledger, (row,), loc = extend(create(), [-1], [0], [10])
    ledger, _ = commit(ledger, [row], [6])
    before = available(ledger)
    ledger, out = decode(ledger, [row])
    assert out == ([loc[6]], [6])
    assert (lens(ledger, row), available(ledger)) == ([7, 10, 0], before)


def test_decode_never_writes_into_a_page_of_somebody_else():
    ledger, (owner,), loc = extend(create(), [-1], [0], [8])
    ledger, (reader,), _ = extend(ledger, [-1], [8], [8], prefix_loc=[loc])
    for committed in (0, 2, 4, 7):
        ledger, ok = commit(ledger, [reader], [committed])
        assert ok
        after, out = decode(ledger, [reader, owner])
        assert out is None
        assert equal(ledger, after)
    ledger, _ = commit(ledger, [reader], [8])
    assert decode(ledger, [reader])[1] == ([12], [8])


@pytest.mark.parametrize("rows", [[1], [5], [-1], [4, 4], [3]])
def test_a_refused_decode_changes_no_bit(rows):
    ledger, held, _ = extend(create(context=10), [-1, -1], [0, 0], [3, 10])
    assert held == [3, 4]
    rows = [4 if row == 3 else row for row in rows]  # 4 is full
    after, out = decode(ledger, [3, *rows])
    assert out is None
    assert equal(ledger, after)


def test_a_decode_that_runs_out_of_pages_takes_none():
    ledger, rows, _ = extend(create(size=12), [-1, -1], [0, 0], [4, 4])
    after, out = decode(ledger, rows)  # two pages wanted, one free
    assert out is None
    assert equal(ledger, after)
    assert decode(ledger, rows[:1])[1] == ([12], [4])


# --- release ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("finish", [True, False], ids=["finish", "retract"])
def test_b04_release_gives_everything_back_exactly_once(page_size, finish):
    start = create(page_size)
    ledger, (row,), _ = extend(start, [-1], [0], [3])
    for _ in range(3):
        ledger, _ = decode(ledger, [row])
    ledger, _ = commit(ledger, [row], [5 if finish else 0])
    assert ledger.allocated[row] == 6
    ledger = release(ledger, [row])
    assert (available(ledger), int(ledger.faults), int(ledger.table.available_size())) == (48, 0, 4)
    again = release(ledger, [row])
    assert (available(again), int(again.faults)) == (48, 1)
    assert again.allocator.to_lists() == ledger.allocator.to_lists()
    assert again.table.to_list() == ledger.table.to_list()
    assert report(again) == ""


def test_rows_released_together_go_back_as_one_group_in_lane_order():
    ledger, (a, b), _ = extend(create(), [-1, -1], [0, 0], [6, 3])  # pages 1, 2 | 3
    ledger = release(ledger, [b, 0, a])
    assert ledger.allocator.to_lists()[0][:3] == [3, 1, 2]
    assert ledger.table.to_list() == [1, 2, b, a]
    assert not ledger.lens.any()


def test_a_row_listed_twice_or_unknown_is_counted_and_harmless():
    ledger, (a, b), _ = extend(create(), [-1, -1], [0, 0], [6, 3])
    ledger = release(ledger, [a, a, 1, -1, 99, 0])
    assert (int(ledger.faults), available(ledger)) == (4, 48 - 4)
    assert lens(ledger, b) == [3, 3, 0]
    assert report(ledger) == ""


# --- committed lengths, clear, pools ----------------------------------------------------------------------------


def test_set_committed_is_refused_as_a_whole():
    ledger, (a, b), _ = extend(create(), [-1, -1], [0, 0], [6, 3])
    for rows, lengths in (([a, b], [5, 4]), ([a, b], [-1, 3]), ([a, a], [5, 5]), ([a, 1], [5, 0]), ([a, 9], [5, 0])):
        after, ok = commit(ledger, rows, lengths)
        assert not ok
        assert equal(ledger, after)
    ledger, ok = commit(ledger, [a, 0], [5, 77])
    assert ok
    assert ledger.committed.tolist() == [0, 0, 0, 5, 3]


def test_clear_frees_everything_and_keeps_generations_and_faults():
    ledger, rows, _ = extend(create(need_sort=True), [-1, -1], [0, 0], [6, 3])
    ledger = release(release(ledger, rows[:1]), rows[:1]).clear()
    assert (available(ledger), ledger.table.to_list(), int(ledger.faults)) == (48, [1, 2, 3, 4], 1)
    assert ledger.table.generation.tolist() == [0, 0, 0, 1, 1]
    assert report(ledger) == ""


@pytest.mark.parametrize(("size", "page_size"), [(44, 4), (48, 8), (52, 4)])
def test_b34_a_pool_of_another_size_than_the_allocator_is_refused(size, page_size):
    ledger = create()
    ledger.check_pool(SimpleNamespace(size=48, page_size=4))
    with pytest.raises(ValueError, match=rf"48 tokens in pages of 4, but .* holds {size} in pages of {page_size}"):
        ledger.check_pool(SimpleNamespace(size=size, page_size=page_size))


def test_wrong_arguments_raise_with_both_values():
    ledger = create()
    with pytest.raises(ValueError, match="rows has 1 lanes but prefix_lens has 2"):
        alloc_for_extend(ledger, [-1], [0, 0], [1], capacity=4)
    with pytest.raises(ValueError, match="rows has 1 lanes but owned_from has 2"):
        alloc_for_extend(ledger, [-1], [0], [1], capacity=4, owned_from=[0, 0])
    with pytest.raises(ValueError, match="rows has 1 lanes but prefix_loc has 2"):
        alloc_for_extend(ledger, [-1], [0], [1], capacity=4, prefix_loc=jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"prefix_loc must have rank 2, got shape \(3,\)"):
        alloc_for_extend(ledger, [-1], [0], [1], capacity=4, prefix_loc=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        alloc_for_extend(ledger, [-1], [0], [1], capacity=0)
    with pytest.raises(ValueError, match=r"active must have shape \(1,\).*got \(2,\)"):
        alloc_for_decode(ledger, [1], jnp.array([True, True]))
    with pytest.raises(ValueError, match="rows has 1 lanes but committed_lens has 2"):
        set_committed(ledger, [1], [1, 2])
    with pytest.raises(ValueError, match="rows must be int32, got float32"):
        release_rows(ledger, jnp.zeros(1))


# --- transformations --------------------------------------------------------------------------------------------


def cycle(ledger):
    """Two requests come and decode, one is cut back and goes on, the other leaves; sooner or later both do."""
    ledger, rows, _, _ = alloc_for_extend(
        ledger, jnp.array([-1, -1]), jnp.array([0, 0]), jnp.array([6, 3]), capacity=12
    )
    ledger, _, _, _ = alloc_for_decode(ledger, rows)
    kept = jnp.where(jnp.array([True, False]), rows, 0)
    ledger, _, _, _ = alloc_for_extend(ledger, kept, jnp.array([2, 0]), jnp.array([5, 0]), capacity=12)
    return release_rows(ledger, jnp.where(ledger.table.available_size() < 2, rows, rows - kept))


@pytest.mark.parametrize(("page_size", "need_sort"), [(1, False), (4, True)])
def test_jit_scan_while_and_vmap_agree_with_eager_calls(page_size, need_sort):
    start = eager = create(page_size, need_sort=need_sort)
    after = []
    for _ in range(4):
        eager = cycle(eager)
        assert report(eager) == ""
        after.append(eager)

    def twice(ledger):
        return lax.scan(lambda c, _: (cycle(c), None), ledger, None, length=2)[0]

    def loop(ledger, turns):
        return lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, twice(c[1])), (0, ledger))[1]

    looped = jax.jit(loop)(start, 2)
    stacked = jax.jit(jax.vmap(loop, in_axes=(None, 0)))(start, jnp.array([2, 1]))
    assert equal(looped, after[3])
    assert equal(jax.tree.map(lambda x: x[0], stacked), after[3])
    assert equal(jax.tree.map(lambda x: x[1], stacked), after[1])
    assert jax.tree.structure(looped) == jax.tree.structure(stacked) == jax.tree.structure(start)


@pytest.mark.compiled
@pytest.mark.parametrize("need_sort", [False, True])
def test_every_operation_updates_a_donated_ledger_in_place(need_sort):
    ledger = create(4, 2**20, rows=256, context=4096, need_sort=need_sort)  # 2**18 pages, a table of 4 MiB
    lists = sum(leaf.nbytes for leaf in jax.tree.leaves(ledger.allocator))
    merge = 3 * lists if need_sort else 0  # the sorted merge, when it happens, walks over the lists
    lanes, known = jnp.zeros(8, jnp.int32), jnp.zeros((8, 32), jnp.int32)
    pages = 8 * 1024 * 4 * 16  # release looks at every page that its rows may hold
    assert_in_place(
        lambda s, x, t: alloc_for_extend(s, x, x, x, capacity=64, prefix_loc=t, owned_from=x)[0],
        ledger, lanes, known, temp=pages + merge,
    )  # fmt: skip
    assert_in_place(lambda s, x: alloc_for_decode(s, x)[0], ledger, lanes, temp=8192 + merge)
    assert_in_place(lambda s, x: release_rows(s, x), ledger, lanes, temp=pages)
    assert_in_place(lambda s, x: set_committed(s, x, x)[0], ledger, lanes, temp=4096)


def test_a_held_lane_that_does_not_grow_keeps_its_row():
    ledger = Ledger.create(ReqToTokenPool.create(3, 32), PagedTokenToKVPoolAllocator.create(64, 4))
    ledger, rows, _, _ = alloc_for_extend(ledger, [-1], [0], [20], capacity=32)
    after, _, loc, ok = alloc_for_extend(ledger, rows, [0], [0], capacity=32)
    assert bool(ok)
    assert not loc.any()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ledger, after))


def test_tokens_that_were_taken_back_are_no_prefix():
    ledger = Ledger.create(ReqToTokenPool.create(3, 32), PagedTokenToKVPoolAllocator.create(64, 4))
    ledger, rows, _, _ = alloc_for_extend(ledger, [-1], [0], [20], capacity=32)
    ledger, _ = set_committed(ledger, rows, [10])
    assert not bool(alloc_for_extend(ledger, rows, [18], [24], capacity=32)[3])
    assert bool(alloc_for_extend(ledger, rows, [10], [24], capacity=32)[3])


def test_a_prefix_of_no_width_is_no_prefix():
    ledger = Ledger.create(ReqToTokenPool.create(3, 32), PagedTokenToKVPoolAllocator.create(64, 4))
    _, _, loc, ok = alloc_for_extend(ledger, [-1], [0], [4], capacity=4, prefix_loc=np.zeros((1, 0), np.int32))
    assert bool(ok)
    assert loc.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_must_lie_in_the_pools_slots_in_order(page_size):
    ledger = create(page_size=page_size)
    held = 4 // page_size  # pages 1 .. held are row 1's
    ledger, _, loc = extend(ledger, [-1], [0], [4])
    assert list(loc) == list(range(page_size, page_size + 4))
    wrong = {
        "padding": [0] * 4,
        "outside": [10**6 + i for i in range(4)],
        "negative": [-1] * 4,
    }
    if page_size == 4:
        wrong["out of order"] = [4, 6, 5, 7]
        wrong["half a page"] = [6, 7, 4, 5]
    for name, slots in wrong.items():
        before = jax.tree.map(np.asarray, ledger)
        after, rows, new, ok = alloc_for_extend(
            ledger, np.int32([-1]), np.int32([4]), np.int32([5]), capacity=8, prefix_loc=np.int32([slots])
        )
        assert not ok, name
        assert not np.asarray(rows).any(), name
        assert not np.asarray(new).any(), name
        jax.tree.map(np.testing.assert_array_equal, after, before)
    ledger, _, new = extend(ledger, [-1], [4], [5], prefix_loc=[loc])
    assert list(new) == [(held + 1) * page_size]


def test_a_prefix_may_not_begin_with_a_page_that_the_same_call_gives_back():
    ledger = create()
    ledger, (row,), loc = extend(ledger, [-1], [0], [12])
    rows, lens = np.int32([row, -1]), np.int32([2, 4])
    slots = np.zeros((2, 4), np.int32)
    slots[1] = loc[4:8]  # row's second page, which goes back when the row resumes at 2
    _, _, _, ok = alloc_for_extend(ledger, rows, lens, lens + 1, capacity=8, prefix_loc=slots)
    assert not ok
    slots[1] = loc[:4]  # its first one stays
    _, _, _, ok = alloc_for_extend(ledger, rows, lens, lens + 1, capacity=8, prefix_loc=slots)
    assert ok


def test_operations_of_a_ledger_refuse_what_is_none():
    ledger, row = create(), np.int32([1])
    calls: dict[str, Any] = {
        "alloc_for_extend": lambda x: alloc_for_extend(x, row, row, row, capacity=4),
        "alloc_for_decode": lambda x: alloc_for_decode(x, row),
        "release_rows": lambda x: release_rows(x, row),
        "set_committed": lambda x: set_committed(x, row, row),
        "check_invariants": check_invariants,
        "report": report,
    }
    for name, call in calls.items():
        for other in (ledger.allocator, ledger.table, None):
            with pytest.raises(ValueError, match=f"{name} works on a kvjax.Ledger, got {type(other).__name__}; pass"):
                call(other)


@pytest.mark.parametrize("capacity", [[8], np.arange(3), np.array(8)])
def test_a_capacity_is_known_when_the_program_is_compiled(capacity):
    with pytest.raises(ValueError, match="capacity is part of what is compiled, so it must be a plain Python value"):
        alloc_for_extend(create(), [-1], [0], [4], capacity=capacity)


def test_no_lanes_are_no_work():
    ledger, none = create(), np.zeros(0, np.int32)
    after, rows, loc, ok = alloc_for_extend(ledger, none, none, none, capacity=4)
    assert (bool(ok), rows.shape, loc.tolist()) == (True, (0,), [0] * 4)
    after, loc, positions, ok = alloc_for_decode(after, none)
    assert (bool(ok), loc.shape, positions.shape) == (True, (0,), (0,))
    jax.tree.map(np.testing.assert_array_equal, after, ledger)


def test_a_name_that_is_none_is_refused_whatever_the_call():
    ledger, none, row = create(), np.zeros(0, np.int32), np.int32([-1])
    slots = np.int32([[4, 5, 6, 7]])
    for call in (
        lambda **how: release_rows(ledger, none, **how),
        lambda **how: alloc_for_decode(ledger, none, **how),
        lambda **how: alloc_for_extend(ledger, none, none, none, capacity=4, **how),
        lambda **how: alloc_for_extend(ledger, row, row + 5, row + 6, capacity=4, prefix_loc=slots, **how),
    ):
        with pytest.raises(ValueError, match="implementation='nonsense' is not one of xla, triton"):
            call(implementation="nonsense")
