"""Taking, writing, checkpointing and giving back state inside a donated program: in place, at the same cost however
many slots there are. Read off the compiled programs, for a CPU and for an H200."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import jax
import jax.numpy as jnp
import pytest

from kvjax import HybridReqToTokenPool, Ledger, PagedTokenToKVPoolAllocator, release_rows
from kvjax.compiled import compile_for, h200_available, inspect
from kvjax.recurrent import MambaPool, NGramPool, ShortConvPool, checkpoint, extend_with_state, take_slots, take_state

pytestmark = pytest.mark.compiled

SLOTS, LANES, PAGE = 2**16, 8, 16


def books(slots, store):
    table = HybridReqToTokenPool.create(64, 256, slots, extra_buffer=True)
    states = MambaPool.create(
        slots, [1, 4], [(16, 3), (8,)], (4, 16), conv_store_dtype=store, draft_rows=LANES, draft_tokens=3
    )
    states = states.register_slot_state(ShortConvPool.create(slots, 2, (16, 3), store_dtype=store))
    states = states.register_slot_state(NGramPool.create(slots, 4, 2))
    return Ledger.create(table, PagedTokenToKVPoolAllocator.create(1024 * PAGE, PAGE)), states


def admit(ledger, states, rows, lens):
    return take_state(ledger, states, rows == -1, lens)


def set_aside(ledger, states, rows, lens):
    return take_slots(ledger, states, lens[0], capacity=LANES)


def extend(ledger, states, rows, lens):
    zero = jnp.zeros_like(lens)
    return extend_with_state(ledger, states, rows, zero, lens, capacity=LANES * PAGE, copy_from=lens)


def decode(ledger, states, rows, lens):
    """Some decode steps: read, write, checkpoint, release, and a new owner for what was given back."""

    def step(carry):
        i, ledger, states = carry
        slots = ledger.table.working_slots(rows)
        for layer in (1, 4):
            conv, temporal = states.read(layer, slots)
            states = states.write(layer, slots, [c + i for c in conv], temporal * 2)
        context = states.siblings[1].set_context(slots, states.siblings[1].get_context(slots) + i)
        states = states.with_members([states, states.siblings[0], context])
        ledger, states, _ = checkpoint(ledger, states, rows, lens % 4 == i)
        ledger = release_rows(ledger, jnp.where(lens == i, rows, 0))
        ledger, states, _, _, _ = take_state(ledger, states, lens == i)
        return i + 1, ledger, states

    return jax.lax.while_loop(lambda c: c[0] < lens[0], step, (jnp.int32(0), ledger, states))[1:]


def drafts(ledger, states, rows, lens):
    conv = [jnp.ones((LANES, 16, 5)), jnp.ones((LANES, 10))]
    states = states.write_drafts(4, rows, conv, jnp.ones((LANES, 3, 4, 16)))
    return ledger, states.commit_drafts(ledger.table.working_slots(rows), rows, lens)


def moves(ledger, states, rows, lens):
    return ledger, states.clear_slots(rows).copy_from(rows, lens).hand_over(lens, rows)


PLATFORMS = ("cpu", "h200")
PROGRAMS = {f.__name__: f for f in (admit, set_aside, extend, decode, drafts, moves)}


def compiled(function, slots, platform):
    store = jnp.uint16 if platform == "cpu" else jnp.bfloat16
    state = jax.eval_shape(lambda: books(slots, store))
    lanes = jax.ShapeDtypeStruct((LANES,), jnp.int32)
    return state, inspect(compile_for(function, (*state, lanes, lanes), platform, donate_argnums=(0, 1)))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_leaf_is_copied_and_temporaries_do_not_grow_with_the_slots(name, platform):
    if platform == "h200":
        available, why = h200_available()
        assert available, f"`make test` installs the deviceless compiler: {why}"
    state, small = compiled(PROGRAMS[name], SLOTS, platform)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    assert small.alias_bytes >= sum(sizes), "every leaf is updated where it lies"
    smallest = 4 * SLOTS  # the free list; every state leaf is larger
    assert not (moved := small.large_ops(smallest)), "\n".join(map(str, moved))
    assert small.temp_bytes < smallest
    _, large = compiled(PROGRAMS[name], 4 * SLOTS, platform)
    assert not large.large_ops(smallest)
    assert large.temp_bytes <= small.temp_bytes + 1024, "the same at four times the slots"
