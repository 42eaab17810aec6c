"""check_invariants: one flag per broken rule, and the pages or rows concerned."""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    check_invariants,
)
from kvjax.invariants import MEANING, OF_SLOTS, assert_sound, report

SLOT_RULES = {*OF_SLOTS, "broken_slots"}


def ledger_of(page_size=4, need_sort=False):
    """Row 3 holds page 1, row 4 pages 2 and 3 (page size 4); one token decoded by each."""
    allocator = (
        TokenToKVPoolAllocator.create(32, need_sort)
        if page_size == 1
        else PagedTokenToKVPoolAllocator.create(32, page_size, need_sort)
    )
    ledger = Ledger.create(ReqToTokenPool.create(4, 14), allocator)
    ledger, rows, _, _ = alloc_for_extend(ledger, [-1, -1], [0, 0], [2, 6], capacity=16)
    ledger, _, _, ok = alloc_for_decode(ledger, rows)
    assert ok
    return ledger


def broken(ledger, tree_pages=None):
    """Names of the flags, eager and under jit."""
    eager = check_invariants(ledger, tree_pages)
    jitted = jax.jit(check_invariants)(ledger, tree_pages)
    names = [f.name for f in dataclasses.fields(eager) if getattr(eager, f.name)]
    assert names == [f.name for f in dataclasses.fields(jitted) if getattr(jitted, f.name)]
    assert bool(eager.any()) == bool(names)
    assert [line.split(":")[0] for line in report(ledger, tree_pages).splitlines()] == names
    return names


def with_free(ledger, free, staged=(), need_sort=False):
    return dataclasses.replace(
        ledger,
        allocator=PagedTokenToKVPoolAllocator.from_lists(free, staged, size=32, page_size=4, need_sort=need_sort),
    )


def with_window_side(change):
    """A sound ledger over two sides, with a changed allocator."""
    ledger = Ledger.create(ReqToTokenPool.create(4, 14), SWATokenToKVPoolAllocator.create(32, 16, 4), 8)
    ledger, _, _, ok = alloc_for_extend(ledger, [-1, -1], [0, 0], [3, 7], capacity=16)
    assert ok
    return dataclasses.replace(ledger, allocator=change(ledger.allocator))


def with_table(ledger, row, position, slot):
    return dataclasses.replace(ledger, table=ledger.table.write([row], [[position]], [[slot]]))


def with_lens(ledger, row, lens):
    return dataclasses.replace(ledger, lens=ledger.lens.at[row].set(jnp.array(lens)))


@pytest.mark.parametrize(("page_size", "need_sort"), [(1, False), (1, True), (3, False), (4, True)])
def test_a_sound_ledger_raises_no_flag(page_size, need_sort):
    ledger = ledger_of(page_size, need_sort)
    assert broken(ledger) == []
    assert broken(ledger.clear()) == []


def test_b05_a_page_that_is_free_and_held_is_seen_although_the_sums_balance():
    # Row 4 holds page 2, which is listed in the place of page 8: as many pages free and held as there are.
    ledger = with_free(ledger_of(), [2, 4, 5, 6, 7])
    assert int(ledger.allocator.free_pages) + 3 == 8
    assert broken(ledger) == ["free_and_live", "lost"]
    assert "free_and_live: on the free list and in a live row; pages 2" in report(ledger)


def test_b05_three_states_of_one_fault_each_raise_three_distinct_flags():
    sound = ledger_of()
    states = {
        "free_and_live": with_free(sound, [2, 4, 5, 6, 7, 8]),
        "listed_twice": with_free(sound, [4, 5, 6, 7, 8, 5]),
        "committed_gt_allocated": with_lens(sound, 4, [8, 7, 0]),
    }
    assert {name: broken(ledger) for name, ledger in states.items()} == {name: [name] for name in states}
    assert broken(sound) == []


def test_every_rule_has_a_state_that_breaks_it():
    sound = ledger_of()
    rows = ReqToTokenPool.from_list
    keep = {"req_to_token": sound.table.req_to_token}
    states = {
        "free_and_live": with_free(sound, [4, 5, 6, 7, 8, 3]),
        "listed_twice": with_free(sound, [4, 5, 6, 7, 8, 4]),
        "listed_outside": with_free(sound, [4, 5, 6, 7, 8, 0]),
        "owned_twice": (sound, jnp.array([3], jnp.int32)),
        "lost": with_free(sound, [4, 5, 6, 7]),
        "borrowed_from_nobody": with_lens(sound, 4, [7, 7, 4]),
        "broken_entry": with_table(sound, 4, 5, 11),
        "committed_gt_allocated": with_lens(sound, 4, [-1, 7, 0]),
        "row_listed_twice": dataclasses.replace(
            sound, table=dataclasses.replace(rows([1, 2, 1], size=4, max_context_len=14), **keep)
        ),
        "free_row_has_tokens": with_lens(sound, 1, [1, 0, 0]),
        "unpaired_token": with_window_side(lambda a: a.free_swa([4])),
        "broken_pair": with_window_side(
            lambda a: dataclasses.replace(a, pairs=dataclasses.replace(a.pairs, users=a.pairs.users.at[2].add(1)))
        ),
    }
    assert broken(with_window_side(lambda a: a)) == []
    assert set(states) == set(MEANING) - SLOT_RULES  # tests/recurrent/test_invariants.py
    for name, state in states.items():
        also = ["lost"] if name == "borrowed_from_nobody" else []  # nobody's page is lost as well
        assert broken(*(state if isinstance(state, tuple) else (state,))) == [*also, name]


