"""Safe indexing: the one helper between computed indices and the arrays that they write to or read from.

JAX wraps -1 to the last element even with `mode="drop"`, and compiles a scatter without `unique_indices` into a
compare-and-swap loop per element for narrow dtypes. It stands here, and not in `kvjax.indexing` (which hands it on),
because the references of the kernels need it and this package imports nothing from kvjax.
"""

import jax
import jax.numpy as jnp

INT32_MAX = 2**31 - 1


def in_range(idx: jax.Array, limit: int | jax.Array, lower: int = 0) -> jax.Array:
    """bool, shape of idx: lower <= idx < limit."""
    return (idx >= lower) & (idx < limit)


def parked(idx: jax.Array, limit: int, valid: jax.Array) -> jax.Array:
    """`idx` where valid, and a distinct index past the end elsewhere: limit + lane.

    Distinct, because a scatter that promises unique indices must not see the same dropped index twice.
    """
    if limit + idx.size > INT32_MAX:
        raise ValueError(
            f"an array of {limit} entries leaves no int32 indices for {idx.size} dropped lanes "
            f"(the limit is {INT32_MAX}); make the array or the batch smaller."
        )
    lane = jnp.arange(idx.size, dtype=jnp.int32).reshape(idx.shape)
    return jnp.where(valid, idx, limit + lane)


def put(array: jax.Array, idx: jax.Array, values, *, valid: jax.Array | None = None, lower: int = 0) -> jax.Array:
    """array[idx] = values along axis 0; lanes outside [lower, len(array)) or not `valid` write nothing.

    idx: i32[...]; values broadcast to idx.shape + array.shape[1:]. Which of two equal real indices wins is undefined.
    """
    limit = array.shape[0]
    ok = in_range(idx, limit, lower)
    if valid is not None:
        ok &= valid
    return array.at[parked(idx, limit, ok)].set(values, mode="drop", unique_indices=True)


def take(array: jax.Array, idx: jax.Array) -> jax.Array:
    """array[idx] along axis 0, shape idx.shape + array.shape[1:]; entry 0, the padding, where idx is outside."""
    return array.at[jnp.where(in_range(idx, array.shape[0]), idx, 0)].get(mode="promise_in_bounds")


def take2(array: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
    """array[row, col] elementwise; row 0, column 0 where either is outside."""
    ok = in_range(row, array.shape[0]) & in_range(col, array.shape[1])
    return array.at[jnp.where(ok, row, 0), jnp.where(ok, col, 0)].get(mode="promise_in_bounds")
