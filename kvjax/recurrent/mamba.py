"""MambaPool: the recurrent state of every linear-attention or state-space layer, one slot per request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.indexing import put, take
from kvjax.layout import INT32_MAX, positive
from kvjax.operation import int32, operation, same_length, state, static
from kvjax.pools import leaves
from kvjax.pools.dtypes import pool_dtype, resolve_store_dtype
from kvjax.recurrent import slot_state
from kvjax.recurrent.side_states import read_slots, shape_of, write_slots
from kvjax.recurrent.slot_state import FIRST, SlotState, slot_rows

Layers = tuple[jax.Array, ...]


@state
class Drafts:
    """States after each draft token, by request row: what verification picks from (SGLang: intermediate states).

    A convolution window moves by one column per token, so the windows of `tokens` drafts are stored once, as their
    union: draft t's window is columns t .. t + w - 1 (SGLang's deduplicated form).
    """

    conv: tuple[Layers, ...]  # per shape, per layer: store_dtype[rows + 1, *shape[:-1], tokens + w - 1], w = shape[-1]
    temporal: Layers  # per layer: store_dtype[rows + 1, tokens, *temporal shape]; none without temporal states
    rows: int = static()
    tokens: int = static()  # draft tokens per row


@state
class MambaPool:
    """Convolution and temporal states (SGLang: MambaPool.State), [size + 1, *shape] per layer; slot 0 is the sink.

    Layers are named by global id and may be sparse (`mamba_map`). Slot 0 and slots outside write nothing, and slot 0
    reads as zeros. Within a step read a slot, then write it: what is written depends on what was read, so it is in
    place. A pool of bfloat16 or fp8 may be stored as unsigned integers (kvjax.pools.dtypes).
    """

    conv: tuple[Layers, ...]  # per shape, per layer: store_dtype[size + 1, *shape]
    temporal: Layers  # per layer: store_dtype[size + 1, *temporal_shape]; () without temporal states
    siblings: tuple[Any, ...]  # slot states that ride along (`register_slot_state`)
    drafts: Drafts | None
    layer_ids: tuple[int, ...] = static()  # global id of each layer
    size: int = static()  # slots that can be handed out
    conv_dtype: np.dtype = static()  # what the values mean; leaves may be integers of the same width
    temporal_dtype: np.dtype = static()

    @classmethod
    def create(
        cls,
        size: int,
        layer_ids: Sequence[int],
        conv_shapes: Sequence[Sequence[int]] = (),
        temporal_shape: Sequence[int] | None = None,
        conv_dtype: Any = jnp.bfloat16,
        temporal_dtype: Any = jnp.float32,
        conv_store_dtype: Any = None,
        temporal_store_dtype: Any = None,
        draft_rows: int = 0,
        draft_tokens: int = 0,
    ) -> MambaPool:
        """A pool of zeros. store dtypes: None means what the platform writes in place.

        layer_ids: global ids, ascending, of the recurrent layers. conv_shapes: one shape per kind of convolution
            state; its last axis is the window. temporal_shape: None without a temporal state (lfm2).
        draft_rows, draft_tokens: requests and tokens per request of the intermediate states; 0 and 0 for none.
        ValueError for sizes below 1, layer ids that repeat or do not ascend, no state at all, or a dtype that pools
        do not hold. Works under `jax.eval_shape`.
        """
        rows, ids = slot_rows(size), _layer_ids(layer_ids)
        shapes = tuple(shape_of(f"conv_shapes[{i}]", shape) for i, shape in enumerate(conv_shapes))
        inner = None if temporal_shape is None else shape_of("temporal_shape", temporal_shape)
        if not shapes and inner is None:
            raise ValueError("a recurrent layer needs a state; pass conv_shapes, a temporal_shape, or both.")
        conv_dtype, temporal_dtype = pool_dtype(conv_dtype), pool_dtype(temporal_dtype)
        stores = (
            resolve_store_dtype(conv_dtype, conv_store_dtype),
            resolve_store_dtype(temporal_dtype, temporal_store_dtype),
        )
        drafts = None
        if draft_rows or draft_tokens:
            count, tokens = positive("draft_rows", draft_rows), positive("draft_tokens", draft_tokens)
            wide = tuple((*shape[:-1], tokens + shape[-1] - 1) for shape in shapes)
            states = None if inner is None else (tokens, *inner)
            drafts = Drafts(*_zeros(count + 1, len(ids), wide, states, stores), count, tokens)
        conv, temporal = _zeros(rows, len(ids), shapes, inner, stores)
        return cls(conv, temporal, (), drafts, ids, rows - 1, conv_dtype, temporal_dtype)

    # Shapes and bytes: Python ints, from the leaves.

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def mamba_map(self) -> dict[int, int]:
        """Position of each global layer id in this pool."""
        return {layer: index for index, layer in enumerate(self.layer_ids)}

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves, siblings and intermediate states included."""
        return leaves.leaf_bytes(tuple(jax.tree.leaves(self)))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers and siblings."""
        held = [leaf for member in self.members() for leaf in jax.tree.leaves(member.slot_leaves())]
        return sum(leaves.leaf_bytes((leaf,)) // (self.size + 1) for leaf in held)

    def layer_index(self, layer_id: int) -> int:
        """Position of a global layer id; ValueError for a layer without recurrent state."""
        try:
            return self.layer_ids.index(layer_id)
        except ValueError:
            raise ValueError(
                f"layer {layer_id} has no recurrent state in this pool, which holds layers "
                f"{', '.join(map(str, self.layer_ids))}; layer ids are global."
            ) from None

    # What moves with a slot.

    @property
    def reset_value(self) -> int:
        return 0

    def slot_leaves(self) -> tuple[tuple[Layers, ...], Layers]:
        return self.conv, self.temporal

    def with_slot_leaves(self, leaves: tuple[tuple[Layers, ...], Layers]) -> MambaPool:
        return dataclasses.replace(self, conv=leaves[0], temporal=leaves[1])

    def members(self) -> tuple[Any, ...]:
        """This pool and its siblings: every slot state that a slot has."""
        return (self, *self.siblings)

    def with_members(self, members: Sequence[Any]) -> MambaPool:
        """The pool with these members instead, in the order of `members()`."""
        return dataclasses.replace(members[0], siblings=tuple(members[1:]))

    def register_slot_state(self, sibling: SlotState) -> MambaPool:
        """The pool with one more state that is cleared, copied and moved with its slots; a disabled one is left out.

        ValueError for a sibling of another size: a slot has to exist in both.
        """
        if sibling.size != self.size:
            raise ValueError(
                f"{type(sibling).__name__} has {sibling.size} slots but the pool has {self.size}; slots are shared, so "
                "create both with the same size."
            )
        if not jax.tree.leaves(sibling.slot_leaves()):
            return self
        return dataclasses.replace(self, siblings=(*self.siblings, sibling))

    def clear_slots(self, slots: Any) -> MambaPool:
        """The reset value of every state in the slots (i32[m]; slot 0 and slots outside are ignored)."""
        return self.with_members([slot_state.clear(member, slots) for member in self.members()])

    def copy_from(self, src: Any, dst: Any) -> MambaPool:
        """Every state of slots src i32[m] copied to dst i32[m]; sources are read first, slot 0 moves nothing."""
        return self.with_members([slot_state.copy(member, src, dst) for member in self.members()])

    def hand_over(self, slots: Any, copy_from: Any) -> MambaPool:
        """What new owners find: copies of slots copy_from i32[m], or reset values where it is 0, in slots i32[m]."""
        return self.with_members([slot_state.hand_over(member, slots, copy_from) for member in self.members()])

    def get_cpu_copy(self, slots: Any) -> list[list[np.ndarray]]:
        """Every state of slots i32[m] on the host, one list of arrays per member."""
        return [slot_state.read_to_host(member, slots) for member in self.members()]

    def load_cpu_copy(self, copy: Sequence[list[np.ndarray]], slots: Any) -> MambaPool:
        """Write a host copy into slots i32[m]; ValueError unless it came from a pool with the same members."""
        members = self.members()
        if len(copy) != len(members):
            raise ValueError(
                f"the copy holds {len(copy)} states but this pool has {len(members)} (itself and its siblings); "
                "register the same siblings in both."
            )
        pairs = zip(members, copy, strict=True)
        return self.with_members([slot_state.load_from_host(member, rows, slots) for member, rows in pairs])

    # Reading and writing a layer.

    def layer_cache(self, layer_id: int) -> tuple[Layers, jax.Array | None]:
        """The stored leaves of a layer, whole, in their store dtypes: (one per convolution shape, temporal or None)."""
        at = self.layer_index(layer_id)
        return tuple(kind[at] for kind in self.conv), self.temporal[at] if self.temporal else None

    def read(self, layer_id: int, slots: Any) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """(convolution states [m, *shape] each, temporal state [m, *temporal_shape] or None) of slots i32[m]."""
        conv, temporal = self.layer_cache(layer_id)
        windows = tuple(read_slots(leaf, slots, dtype=self.conv_dtype) for leaf in conv)
        return windows, None if temporal is None else read_slots(temporal, slots, dtype=self.temporal_dtype)

    def write(self, layer_id: int, slots: Any, conv: Sequence[Any], temporal: Any = None) -> MambaPool:
        """Store the states of a layer in slots i32[m]: one convolution state per shape, and the temporal one.

        Slot 0 and slots outside write nothing. ValueError for another number of states or other shapes.
        """
        at = self.layer_index(layer_id)
        self._check_states(conv, temporal)
        kinds = tuple(
            leaves.replaced(kind, at, write_slots(kind[at], slots, values, dtype=self.conv_dtype))
            for kind, values in zip(self.conv, conv, strict=True)
        )
        rest = self.temporal
        if rest:
            rest = leaves.replaced(rest, at, write_slots(rest[at], slots, temporal, dtype=self.temporal_dtype))
        return dataclasses.replace(self, conv=kinds, temporal=rest)

    def _check_states(self, conv: Sequence[Any], temporal: Any) -> None:
        if len(conv) != len(self.conv) or (temporal is None) == bool(self.temporal):
            raise ValueError(
                f"{len(conv)} convolution states and {'no' if temporal is None else 'a'} temporal state came, but this "
                f"pool holds {len(self.conv)} and {'one' if self.temporal else 'none'}; pass one for each."
            )

    # Intermediate states.

    def write_drafts(self, layer_id: int, rows: Any, conv: Sequence[Any], temporal: Any = None) -> MambaPool:
        """Store a layer's states after every draft token, by request row (i32[m], row 0 and rows outside ignored).

        conv: per shape [m, *shape[:-1], tokens + w - 1], the columns that the windows run over; temporal:
        [m, tokens, *temporal_shape], or None. ValueError without intermediate states, or for other shapes.
        """
        drafts, at = self._drafts(), self.layer_index(layer_id)
        self._check_states(conv, temporal)
        kinds = tuple(
            leaves.replaced(kind, at, write_slots(kind[at], rows, values, dtype=self.conv_dtype))
            for kind, values in zip(drafts.conv, conv, strict=True)
        )
        rest = drafts.temporal
        if rest:
            rest = leaves.replaced(rest, at, write_slots(rest[at], rows, temporal, dtype=self.temporal_dtype))
        return dataclasses.replace(self, drafts=dataclasses.replace(drafts, conv=kinds, temporal=rest))

    def commit_drafts(self, slots: Any, rows: Any, accepted: Any) -> MambaPool:
        """The state after `accepted` draft tokens becomes the slot's state, in every layer; i32[m] each.

        accepted 0 leaves the slot as it is; so do slot 0, row 0, and what lies outside the pools or past the drafts.
        """
        drafts = self._drafts()
        windows = tuple(kind[0].shape[-1] for kind in self.conv)
        conv, temporal = _commit((self.conv, self.temporal), drafts, slots, rows, accepted, windows=windows)
        return dataclasses.replace(self, conv=conv, temporal=temporal)

    def _drafts(self) -> Drafts:
        if self.drafts is None:
            raise ValueError("this pool has no intermediate states; create it with draft_rows and draft_tokens.")
        return self.drafts


@operation("windows")
def _commit(held: Any, drafts: Drafts, slots: Any, rows: Any, accepted: Any, *, windows: tuple[int, ...]) -> Any:
    slots, rows, accepted = int32("slots", slots, 1), int32("rows", rows, 1), int32("accepted", accepted, 1)
    same_length(slots=slots, rows=rows, accepted=accepted)
    valid = (accepted >= 1) & (accepted <= drafts.tokens) & (rows >= 1) & (rows <= drafts.rows)
    step, row, (conv, temporal) = jnp.where(valid, accepted - 1, 0), jnp.where(valid, rows, 0), held

    def window(leaf: jax.Array, wide: jax.Array, width: int) -> jax.Array:
        union = take(wide, row)  # [m, ..., tokens + w - 1]
        column = (step[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1, *(1,) * (union.ndim - 2), width)
        column = jnp.broadcast_to(column, (*union.shape[:-1], width))
        picked = jnp.take_along_axis(union, column, axis=-1, mode="promise_in_bounds")
        return put(leaf, slots, picked, valid=valid, lower=FIRST)

    kinds = tuple(
        tuple(window(leaf, wide, width) for leaf, wide in zip(kind, union, strict=True))
        for kind, union, width in zip(conv, drafts.conv, windows, strict=True)
    )

    def after(leaf: jax.Array, states: jax.Array) -> jax.Array:
        flat = states.reshape(-1, *states.shape[2:])  # one gather of the step that counts, not of all of them
        return put(leaf, slots, take(flat, row * drafts.tokens + step), valid=valid, lower=FIRST)

    return kinds, tuple(after(leaf, states) for leaf, states in zip(temporal, drafts.temporal, strict=True))


def _zeros(rows: int, layers: int, shapes: Any, temporal: Any, stores: Any) -> tuple[tuple[Layers, ...], Layers]:
    """Separate zero buffers: one array shared by two leaves could not be donated."""
    conv = tuple(tuple(jnp.zeros((rows, *shape), stores[0]) for _ in range(layers)) for shape in shapes)
    rest = () if temporal is None else tuple(jnp.zeros((rows, *temporal), stores[1]) for _ in range(layers))
    return conv, rest


def _layer_ids(layer_ids: Any) -> tuple[int, ...]:
    try:
        ids = tuple(layer_ids)
    except TypeError:
        raise ValueError(f"layer_ids must be a list of layer ids, got {layer_ids!r}; pass one per layer.") from None
    if not ids or any(isinstance(i, bool) or not isinstance(i, (int, np.integer)) or i < 0 for i in ids):
        raise ValueError(f"layer_ids must hold whole numbers of 0 or more, at least one, got {ids!r}.")
    if any(a >= b for a, b in itertools.pairwise(ids)) or ids[-1] > INT32_MAX:
        raise ValueError(f"layer_ids must ascend and name each layer once, got {ids!r}; sort them.")
    return tuple(int(i) for i in ids)
