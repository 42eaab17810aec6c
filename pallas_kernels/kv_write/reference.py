"""kv_write in plain jax.numpy: the meaning of the operation. One scatter per leaf."""

import jax
import jax.numpy as jnp

from pallas_kernels.indexing import put
from pallas_kernels.kv_write.encoding import encode
from pallas_kernels.kv_write.plan import FIRST_WRITABLE


def kv_write(leaves, values, scales, loc, valid, *, dtype) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.kv_write`, which checks the arguments."""
    return tuple(
        put(leaf, loc, stored_rows(leaf, parts, scale, dtype), valid=valid, lower=FIRST_WRITABLE)
        for leaf, parts, scale in zip(leaves, values, scales, strict=True)
    )


def stored_rows(leaf: jax.Array, parts, scale, dtype) -> jax.Array:
    """The parts side by side as rows of `leaf`: [n, heads, width] in the leaf's dtype, zeros behind the parts."""
    stored = [encode(part, dtype, leaf.dtype, scale) for part in parts]
    pad = leaf.shape[-1] - sum(part.shape[-1] for part in parts)
    if pad:  # columns behind the parts belong to every written row, so they are zero after any write
        stored.append(jnp.zeros((*parts[0].shape[:-1], pad), leaf.dtype))
    return jnp.concatenate(stored, axis=-1) if len(stored) > 1 else stored[0]
