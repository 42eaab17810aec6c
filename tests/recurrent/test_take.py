"""Taking and handing over state: all or nothing, clean, and never through a stale slot."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
    HybridReqToTokenPool,
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    alloc_for_decode,
    alloc_for_extend,
    release_rows,
)
from kvjax.invariants import report
from kvjax.recurrent import (
    MambaPool,
    check_states,
    checkpoint,
    extend_with_state,
    free_slots,
    take_slots,
    take_state,
)
from tests.recurrent.books import books, counters, holds, leaves, painted

NAN = float("nan")
EVERY = list(range(1, 13))


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_and_slots_come_together_and_clean():
    ledger, states = books()
    sink = [leaf[0] for leaf in leaves(states)]
    states = painted(states, EVERY, NAN)
    ledger, states, rows, slots, ok = take_state(ledger, states, [True, False, True])
    assert (rows.tolist(), slots.tolist(), bool(ok)) == ([4, 0, 5], [1, 0, 4], True)
    assert ledger.table.tracking[np.array([4, 5])].tolist() == [[2, 3], [5, 6]]
    assert all(holds(states, slot, None) for slot in range(1, 7))
    assert np.isnan(leaves(states)[0][7]).all(), "what nobody took is not touched"
    same(sink, [leaf[0] for leaf in leaves(states)])
    assert report(ledger) == ""


@pytest.mark.parametrize("jitted", [False, True])
def test_b28_whoever_gets_a_slot_reads_reset_values_even_inside_the_same_step(jitted):
    """vllm-project/vllm#56524, clear-write form: slots were handed out with the previous owner's bytes."""

    def step(ledger, states, rows):
        ledger = release_rows(ledger, rows)
        return take_state(ledger, states, jnp.array([True, False, False]))

    ledger, states = books(slots=4)
    ledger, states, rows, slots, _ = take_state(ledger, states, [True, False, False])
    ledger, states, _, _ = take_slots(ledger, states, 1, capacity=1)
    states = painted(painted(states, [1, 2, 3], NAN), [4], 7.0)
    before = states
    ledger, states, rows, slots, ok = (jax.jit(step) if jitted else step)(ledger, states, rows)
    assert (rows.tolist(), slots.tolist(), bool(ok)) == ([5, 0, 0], [1, 0, 0], True)
    assert all(holds(states, slot, None) for slot in (1, 2, 3))
    for leaf, old in zip(leaves(states), leaves(before), strict=True):
        np.testing.assert_array_equal(leaf[jnp.array([0, 4])], old[jnp.array([0, 4])])


def test_a_prefix_state_is_copied_into_the_working_slot_alone():
    ledger, states = books()
    ledger, states, kept, _ = take_slots(ledger, states, 2, capacity=2)
    states = painted(painted(states, EVERY, NAN), kept, 3.0)
    ledger, states, rows, slots, ok = take_state(ledger, states, [True, True], copy_from=[int(kept[1]), 0])
    assert ok
    assert holds(states, int(slots[0]), 3.0)
    tracked = ledger.table.tracking[rows].reshape(-1).tolist()
    assert all(holds(states, slot, None) for slot in [int(slots[1]), *tracked])
    assert holds(states, int(kept[1]), 3.0), "the source stays with its owner"
    assert report(ledger, None, kept) == ""
    assert "slot_lost" in report(ledger)


def test_a_source_that_changes_hands_in_the_same_step_is_read_before_it_is_overwritten():
    ledger, states = books(slots=3, extra_buffer=False)
    ledger, states, _, _ = take_slots(ledger, states, 3, capacity=3)
    for slot in (1, 2, 3):
        states = painted(states, [slot], float(slot))
    states = states.hand_over(jnp.array([1, 2, 3]), jnp.array([2, 3, 1]))
    assert [float(leaves(states)[0][slot].max()) for slot in (1, 2, 3)] == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("source", [7, 12, 13, -1, 2**31 - 1])
