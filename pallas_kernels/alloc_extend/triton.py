"""alloc_extend as one Triton kernel, one program per block of output tokens.

Every program sums up the lanes for itself (b numbers in registers), so programs share nothing and one launch is
enough; long and short lanes cost the same, because the grid follows the output and not the lanes.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.alloc_extend.plan import WARPS, block_size
from pallas_kernels.arguments import at_most, power_of_two
from pallas_kernels.triton_books import ceil_div, slots_of


@triton.jit
def _kernel(
    stack,
    free_count,
    prefix_lens,
    seq_lens,
    last_loc,
    loc,
    new_pages,
    ok,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
):
    free = tl.load(free_count)
    lane = tl.arange(0, LANES)
    real = lane < BATCH
    prefix = tl.load(prefix_lens + lane, mask=real, other=0)
    seq = tl.load(seq_lens + lane, mask=real, other=0)
    last = tl.load(last_loc + lane, mask=real, other=0)
    started = ceil_div(prefix, PAGE)  # pages that the prefix touches
    needed = ceil_div(seq, PAGE) - started
    end = tl.cumsum(seq - prefix, 0)
    begin = end - (seq - prefix)
    first = tl.cumsum(needed, 0) - needed  # rank of the lane's first new page
    tokens = tl.sum(seq - prefix, 0)
    needs = tl.sum(needed, 0)
    good = (needs <= free) & (tokens <= CAPACITY)

    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.where(good, tokens, 0)
    slot, _, _ = slots_of(token, used, begin, end, prefix, started, first, last, stack, free, 0, PAGES, PAGE, False)
    tl.store(loc + token, slot, mask=token < CAPACITY)
    if tl.program_id(0) == 0:
        tl.store(new_pages, tl.where(good, needs, 0))
        tl.store(ok, good)


unsupported = at_most(4096)  # with more, ptxas spills


def alloc_extend(
    stack: jax.Array,
    free_count: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    *,
    page_size: int,
    capacity: int,
) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.alloc_extend`, which checks the arguments."""
    batch = prefix_lens.shape[0]
    block = block_size(batch, capacity)
    return jax_triton_adapter.call(
        _kernel,
        (stack, free_count, prefix_lens, seq_lens, last_loc),
        grid=(-(-capacity // block),),
        out_shapes=(
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        num_warps=WARPS,
        num_stages=1,
        BATCH=batch,
        LANES=power_of_two(batch),
        BLOCK=block,
        CAPACITY=capacity,
        PAGES=stack.shape[0],
        PAGE=page_size,
    )
