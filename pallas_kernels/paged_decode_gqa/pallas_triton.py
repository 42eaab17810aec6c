"""paged_decode_gqa as Pallas kernels (Triton lowering), shared with its siblings."""

import jax

from pallas_kernels.attention.options import Options
from pallas_kernels.attention.pallas_core import attend, why_not


def paged_decode_gqa(*arrays: jax.Array, options: Options, interpret: bool = False) -> jax.Array:
    """See `pallas_kernels.paged_decode_gqa`, which checks the arguments."""
    return attend(*arrays, options=options, interpret=interpret)


def unsupported(*arrays: jax.Array, options: Options) -> str | None:
    """Why this kernel cannot do the call."""
    return why_not(*arrays, options=options)