def test_a_page_in_two_rows_is_owned_twice():
    ledger = ledger_of()
    for k in range(3):
        ledger = with_table(ledger, 3, k, 8 + k)
    ledger = with_free(ledger, [1, 4, 5, 6, 7, 8])
    assert broken(ledger) == ["owned_twice"]
    assert report(ledger).endswith("pages 2")


@pytest.mark.parametrize("lens", [[7, 15, 0], [7, 7, 2], [7, 7, -4], [7, 7, 12]])
def test_lengths_outside_the_row_are_reported(lens):
    assert "committed_gt_allocated" in broken(with_lens(ledger_of(), 4, lens))


@pytest.mark.parametrize("slot", [-4, 36, 2**31 - 4, 0, 2])
def test_slots_of_no_page_in_a_live_row_are_reported(slot):
    assert "broken_entry" in broken(with_table(ledger_of(), 4, 4, slot))


def test_the_same_holds_for_staged_pages():
    sound = ledger_of(need_sort=True)
    assert broken(with_free(sound, [4, 5, 6], [8, 7], True)) == []
    assert broken(with_free(sound, [4, 5, 6, 7], [8, 7], True)) == ["listed_twice"]
    assert broken(with_free(sound, [4, 5, 6], [8, 7, 1], True)) == ["free_and_live"]


def test_pages_of_the_tree_are_neither_lost_nor_borrowed_from_nobody():
    ledger = with_free(ledger_of(), [4, 5, 6, 7])
    assert broken(ledger) == ["lost"]
    assert broken(ledger, jnp.array([8, 0, 0], jnp.int32)) == []
    ledger = with_lens(ledger_of(), 4, [7, 7, 4])  # page 2 belongs to the tree now
    assert broken(ledger) == ["lost", "borrowed_from_nobody"]
    assert broken(ledger, jnp.array([2], jnp.int32)) == []
    assert broken(ledger, jnp.array([2, 5], jnp.int32)) == ["free_and_live"]


def test_the_report_names_rows_and_cuts_long_lists():
    assert report(with_lens(ledger_of(), 4, [8, 7, 0])).endswith("rows 4")
    big = Ledger.create(ReqToTokenPool.create(1, 4), PagedTokenToKVPoolAllocator.from_lists([], size=80, page_size=4))
    assert report(big).endswith("14, 15, 16, ... (20 in all)")


def test_assert_sound_raises_eagerly_and_through_checkify():
    assert_sound(ledger_of())
    bad = with_free(ledger_of(), [4, 5, 6, 7, 8, 4])
    with pytest.raises(checkify.JaxRuntimeError, match="listed_twice"):
        assert_sound(bad)
    error, _ = jax.jit(checkify.checkify(assert_sound))(bad)
    assert "listed_twice" in (error.get() or "")
    error, _ = jax.jit(checkify.checkify(assert_sound))(ledger_of())
    assert error.get() is None


def test_flags_come_one_per_ledger_under_vmap():
    stacked = jax.tree.map(lambda *x: jnp.stack(x), ledger_of(), with_free(ledger_of(), [4, 5, 6, 7]))
    flags = jax.vmap(check_invariants)(stacked)
    assert flags.lost.tolist() == [False, True]
    assert np.asarray(flags.any()).tolist() == [False, True]


def test_host_readers_refuse_a_batch_of_ledgers_in_a_sentence():
    one = ledger_of()
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), one)
    for read in (report, lambda x: x.allocator.to_lists(), lambda x: x.allocator.capacity()):
        with pytest.raises(ValueError, match=r"reads one state, this is a batch of shape \(2,\); pick one"):
            read(batch)
        read(jax.tree.map(lambda leaf: leaf[1], batch))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_that_one_row_holds_twice_breaks_its_entries(page_size):
    """A prefix is taken on trust: here its page was free, and the same call hands it out."""
    allocator = (
        TokenToKVPoolAllocator.create(32) if page_size == 1 else PagedTokenToKVPoolAllocator.create(32, page_size)
    )
    ledger = Ledger.create(ReqToTokenPool.create(4, 14), allocator)
    free = [[page_size + k for k in range(page_size)]]
    ledger, rows, _, ok = alloc_for_extend(
        ledger, [-1], [page_size], [2 * page_size], capacity=8, prefix_loc=np.int32(free)
    )
    assert ok
    assert report(ledger) == f"broken_entry: {MEANING['broken_entry']}; rows {rows[0]}"


def test_tree_pages_that_do_not_exist_are_told():
    flags = check_invariants(ledger_of(), tree_pages=[99])
    assert flags.listed_outside
    assert not check_invariants(ledger_of(), tree_pages=[0]).any()
