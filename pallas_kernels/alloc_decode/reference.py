"""alloc_decode in plain jax.numpy: the meaning of the operation."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import from_top


def alloc_decode(
    stack: jax.Array,
    free_count: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.alloc_decode`, which checks the arguments."""
    listed = active & (seq_lens >= 1)
    opens = listed & (lax.rem(seq_lens - 1, jnp.int32(page_size)) == 0)
    # A prefix sum: on a CPU cumsum is linear, on a GPU the b x b compare-and-sum is one kernel without temporary.
    taken = lax.platform_dependent(opens.astype(jnp.int32), cuda=_prefix_by_compare, default=jnp.cumsum)
    new_pages = taken[-1]
    ok = new_pages <= free_count
    page = from_top(stack, free_count, taken - 1, taken.shape[0])
    loc = jnp.where(opens, page * page_size, last_loc + 1)
    return jnp.where(listed & ok, loc, 0), jnp.where(ok, new_pages, 0), ok


def _prefix_by_compare(x: jax.Array) -> jax.Array:
    lane = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(lane[None, :] <= lane[:, None], x[None, :], 0), axis=1, dtype=jnp.int32)
