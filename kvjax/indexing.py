"""Safe indexing: the one helper between computed indices and arrays.

JAX wraps -1 to the last element even with `mode="drop"`, clamps reads that run past the end, and compiles a scatter
without `unique_indices` into a compare-and-swap loop per element for narrow dtypes. Everything that may be out of
range goes through here instead: a write outside is dropped, a read outside gives a value that the caller names.
What the references of the kernels need too stands in `pallas_kernels.indexing` and is handed on here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels.indexing import in_range as in_range
from pallas_kernels.indexing import parked as parked
from pallas_kernels.indexing import put as put
from pallas_kernels.indexing import take as take
from pallas_kernels.indexing import take2 as take2


def put2(array: jax.Array, row: jax.Array, col: jax.Array, values, *, valid: jax.Array) -> jax.Array:
    """array[row, col] = values; row and col i32 of one shape; lanes outside the array or not `valid` write nothing."""
    ok = valid & in_range(row, array.shape[0]) & in_range(col, array.shape[1])
    return array.at[parked(row, array.shape[0], ok), jnp.where(ok, col, 0)].set(
        values, mode="drop", unique_indices=True
    )


def take_short(array: jax.Array, idx: jax.Array) -> jax.Array:
    """`take` for a read that is short beside a list as long as the pool; on a CPU its cost does not grow with the list.

    For lists that the same program also writes: of one that is only read, XLA may make a copy.
    """
    at = jnp.where(in_range(idx, array.shape[0]), idx, 0)
    # One entry is never split, and XLA reads it by a slice.
    return _gathered(array, at) if array.ndim != 1 or at.size < 2 else _gathered_on_one_thread(array, at)


def _gathered(array: jax.Array, at: jax.Array) -> jax.Array:
    return array.at[at].get(mode="promise_in_bounds")


# XLA's CPU backend takes a fused gather for as much work as its whole operand, and splits a read of 64 entries of a
# list of half a MiB over threads: 1 to 2 us, several times the read. An operand that a small write has gone through
# counts as the size of that write. So entry 0 is put back where it stands, at an index that XLA cannot know; the
# fusion then checks an index per entry read, and nothing is written.
@custom_vmap  # batched, the write would be a scatter, and real
def _gathered_on_one_thread(array: jax.Array, at: jax.Array) -> jax.Array:
    def through_write(array: jax.Array, at: jax.Array) -> jax.Array:
        start = jnp.minimum(at.reshape(-1)[0], 0)  # 0: `at` is in range
        return _gathered(lax.dynamic_update_slice(array, array[:1], (start,)), at)

    return lax.platform_dependent(array, at, cpu=through_write, default=_gathered)


@_gathered_on_one_thread.def_vmap
def _(_, in_batched, array: jax.Array, at: jax.Array) -> tuple[jax.Array, bool]:
    axes = tuple(0 if batched else None for batched in in_batched)
    return jax.vmap(_gathered, in_axes=axes)(array, at), True
