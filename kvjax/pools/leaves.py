"""What all KV pools share: their leaves, one buffer of [slots, heads, width] per layer and kind.

Each layer's buffer is a leaf of its own, so that a layer can be donated, moved and waited for alone. Indices into a
leaf are (slot, head, column): no slot * row_bytes product is formed in int32, so a leaf may pass 2^31 elements.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.indexing import in_range, put, take
from kvjax.layout import INT32_MAX, positive
from kvjax.operation import as_array, int32, operation, same_length
from kvjax.pools.dtypes import decode
from pallas_kernels.kv_write.plan import FIRST_WRITABLE


def zero_leaves(count: int, slots: int, row: tuple[int, int], store_dtype: Any) -> tuple[jax.Array, ...]:
    """`count` separate zero buffers of [slots, *row]; one array shared by two leaves could not be donated."""
    return tuple(jnp.zeros((slots, *row), store_dtype) for _ in range(count))


def first_layer(start_layer: Any, num_layers: int) -> int:
    """start_layer as a Python int; ValueError unless 0 <= start_layer and the last id fits int32."""
    try:
        start = operator.index(start_layer)
    except TypeError:
        raise ValueError(f"start_layer must be a whole number, got {start_layer!r}; pass a Python int.") from None
    if not 0 <= start <= INT32_MAX - num_layers:
        raise ValueError(f"start_layer must be 0 or more, got {start}; it is the global id of the pool's first layer.")
    return start


def layer_index(layer_id: Any, start_layer: int, num_layers: int) -> int:
    """Position of a global layer id in the pool; ValueError outside [start_layer, start_layer + num_layers)."""
    try:
        layer = operator.index(layer_id)
    except TypeError:
        raise ValueError(
            f"layer_id must be a Python int (it picks a buffer while tracing), got {type(layer_id).__name__}; "
            "unroll the loop over layers."
        ) from None
    if not start_layer <= layer < start_layer + num_layers:
        raise ValueError(
            f"layer {layer} is not in this pool, which holds layers {start_layer} .. {start_layer + num_layers - 1}; "
            "layer ids are global, so do not subtract start_layer."
        )
    return layer - start_layer


def replaced(leaves: tuple[jax.Array, ...], index: int, leaf: jax.Array) -> tuple[jax.Array, ...]:
    """leaves with the one at `index` exchanged."""
    return (*leaves[:index], leaf, *leaves[index + 1 :])


def leaf_bytes(leaves: tuple[jax.Array, ...]) -> int:
    """Bytes of all leaves, as a Python int (also for abstract leaves)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def row_bytes(leaves: tuple[jax.Array, ...]) -> int:
    """Bytes of one slot over all leaves, as a Python int."""
    return sum(math.prod(leaf.shape[-2:]) * leaf.dtype.itemsize for leaf in leaves)


def rows_of(name: str, values: Any, count: int, row: tuple[int, int]) -> jax.Array:
    """`values` as a floating array of shape [count, *row]; ValueError otherwise."""
    array = as_array(name, values)
    if array.shape != (count, *row):
        raise ValueError(
            f"{name} has shape {array.shape}, but {count} locations and rows of {row} need {(count, *row)}; "
            "reshape it to [tokens, heads, width], one token for each location."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating, got {array.dtype}; cast it, or view stored bytes as values.")
    return array


def scale_of(name: str, value: Any) -> Any:
    """A scale as a float or scalar array, None if there is none; ValueError unless it is a scalar."""
    if value is None or isinstance(value, float):
        return value
    array = as_array(name, value) if not isinstance(value, str | bytes | complex) else None
    if array is None or not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(f"{name} must be a real number, got {value!r}; pass a float or a floating array of shape ().")
    array = array.astype(jnp.float32)
    if array.ndim:
        raise ValueError(
            f"{name} must be one scalar for the whole tensor, got shape {array.shape}; pass a float or an array of "
            "shape ()."
        )
    return array


def locations(name: str, loc: Any) -> jax.Array:
    """loc as i32 of any rank."""
    array = as_array(name, loc)
    return int32(name, array, array.ndim)


def write_rows(leaf: jax.Array, loc: jax.Array, stored: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """leaf[loc] = stored; slot 0, locations outside the leaf and lanes that are not valid write nothing."""
    return put(leaf, loc, stored, valid=valid, lower=FIRST_WRITABLE)


@operation("dtype")
def read_rows(leaf: jax.Array, loc: Any, *, dtype: Any) -> jax.Array:
    """leaf[loc] in `dtype`, shape loc.shape + leaf.shape[1:]; the padding row where a location is outside."""
    return decode(take(leaf, locations("loc", loc)), dtype, leaf.dtype)


@operation()
def move_rows(leaves: Any, dst: Any, src: Any) -> Any:
    """leaf[dst] = leaf[src] on every leaf, all sources read before any target is written.

    A lane moves only if both ends are real slots: padding is neither written nor spread.
    """
    dst, src = int32("dst", dst, 1), int32("src", src, 1)
    same_length(dst=dst, src=src)
    return jax.tree.map(
        lambda leaf: write_rows(leaf, dst, take(leaf, src), in_range(src, leaf.shape[0], FIRST_WRITABLE)), leaves
    )


def prefix_valid(loc: Any, commit_lens: Any) -> tuple[jax.Array, jax.Array]:
    """(loc i32[b * t], valid bool[b * t]) of loc i32[b, t], where position t of lane b counts if t < commit_lens[b]."""
    loc, commit_lens = int32("loc", loc, 2), int32("commit_lens", commit_lens, 1)
    same_length(loc=loc, commit_lens=commit_lens)
    valid = jnp.arange(loc.shape[1], dtype=jnp.int32)[None, :] < commit_lens[:, None]
    return loc.reshape(-1), valid.reshape(-1)


def sizes(**values: Any) -> tuple[int, ...]:
    """Each value as a Python int >= 1, in order; ValueError naming the one that is not."""
    return tuple(positive(name, value) for name, value in values.items())
