"""paged_extend in plain jax.numpy: the meaning of the operation, shared with its siblings."""

import jax

from pallas_kernels.attention.options import Options
from pallas_kernels.attention.reference import attend


def paged_extend(*arrays: jax.Array, options: Options) -> jax.Array:
    """See `pallas_kernels.paged_extend`, which checks the arguments."""
    return attend(*arrays, options=options)
