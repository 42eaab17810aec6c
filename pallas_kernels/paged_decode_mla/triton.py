"""paged_decode_mla as Triton kernels, shared with its siblings."""

import jax

from pallas_kernels.attention import plan
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.triton_core import attend


def paged_decode_mla(*arrays: jax.Array, options: Options) -> jax.Array:
    """See `pallas_kernels.paged_decode_mla`, which checks the arguments."""
    return attend(*arrays, options=options)


def unsupported(*_: jax.Array, options: Options) -> str | None:
    """Why these kernels cannot do the call."""
    return plan.unsupported(options)