def test_a_source_that_is_not_handed_out_refuses_the_whole_call(source):
    ledger, states = books()
    states = painted(states, EVERY, 5.0)
    ledger, states, _, _, _ = take_state(ledger, states, [True, True])  # slots 1 .. 6
    before = ledger, states
    *after, rows, slots, ok = take_state(ledger, states, [True, False], copy_from=[source, 0])
    assert (rows.tolist(), slots.tolist(), bool(ok)) == ([0, 0], [0, 0], False)
    same(before, tuple(after))
    *_, ok = take_state(ledger, states, [True, False], copy_from=[1, source])
    assert ok, "lanes that take nothing copy nothing"
    *after, _, ok = take_slots(ledger, states, 1, [source], capacity=1)
    assert not ok
    same(before, tuple(after))
    *after, rows, _, _, ok = extend_with_state(ledger, states, [-1], [0], [3], capacity=4, copy_from=[source])
    assert (rows.tolist(), bool(ok)) == ([0], False)
    same(before, tuple(after))


def test_b30_rows_left_but_too_few_slots_takes_nothing_and_the_reverse():
    """sgl-project/sglang#39787: row, working slot and tracking slots were taken in three steps."""
    ledger, states = books(slots=6)
    ledger, states, _, ok = take_slots(ledger, states, 3, capacity=3)
    assert ok
    before, counted = (ledger, states), counters(ledger)
    assert counted == (5, 3, 64, 0)
    *after, rows, slots, ok = take_state(ledger, states, [True, True])
    assert (rows.tolist(), slots.tolist(), bool(ok)) == ([0, 0], [0, 0], False)
    same(before, tuple(after))
    *after, rows, _, loc, ok = extend_with_state(ledger, states, [-1, -1], [0, 0], [3, 3], capacity=8)
    assert (rows.tolist(), loc.any(), bool(ok)) == ([0, 0], False, False)
    same(before, tuple(after))
    one, _, _, _, ok = take_state(ledger, states, [True, False])
    assert ok
    assert counters(one) == (4, 0, 64, 0)

    ledger, states = books(slots=12, rows=1)
    before = ledger, states
    *after, _, _, ok = take_state(ledger, states, [True, True])
    assert not ok
    same(before, tuple(after))


def test_too_few_pages_takes_no_row_and_no_slot():
    ledger, states = books(tokens=8)
    before = ledger, painted(states, EVERY, NAN)
    *after, rows, slots, loc, ok = extend_with_state(*before, [-1, -1], [0, 0], [8, 1], capacity=16)
    assert (rows.tolist(), slots.tolist(), loc.any(), bool(ok)) == ([0, 0], [0, 0], False, False)
    same(before, tuple(after))


def test_b33_an_admission_that_fails_behind_a_prefix_match_leaves_nothing_held():
    """sgl-project/sglang#16067: the copied state slot stayed allocated, tracked by nobody."""
    ledger, states = books(tokens=8)
    ledger, states, prefix, _ = take_slots(ledger, states, 1, capacity=1)
    states = painted(states, prefix, 4.0)
    counted = counters(ledger)
    for _ in range(100):
        ledger, states, rows, _, _, ok = extend_with_state(
            ledger, states, [-1], [0], [9], capacity=16, copy_from=prefix
        )
        assert not ok
        assert counters(ledger) == counted
    ledger, states, rows, slots, _, ok = extend_with_state(
        ledger, states, [-1], [0], [8], capacity=16, copy_from=prefix
    )
    assert ok
    assert holds(states, int(slots[0]), 4.0)
    ledger = release_rows(ledger, rows)
    assert counters(ledger) == counted


