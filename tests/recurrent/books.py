"""A small hybrid ledger and its states, for tests: rows 1 .. 5, pages of 4 tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import HybridReqToTokenPool, Ledger, PagedTokenToKVPoolAllocator
from kvjax.recurrent import MambaPool, NGramPool, ShortConvPool

EOS = 9


def books(slots=12, *, rows=5, tokens=64, extra_buffer=True, overlap=True, lazy=False):
    """(ledger, states): every kind of state, two convolution shapes and both siblings included."""
    table = HybridReqToTokenPool.create(rows, 16, slots, extra_buffer, overlap, lazy)
    states = MambaPool.create(slots, [1, 4], [(3, 2), (4,)], (2, 3), conv_dtype=jnp.float32)
    states = states.register_slot_state(ShortConvPool.create(slots, 2, (3,), dtype=jnp.float32))
    states = states.register_slot_state(NGramPool.create(slots, 2, EOS))
    return Ledger.create(table, PagedTokenToKVPoolAllocator.create(tokens, 4)), states


def leaves(states):
    """Every leaf that is indexed by slot."""
    return [leaf for member in states.members() for leaf in jax.tree.leaves(member.slot_leaves())]


def painted(states, slots, value):
    """The states with `value` (NaN becomes -7 in token contexts) in every leaf of the slots."""
    at = jnp.asarray(slots)

    def paint(member):
        def written(leaf):
            stored = -7 if jnp.issubdtype(leaf.dtype, jnp.integer) and np.isnan(value) else value
            return leaf.at[at].set(jnp.asarray(stored, leaf.dtype))

        return member.with_slot_leaves(jax.tree.map(written, member.slot_leaves()))

    return states.with_members([paint(member) for member in states.members()])


def holds(states, slot, value):
    """Whether every leaf of the slot holds `value`; None: its reset value."""
    expected = [[EOS if member.reset_value else 0] if value is None else [value] for member in states.members()]
    flat = [e for e, m in zip(expected, states.members(), strict=True) for _ in jax.tree.leaves(m.slot_leaves())]
    return all((np.asarray(leaf[slot]) == e[0]).all() for leaf, e in zip(leaves(states), flat, strict=True))


def counters(ledger):
    """Free rows, free state slots, free tokens, faults."""
    table = ledger.table
    free = table.table.available_size(), table.slots.available_size(), ledger.allocator.available_size()
    return (*map(int, free), int(ledger.faults))
