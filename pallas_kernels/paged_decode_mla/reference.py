"""paged_decode_mla in plain jax.numpy: the meaning of the operation, shared with its siblings."""

import jax

from pallas_kernels.attention.options import Options
from pallas_kernels.attention.reference import attend


def paged_decode_mla(*arrays: jax.Array, options: Options) -> jax.Array:
    """See `pallas_kernels.paged_decode_mla`, which checks the arguments."""
    return attend(*arrays, options=options)
