"""ShortConvPool and NGramPool: small states beside the recurrent one, indexed by the same slots.

Registered with a MambaPool (`register_slot_state`) they are cleared, copied and moved to the host with it. A disabled
one has no leaves and costs nothing, in a program too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.indexing import put, take
from kvjax.layout import INT32_MAX, positive
from kvjax.operation import int32, operation, state, static
from kvjax.pools import leaves
from kvjax.pools.dtypes import decode, encode, pool_dtype, resolve_store_dtype
from kvjax.recurrent.slot_state import FIRST, slot_rows


def shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """A state's shape as Python ints >= 1; ValueError for an empty shape or a size below 1."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise ValueError(f"{name} must be a shape like (6, 3), got {shape!r}; pass a tuple of whole numbers.") from None
    if not sizes:
        raise ValueError(f"{name} is (); a state needs at least one axis, so pass (1,) for a number.")
    return tuple(positive(f"{name}[{axis}]", size) for axis, size in enumerate(sizes))


def values_of(name: str, values: Any, shape: tuple[int, ...]) -> jax.Array:
    """`values` as a floating array of that shape; ValueError otherwise."""
    array = jnp.asarray(values)
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, but {shape[0]} slots of this state need {shape}; reshape it."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating, got {array.dtype}; cast it, or view stored bytes as values.")
    return array


@operation("dtype")
def read_slots(leaf: jax.Array, slots: jax.Array, *, dtype: Any) -> jax.Array:
    """leaf[slots] in `dtype`, [m, *shape]; the sink's zeros where a slot is outside."""
    return decode(take(leaf, int32("slots", slots, 1)), dtype, leaf.dtype)


@operation("dtype")
def write_slots(leaf: jax.Array, slots: jax.Array, values: jax.Array, *, dtype: Any) -> jax.Array:
    """leaf[slots] = values; slot 0 and slots outside the leaf write nothing."""
    slots = int32("slots", slots, 1)
    values = values_of("the state", values, (slots.shape[0], *leaf.shape[1:]))
    return put(leaf, slots, encode(values, dtype, leaf.dtype), lower=FIRST)


@state
class ShortConvPool:
    """The last inputs of a short convolution, one window per slot and layer (SGLang: ShortConvPool)."""

    conv: tuple[jax.Array, ...]  # per layer: store_dtype[size + 1, *shape]; none when disabled
    size: int = static()  # slots
    dtype: np.dtype = static()  # what the values mean

    @classmethod
    def create(
        cls, size: int, num_layers: int, shape: Sequence[int] | None, dtype: Any = jnp.bfloat16, store_dtype: Any = None
    ) -> ShortConvPool:
        """Windows of zeros. Disabled without layers (0) or without a shape (None or ()). ValueError for other sizes."""
        rows, dtype = slot_rows(size), pool_dtype(dtype)
        store = resolve_store_dtype(dtype, store_dtype)
        if num_layers == 0 or not shape:
            return cls((), rows - 1, dtype)
        layers, window = positive("num_layers", num_layers), shape_of("shape", shape)
        return cls(tuple(jnp.zeros((rows, *window), store) for _ in range(layers)), rows - 1, dtype)

    @property
    def enabled(self) -> bool:
        return bool(self.conv)

    @property
    def reset_value(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return leaves.leaf_bytes(self.conv)

    def slot_leaves(self) -> tuple[jax.Array, ...]:
        return self.conv

    def with_slot_leaves(self, leaves: tuple[jax.Array, ...]) -> ShortConvPool:
        return dataclasses.replace(self, conv=leaves)

    def layer_cache(self, layer: int) -> jax.Array:
        """The stored leaf of a layer (0 .. num_layers - 1), whole; ValueError outside, or when disabled."""
        if not self.enabled:
            raise ValueError(
                "this ShortConvPool is disabled (it has no layers); create it with num_layers and a shape."
            )
        return self.conv[leaves.layer_index(layer, 0, len(self.conv))]

    def read(self, layer: int, slots: Any) -> jax.Array:
        """Windows [m, *shape] in `dtype` of slots i32[m]."""
        return read_slots(self.layer_cache(layer), slots, dtype=self.dtype)

    def write(self, layer: int, slots: Any, values: Any) -> ShortConvPool:
        """Store values [m, *shape] in slots i32[m]; slot 0 and slots outside write nothing."""
        leaf = write_slots(self.layer_cache(layer), slots, values, dtype=self.dtype)
        return dataclasses.replace(self, conv=leaves.replaced(self.conv, int(layer), leaf))


@state
class NGramPool:
    """The last tokens of each request (SGLang: NGramPool). A fresh context is full of the end-of-sequence id."""

    context: jax.Array | None  # i32[size + 1, length]; None when disabled
    size: int = static()  # slots
    eos_id: int = static()

    @classmethod
    def create(cls, size: int, length: int, eos_id: int) -> NGramPool:
        """Contexts of `length` tokens, all eos_id. Disabled at a length of 0 or below. ValueError for a bad id."""
        rows = slot_rows(size)
        if isinstance(eos_id, bool) or not isinstance(eos_id, (int, np.integer)) or not 0 <= eos_id <= INT32_MAX:
            raise ValueError(f"eos_id must be a token id from 0 to {INT32_MAX}, got {eos_id!r}; pass a Python int.")
        if length <= 0:
            return cls(None, rows - 1, int(eos_id))
        return cls(jnp.full((rows, positive("length", length)), int(eos_id), jnp.int32), rows - 1, int(eos_id))

    @property
    def enabled(self) -> bool:
        return self.context is not None

    @property
    def reset_value(self) -> int:
        return self.eos_id

    @property
    def nbytes(self) -> int:
        return leaves.leaf_bytes(self.slot_leaves())

    def slot_leaves(self) -> tuple[jax.Array, ...]:
        return () if self.context is None else (self.context,)

    def with_slot_leaves(self, leaves: tuple[jax.Array, ...]) -> NGramPool:
        return dataclasses.replace(self, context=leaves[0] if leaves else None)

    def _enabled(self) -> jax.Array:
        if self.context is None:
            raise ValueError("this NGramPool is disabled (its length is 0); create it with a length of at least 1.")
        return self.context

    def get_context(self, slots: Any) -> jax.Array:
        """i32[m, length]: the tokens of slots i32[m]; ValueError when disabled."""
        return _gather(self._enabled(), slots)

    def set_context(self, slots: Any, tokens: Any) -> NGramPool:
        """Store tokens i32[m, length] in slots i32[m]; slot 0 and slots outside write nothing."""
        return dataclasses.replace(self, context=_scatter(self._enabled(), slots, tokens))


@operation()
def _gather(context: jax.Array, slots: jax.Array) -> jax.Array:
    return take(context, int32("slots", slots, 1))


@operation()
def _scatter(context: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    slots, tokens = int32("slots", slots, 1), int32("tokens", tokens, 2)
    if tokens.shape != (slots.shape[0], context.shape[1]):
        raise ValueError(f"tokens {tokens.shape} must be [slots, length] = {(slots.shape[0], context.shape[1])}.")
    return put(context, slots, tokens, lower=FIRST)