def test_b34_tables_and_states_of_different_sizes_are_refused_at_once():
    """vllm-project/tpu-inference#2366: JAX clipped the index, and several requests shared the last slot."""
    ledger, states = books(slots=12)
    _, fewer = books(slots=11)
    for call in (
        lambda: check_states(ledger.table, fewer),
        lambda: take_state(ledger, fewer, [True]),
        lambda: extend_with_state(ledger, fewer, [-1], [0], [1], capacity=1),
        lambda: checkpoint(ledger, fewer, [1], [True]),
    ):
        with pytest.raises(ValueError, match="table hands out 12 state slots, but MambaPool holds 11"):
            call()
    painted_states = painted(states, EVERY, 5.0)
    spoil = [jnp.full((3, 3, 2), 1.0), jnp.full((3, 4), 1.0)], jnp.full((3, 2, 3), 1.0)
    after = painted_states.write(1, [13, 14, -1], *spoil)
    for old, new in zip(leaves(painted_states), leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_right_kinds_of_table_and_states_are_asked_for():
    ledger = Ledger.create(ReqToTokenPool.create(4, 8), PagedTokenToKVPoolAllocator.create(16, 4))
    _, states = books()
    with pytest.raises(ValueError, match="needs a HybridReqToTokenPool and a MambaPool, got ReqToTokenPool"):
        take_state(ledger, states, [True])
    hybrid, _ = books()
    with pytest.raises(ValueError, match="got HybridReqToTokenPool and int"):
        check_states(hybrid.table, 3)
    with pytest.raises(ValueError, match="a row takes 3 state slots, but there are 2"):
        HybridReqToTokenPool.create(4, 8, 2, extra_buffer=True)
    with pytest.raises(ValueError, match="want must be bool"):
        take_state(*books(), [1, 0])
    with pytest.raises(ValueError, match="lanes has 2 lanes but copy_from has 1"):
        take_state(*books(), [True, False], copy_from=[0])


def test_a_row_taken_without_a_hand_over_neither_reads_nor_writes_its_slot():
    """alloc_for_extend knows no states: its rows see the sink until their state was handed over."""
    ledger, states = books()
    states = painted(states, EVERY, NAN)
    ledger, rows, _, ok = alloc_for_extend(ledger, [-1, -1], [0, 0], [3, 2], capacity=8)
    assert ok
    assert ledger.table.working_slots(rows).tolist() == [0, 0]
    assert ledger.table.tracking_slots(rows, [0, 1]).tolist() == [0, 0]
    _, after, target = checkpoint(ledger, states, rows, [True, True])
    assert target.tolist() == [0, 0]
    same(states, after)
    assert ledger.table.mark_ready(rows).working_slots(rows).tolist() == [1, 4]


def test_a_finished_lane_does_not_write_through_a_stale_working_slot():
    ledger, states = books()
    ledger, states, rows, slots, _ = take_state(ledger, states, [True, True])
    stale = ledger.table.working[rows[0]]
    ledger = release_rows(ledger, rows[:1])
    assert int(ledger.table.working[rows[0]]) == int(stale), "the table keeps it"
    assert ledger.table.working_slots(rows).tolist() == [0, int(slots[1])]
    assert ledger.table.working_slots([0, -1, 6, 2**31 - 1]).tolist() == [0, 0, 0, 0]
    assert ledger.table.tracking_slots(rows, [0, 0]).tolist()[0] == 0
    freed = dataclasses.replace(ledger, table=ledger.table.free_mamba(rows[1:]))  # the row lives on, its slots do not
    assert freed.table.working_slots(rows).tolist() == [0, 0]


def test_release_gives_back_row_pages_working_and_tracking_slots_together():
    ledger, states = books()
    start = counters(ledger)
    ledger, states, rows, _, _, ok = extend_with_state(ledger, states, [-1, -1, 0], [0, 0, 0], [6, 3, 0], capacity=16)
    ledger, _, _, also = alloc_for_decode(ledger, rows)
    assert ok
    assert also
    assert counters(ledger) == (3, 6, 64 - 12, 0)
    ledger = release_rows(ledger, rows)
    assert counters(ledger) == start
    assert ledger.table.slots.to_lists()[0] == [7, 8, 9, 10, 11, 12, 1, 2, 3, 4, 5, 6]
    ledger = release_rows(ledger, rows)
    assert counters(ledger)[:3] == start[:3]
    assert int(ledger.faults) == 2
    assert report(ledger) == ""


def test_checkpoints_alternate_between_the_tracking_slots():
    ledger, states = books()
    ledger, states, rows, slots, _ = take_state(ledger, states, [True, True])
    states = painted(states, slots[:1], 2.0)
    ledger, states, target = checkpoint(ledger, states, rows, [True, False])
    assert target.tolist() == [2, 0]
    assert holds(states, 2, 2.0)
    assert holds(states, 3, None)
    table = ledger.table
    assert (table.last_track(rows).tolist(), table.next_track(rows).tolist()) == ([0, 1], [1, 0])
    states = painted(states, slots[:1], 3.0)
    ledger, states, target = checkpoint(ledger, states, rows, [True, True])
    assert target.tolist() == [3, 5]
    assert holds(states, 2, 2.0)
    assert holds(states, 3, 3.0)
    assert ledger.table.last_track(rows).tolist() == [1, 0]


def test_lazy_rows_track_in_one_slot_until_another_is_set():
    ledger, states = books(lazy=True)
    ledger, states, rows, slots, _ = take_state(ledger, states, [True])
    assert ledger.table.tracking[rows[0]].tolist() == [2, -1]
    for value in (2.0, 3.0):
        states = painted(states, slots, value)
        ledger, states, target = checkpoint(ledger, states, rows, [True])
        assert target.tolist() == [2]
        assert holds(states, 2, value)
    ledger, states, fresh, _ = take_slots(ledger, states, 1, capacity=1)
    table, entries, ok = ledger.table.set_track(rows, [1], fresh)
    assert (entries.tolist(), bool(ok)) == ([[2, 3]], True)
    table, entries, ok = table.set_track(rows, [0], [-1])
    assert entries.tolist() == [[-1, 3]]
    ledger = free_slots(dataclasses.replace(ledger, table=table), [2])
    ledger, states, target = checkpoint(ledger, states, rows, [True])
    assert target.tolist() == [3], "the empty entry is passed over"
    assert report(ledger) == ""


def test_a_donated_state_stays_and_its_row_goes_on_with_the_new_slot():
    ledger, states = books()
    ledger, states, rows, slots, _ = take_state(ledger, states, [True])
    states = painted(states, slots, 6.0)
    ledger, states, target = checkpoint(ledger, states, rows, [True])
    ledger, states, fresh, _ = take_slots(ledger, states, 1, capacity=1)
    table, given, ok = ledger.table.donate(rows, ledger.table.last_track(rows), fresh)
    ledger = dataclasses.replace(ledger, table=table)
    assert (given.tolist(), bool(ok)) == (target.tolist(), True)
    assert table.tracking[rows[0]].tolist() == [int(fresh[0]), 3]
    ledger = release_rows(ledger, rows)
    assert report(ledger, None, given) == ""
    assert holds(states, int(given[0]), 6.0)
    ledger, states, rows, slots, _ = take_state(ledger, states, [True], copy_from=given)
    assert holds(states, int(slots[0]), 6.0)


@pytest.mark.parametrize(
    ("row", "index", "slot"),
    [(3, 0, 7), (5, 2, 7), (5, -1, 7), (5, 0, 9), (5, 0, 0), (5, 0, 13), (9, 0, 7), (-1, 0, 7)],
)
def test_donate_and_set_refuse_what_makes_no_sense(row, index, slot):
    ledger, states = books()
    ledger, states, _, _, _ = take_state(ledger, states, [True, True])
    ledger, states, _, _ = take_slots(ledger, states, 1, capacity=1)  # slot 7
    table, given, ok = ledger.table.donate([row, 4], [index, 0], [slot, 7])
    assert (given.tolist(), bool(ok)) == ([0, 0], False)
    same(table, ledger.table)
    table, _, ok = ledger.table.set_track([row, 0], [index, 0], [slot, 0])
    assert not ok
    same(table, ledger.table)


def test_alloc_refuses_slots_that_contradict_the_table():
    """Held lanes name what they hold; nothing moves when that is not true."""
    ledger, states = books()
    table = take_state(ledger, states, [True, True])[0].table  # rows 4 and 5: slots 1 .. 3 and 4 .. 6
    tracks = np.array([[2, 3], [5, 6]], np.int32)
    good = table.alloc([4, -1], [1, -1], tracks * [[1], [0]], [True, False])
    assert good[4]
    assert good[2].tolist() == [1, 7]
    for rows, working, tracking, has in (
        ([4, 5], [4, 1], tracks, [True, True]),  # each other's slot
        ([4, 5], [1, -1], tracks, [True, True]),  # a second working slot
        ([4, 5], [1, 4], tracks[::-1], [True, True]),
        ([4, 4], [1, 1], tracks[[0, 0]], [True, True]),
        ([4, 5], [1, 4], tracks, [True, False]),  # second tracking slots
        ([-1, -1], [8, -1], tracks, [False, False]),  # free
        ([3, 0], [-1, 0], tracks, [False, False]),  # no such row
    ):
        after, got, *_, ok = table.alloc(rows, working, tracking, has)
        assert (got.tolist(), bool(ok)) == ([0, 0], False)
        same(table, after)


def test_clear_frees_every_book_and_keeps_generations():
    ledger, states = books()
    ledger, states, rows, _, _, _ = extend_with_state(ledger, states, [-1], [0], [5], capacity=8)
    cleared = ledger.clear()
    assert counters(cleared) == (5, 12, 64, 0)
    assert not np.asarray(cleared.table.working).any()
    assert cleared.table.generation.tolist() == ledger.table.generation.tolist()
    assert cleared.table.working_slots(rows).tolist() == [0]
    assert report(cleared) == ""


def test_a_prefix_is_shared_with_its_pages_and_its_state():
    ledger, states = books()
    ledger, states, rows, slots, loc, _ = extend_with_state(ledger, states, [-1], [0], [8], capacity=8)
    states = painted(states, slots, 2.0)
    ledger, states, kept = checkpoint(ledger, states, rows, [True])
    prefix = jnp.broadcast_to(loc[None], (1, 8))
    ledger, states, second, slots, new, ok = extend_with_state(
        ledger, states, [-1], [8], [11], capacity=8, copy_from=kept, prefix_loc=prefix
    )
    assert ok
    assert holds(states, int(slots[0]), 2.0)
    assert ledger.table.req_to_token[second[0], :11].tolist() == [*loc.tolist(), *new[:3].tolist()]
    assert report(ledger) == ""


def test_it_runs_in_a_scan_and_several_ledgers_under_vmap():
    def turn(carry, _):
        ledger, states = carry
        ledger, states, rows, slots, ok = take_state(ledger, states, jnp.array([True, False]))
        ledger, states, target = checkpoint(ledger, states, rows, jnp.ones(2, bool))
        return (release_rows(ledger, rows), states), (rows, slots, target, ok)

    start = books()
    (ledger, _), (rows, slots, target, ok) = jax.jit(lambda c: jax.lax.scan(turn, c, None, length=5))(start)
    assert rows[:, 0].tolist() == [5] * 5
    assert slots[:, 0].tolist() == [1, 4, 7, 10, 1]
    assert target[:, 0].tolist() == [2, 5, 8, 11, 2]
    assert ok.all()
    assert counters(ledger) == counters(start[0])

    many = jax.tree.map(lambda x: jnp.stack([x, x]), books(slots=3))
    _, _, rows, slots, ok = jax.vmap(take_state)(*many, jnp.array([[True, False], [True, True]]))
    assert (rows.tolist(), ok.tolist()) == ([[5, 0], [0, 0]], [True, False])


def test_states_without_tracking_and_without_temporal_state():
    table = HybridReqToTokenPool.create(3, 8, 3)
    ledger = Ledger.create(table, PagedTokenToKVPoolAllocator.create(16, 4))
    states = MambaPool.create(3, [0], [(2, 2)], conv_dtype=jnp.float32)
    ledger, states, rows, slots, ok = take_state(ledger, states, [True, True])
    assert (rows.tolist(), slots.tolist(), bool(ok)) == ([2, 3], [1, 2], True)
    after, same_states, target = checkpoint(ledger, states, rows, [True, True])
    assert target.tolist() == [0, 0]
    same(states, same_states)
    assert after.table.tracking is None
    assert states.read(0, slots)[1] is None
