"""State that belongs to a slot rather than to a token: what every kind of it has in common.

A slot state is a set of leaves [size + 1, ...], indexed by slot, with one reset value. Clearing, copying, handing over
and the round trip to the host are written here once; they are scatters into the slots concerned, so a donated pool
is updated in place and no leaf is ever selected or copied as a whole.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.indexing import in_range, put, take
from kvjax.layout import INT32_MAX, PAD_SLOT, positive
from kvjax.operation import int32, narrow, operation, same_length


class SlotState(Protocol):
    """What a pool of per-request state shows to the operations of this module (SGLang: register_slot_state)."""

    @property
    def size(self) -> int:
        """Slots that can be handed out; every leaf has size + 1 rows, row 0 being the sink."""
        ...

    @property
    def reset_value(self) -> int:
        """What a fresh slot holds, in the leaves' own dtype: 0, or the eos id of a token context."""
        ...

    def slot_leaves(self) -> Any:
        """The leaves that are indexed by slot, as a pytree; empty for a disabled state."""
        ...

    def with_slot_leaves(self, leaves: Any) -> Any:
        """The state with these leaves instead."""
        ...


S = TypeVar("S", bound=SlotState)
FIRST = PAD_SLOT + 1  # the lowest slot that a write may reach


def slot_rows(size: Any) -> int:
    """Rows of a leaf for `size` slots: size + 1. ValueError for a size below 1 or past int32."""
    slots = positive("size", size)
    if slots >= INT32_MAX:
        raise ValueError(f"{slots} state slots do not fit int32 (at most {INT32_MAX - 1}); make the pool smaller.")
    return slots + 1


@operation()
def clear(state: S, slots: jax.Array) -> S:
    """The reset value in the slots (i32[m]; slot 0 and slots outside are not written)."""
    slots = int32("slots", slots, 1)
    return _map(lambda leaf: put(leaf, slots, _reset(state, leaf), lower=FIRST), state)


@operation()
def copy(state: S, src: jax.Array, dst: jax.Array) -> S:
    """leaf[dst] = leaf[src], i32[m] each, all sources read before any target is written.

    A lane moves only if both ends are real slots, so (0, 0) is padding. Targets must differ from each other.
    """
    src, dst = int32("src", src, 1), int32("dst", dst, 1)
    same_length(src=src, dst=dst)
    real = in_range(src, state.size + 1, FIRST)
    return _map(lambda leaf: put(leaf, dst, take(leaf, src), valid=real, lower=FIRST), state)


@operation()
def hand_over(state: S, slots: jax.Array, copy_from: jax.Array) -> S:
    """What a new owner finds: leaf[copy_from] in each slot, or the reset value where copy_from is 0; i32[m] each.

    Sources are read before any target is written: a slot may be handed on to one owner and be the source of another.
    """
    slots, source = int32("slots", slots, 1), int32("copy_from", copy_from, 1)
    same_length(slots=slots, copy_from=source)
    real = in_range(source, state.size + 1, FIRST)

    def write(leaf: jax.Array) -> jax.Array:
        copied = real.reshape(real.shape + (1,) * (leaf.ndim - 1))
        return put(leaf, slots, jnp.where(copied, take(leaf, source), _reset(state, leaf)), lower=FIRST)

    return _map(write, state)


def read_to_host(state: SlotState, slots: Any) -> list[np.ndarray]:
    """The stored rows of the slots (i32[m]), one array per leaf, in the leaves' own dtype."""
    return [np.asarray(rows) for rows in _rows(state, slots)]


@operation()
def _rows(state: Any, slots: jax.Array) -> list[jax.Array]:
    slots = int32("slots", slots, 1)
    return [take(leaf, slots) for leaf in jax.tree.leaves(state.slot_leaves())]


def load_from_host(state: S, rows: list[np.ndarray], slots: Any) -> S:
    """Write what `read_to_host` gave into the slots (i32[m], other slots than they came from, if need be).

    ValueError unless there is one array per leaf, of its dtype and of m rows.
    """
    leaves = jax.tree.leaves(state.slot_leaves())
    slots = int32("slots", narrow(slots), 1)
    if len(rows) != len(leaves):
        raise ValueError(f"the copy has {len(rows)} arrays but this state has {len(leaves)} leaves; they must match.")
    for row, leaf in zip(rows, leaves, strict=True):
        if row.shape != (slots.shape[0], *leaf.shape[1:]) or row.dtype != leaf.dtype:
            raise ValueError(
                f"the copy holds {row.dtype}{list(row.shape)} where {slots.shape[0]} slots of this state are "
                f"{leaf.dtype}{[slots.shape[0], *leaf.shape[1:]]}; load it into a pool of the shapes it came from."
            )
    return _load(state, [jnp.asarray(row) for row in rows], slots)


@operation()
def _load(state: Any, rows: list[jax.Array], slots: jax.Array) -> Any:
    slots = int32("slots", slots, 1)
    leaves, tree = jax.tree.flatten(state.slot_leaves())
    written = [put(leaf, slots, row, lower=FIRST) for leaf, row in zip(leaves, rows, strict=True)]
    return state.with_slot_leaves(jax.tree.unflatten(tree, written))


def _reset(state: SlotState, leaf: jax.Array) -> jax.Array:
    return jnp.asarray(state.reset_value, leaf.dtype)


def _map(write: Any, state: S) -> S:
    return state.with_slot_leaves(jax.tree.map(write, state.slot_leaves()))
