"""Taking recurrent state so that it can never leak: slots change hands together with what they hold.

SGLang hands a slot out as it is and clears it later, in another stream. Here taking and handing over are one operation
inside the program: whoever gets a slot finds each state's reset value, or the prefix state that was asked for, in the
pool and in every sibling, also when the slot changes owner inside the same step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax.extend import alloc_for_extend
from kvjax.layout import NEW_ROW, positive
from kvjax.ledger import Ledger
from kvjax.operation import int32, mask, operation, same_length
from kvjax.recurrent.mamba import MambaPool
from kvjax.rows import HybridReqToTokenPool

REFUSED = -2  # a row that no call accepts


def hybrid_table(ledger: Ledger) -> HybridReqToTokenPool:
    """The ledger's table; ValueError unless its rows hold state slots."""
    if not isinstance(ledger.table, HybridReqToTokenPool):
        raise ValueError(
            f"this ledger's rows hold no state slots: its table is a {type(ledger.table).__name__}; make it with "
            "Ledger.create(HybridReqToTokenPool.create(...), allocator)."
        )
    return ledger.table


def check_states(table: Any, states: Any) -> HybridReqToTokenPool:
    """The hybrid table; ValueError unless every slot that it can hand out exists in the states, and no other.

    A pool with fewer slots would drop writes that the table believes in: requests that forget everything.
    """
    if not isinstance(table, HybridReqToTokenPool) or not isinstance(states, MambaPool):
        raise ValueError(
            f"recurrent state needs a HybridReqToTokenPool and a MambaPool, got {type(table).__name__} and "
            f"{type(states).__name__}; make the ledger with Ledger.create(HybridReqToTokenPool.create(...), allocator)."
        )
    for member in states.members():
        if member.size != table.slots.size:
            raise ValueError(
                f"the table hands out {table.slots.size} state slots, but {type(member).__name__} holds {member.size}; "
                "create both with the same number of slots."
            )
    return table


@operation()
def take_state(
    ledger: Ledger, states: MambaPool, want: jax.Array, copy_from: jax.Array | None = None
) -> tuple[Ledger, MambaPool, jax.Array, jax.Array, jax.Array]:
    """A row with its working and tracking slots, states handed over, for every lane that wants one; all or nothing.

    want: bool[b]. copy_from: i32[b], the slot of a prefix state that the working slot begins with (a copy: its owner
        keeps it), 0 for the reset value; None: reset values. Tracking slots always begin with reset values.
    Refused (ok == False, nothing changed): too few rows or slots, a copy_from that is not handed out.
    Returns (ledger, states, rows i32[b], working slots i32[b], ok bool[]); 0 on other lanes and on failure.
    """
    table = check_states(ledger.table, states)
    want = mask("want", want, (jnp.size(want),))
    source, legal = _sources(table, want, copy_from)
    rows = jnp.where(want, jnp.where(legal, NEW_ROW, REFUSED), 0)
    table, rows, _, _, ok = table.alloc(rows)
    table, states = _handed_over(table, states, rows, source)
    return dataclasses.replace(ledger, table=table), states, rows, table.working_slots(rows), ok


