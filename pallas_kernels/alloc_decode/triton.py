"""alloc_decode as one Triton program: load the lanes, prefix-sum, gather, store.

One program serves the whole batch, so nothing is shared between programs.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.arguments import at_most, power_of_two, warps_of
from pallas_kernels.triton_books import exclusive, only_if


@triton.jit
def _kernel(
    stack,
    free_count,
    seq_lens,
    last_loc,
    active,
    loc,
    new_pages,
    ok,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
):
    free = tl.load(free_count)
    lane = tl.arange(0, LANES)
    real = lane < BATCH
    seq = tl.load(seq_lens + lane, mask=real, other=0)
    last = tl.load(last_loc + lane, mask=real, other=0)
    listed = (tl.load(active + lane, mask=real, other=0) != 0) & (seq >= 1)
    opens = listed & ((seq - 1) % PAGE == 0)

    opened = opens.to(tl.int32)
    total = tl.sum(opened, 0)
    good = total <= free
    page = tl.load(stack + free - 1 - exclusive(opened), mask=only_if(good, opens), other=0)
    slot = tl.where(opens, page * PAGE, last + 1)
    tl.store(loc + lane, tl.where(only_if(good, listed), slot, 0), mask=real)
    tl.store(new_pages, tl.where(good, total, 0))
    tl.store(ok, good)


unsupported = at_most(4096)  # with more, ptxas spills


def alloc_decode(
    stack: jax.Array,
    free_count: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    *,
    page_size: int,
) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.alloc_decode`, which checks the arguments."""
    batch = seq_lens.shape[0]
    return jax_triton_adapter.call(
        _kernel,
        (stack, free_count, seq_lens, last_loc, active),
        grid=(1,),
        out_shapes=(
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        num_warps=warps_of(batch),
        num_stages=1,
        BATCH=batch,
        LANES=power_of_two(batch),
        PAGE=page_size,
    )
