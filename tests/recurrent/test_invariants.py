"""The rules of state slots, each with a ledger that breaks it and no other."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kvjax import check_invariants, release_rows
from kvjax.invariants import OF_SLOTS, report
from kvjax.recurrent import take_slots, take_state
from tests.recurrent.books import books


def held():
    """Rows 4 and 5 hold slots 1 .. 6; slot 7 is held from outside."""
    ledger, states = books()
    ledger, states, _, _, _ = take_state(ledger, states, [True, True])
    return take_slots(ledger, states, 1, capacity=1)[0]


def with_table(ledger, **changes):
    return dataclasses.replace(ledger, table=dataclasses.replace(ledger.table, **changes))


def broken(ledger, tree=(7,)):
    tree = jnp.asarray(tree, jnp.int32)
    flags = jax.jit(check_invariants)(ledger, None, tree)
    names = [f.name for f in dataclasses.fields(flags) if getattr(flags, f.name)]
    assert [line.split(":")[0] for line in report(ledger, None, tree).splitlines()] == names
    return names


def freed(ledger, slots):
    return with_table(ledger, slots=dataclasses.replace(ledger.table.slots, ring=ledger.table.slots.ring.free(slots)))


def test_a_sound_ledger_raises_no_flag():
    ledger = held()
    assert broken(ledger) == []
    assert broken(release_rows(ledger, [4, 0])) == []


def test_every_slot_rule_has_a_state_that_breaks_it():
    sound = held()
    ring = sound.table.slots.ring
    twice = dataclasses.replace(ring, ring=ring.ring.at[9].set(9))  # 8 9 9 11 12: slot 10 is on no list
    listed = with_table(sound, slots=dataclasses.replace(sound.table.slots, ring=twice))
    states = {
        "slot_free_and_held": (freed(sound, [2]), (7,), []),
        "slot_listed_twice": (listed, (7,), ["slot_lost"]),
        "slot_held_twice": (sound, (7, 3), []),
        "slot_lost": (sound, (), []),
        "broken_slots": (with_table(sound, working=sound.table.working.at[4].set(13)), (7, 1), []),
    }
    assert set(states) == {*OF_SLOTS, "broken_slots"}
    for name, (ledger, tree, also) in states.items():
        assert sorted(broken(ledger, tree)) == sorted([name, *also])


def test_two_rows_with_one_slot_are_seen():
    sound = held()
    working = sound.table.working
    assert broken(with_table(sound, working=working.at[4].set(working[5]))) == ["slot_held_twice", "slot_lost"]


def test_a_free_row_that_holds_slots_is_seen():
    sound = held()
    table = dataclasses.replace(sound.table, table=sound.table.table.free_rows([4]))
    assert broken(dataclasses.replace(sound, table=table)) == ["broken_slots"]


@pytest.mark.parametrize("group", [1, 3])
def test_slots_put_aside_are_neither_lost_nor_held(group):
    sound = held()
    slots, _, ok = sound.table.slots.alloc_group_begin(group, capacity=4)
    assert ok
    assert broken(with_table(sound, slots=slots)) == []
    assert broken(with_table(sound, slots=slots), (7, 8)) == ["slot_free_and_held"]


def test_the_report_says_slots():
    assert "slots 7" in report(held())