@operation("capacity", "implementation")
def extend_with_state(
    ledger: Ledger,
    states: MambaPool,
    rows: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    capacity: int,
    copy_from: jax.Array | None = None,
    prefix_loc: jax.Array | None = None,
    owned_from: jax.Array | None = None,
    num_lanes: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[Ledger, MambaPool, jax.Array, jax.Array, jax.Array, jax.Array]:
    """`alloc_for_extend` and `take_state` as one call: row, state slots and token slots of a chunk, all or nothing.

    copy_from: i32[b], for new rows: the slot whose state the first `prefix` tokens left, 0 for the reset value. The
        other arguments are those of `alloc_for_extend`.
    Returns (ledger, states, rows i32[b], working slots i32[b], loc i32[capacity], ok); 0 on failure.
    """
    table = check_states(ledger.table, states)
    rows = int32("rows", rows, 1)
    wants = rows == NEW_ROW
    source, legal = _sources(table, wants, copy_from)
    ledger, out, loc, ok = alloc_for_extend(
        ledger,
        jnp.where(wants & ~legal, REFUSED, rows),
        prefix_lens,
        seq_lens,
        capacity=capacity,
        prefix_loc=prefix_loc,
        owned_from=owned_from,
        num_lanes=num_lanes,
        implementation=implementation,
    )
    table, states = _handed_over(hybrid_table(ledger), states, jnp.where(wants, out, 0), source)
    return dataclasses.replace(ledger, table=table), states, out, table.working_slots(out), loc, ok


@operation("capacity")
def take_slots(
    ledger: Ledger, states: MambaPool, need: ArrayLike, copy_from: jax.Array | None = None, *, capacity: int
) -> tuple[Ledger, MambaPool, jax.Array, jax.Array]:
    """`need` (i32[]) slots of no row, handed over clean: for a prefix tree, or to fill a tracking entry.

    copy_from: i32[capacity], what each slot begins with (0: the reset value); None: reset values. Refused: too few
    slots, a copy_from that is not handed out. Returns (ledger, states, slots i32[capacity], 0 behind the last, ok).
    """
    table, width = check_states(ledger.table, states), positive("capacity", capacity)
    need = int32("need", need, 0)
    used = jnp.arange(width, dtype=jnp.int32) < need
    source, legal = _sources(table, used, copy_from)
    slots, taken, ok = table.slots.alloc(jnp.where(legal, need, -1), capacity=width)
    table = dataclasses.replace(table, slots=slots)
    return dataclasses.replace(ledger, table=table), states.hand_over(taken, source), taken, ok


@operation()
def free_slots(ledger: Ledger, slots: jax.Array) -> Ledger:
    """Give back slots of no row (i32[m], 0 = padding): what `donate` or `take_slots` gave."""
    table = hybrid_table(ledger)
    return dataclasses.replace(ledger, table=dataclasses.replace(table, slots=table.slots.free(slots)))


@operation()
def checkpoint(
    ledger: Ledger, states: MambaPool, rows: jax.Array, when: jax.Array
) -> tuple[Ledger, MambaPool, jax.Array]:
    """Copy the working state of rows to their next tracking slot; last = next, next = the other entry.

    rows: i32[b]; when: bool[b], lanes that are at a checkpoint. A lane without a tracking slot, or whose row is not
    ready, copies nothing. Returns (ledger, states, slots i32[b]: where the checkpoint lies, 0 for none).
    """
    table = check_states(ledger.table, states)
    rows, when = int32("rows", rows, 1), mask("when", when, jnp.shape(rows))
    table, target = table.advance_track(rows, when)
    source = jnp.where(target > 0, table.working_slots(rows), 0)
    return dataclasses.replace(ledger, table=table), states.copy_from(source, target), target


def _sources(table: HybridReqToTokenPool, used: jax.Array, copy_from: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(copy_from of the used lanes i32[b], 0 elsewhere; bool[]: each of them is 0 or a slot that is handed out)."""
    if copy_from is None:
        return jnp.zeros(used.shape, jnp.int32), jnp.ones((), bool)
    source = int32("copy_from", copy_from, 1)
    same_length(lanes=used, copy_from=source)
    source = jnp.where(used, source, 0)
    return source, jnp.all((source == 0) | table.slots.is_live(source))


def _handed_over(
    table: HybridReqToTokenPool, states: MambaPool, rows: jax.Array, source: jax.Array
) -> tuple[HybridReqToTokenPool, MambaPool]:
    """The state of new rows (0: none) handed over: the source, or reset values, in every slot that the row took."""
    sources = jnp.pad(source, (0, source.shape[0] * table.tracking_width))  # tracking slots have none
    return table.mark_ready(rows), states.hand_over(table.slots_taken(rows), sources)
