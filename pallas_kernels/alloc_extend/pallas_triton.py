"""alloc_extend as one Pallas kernel (Triton lowering), one program per block of output tokens.

Every program sums up the lanes for itself (b numbers in registers), so programs share nothing and one launch is
enough; long and short lanes cost the same, because the grid follows the output and not the lanes. The last block
is moved back to end at the capacity: it stores tokens of its neighbour a second time, with the same values, so no
store is masked (interpret mode writes old values through the index of a masked one).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.alloc_extend.plan import WARPS, block_size
from pallas_kernels.arguments import at_most, ceil_div, div, power_of_two


def first_token(program, block: int, capacity: int):
    """Where the block of `program` begins; the last one ends with the output instead of reaching past it."""
    return jnp.minimum(program * block, capacity - block)


def _kernel(stack, free_count, prefix_lens, seq_lens, last_loc, loc, new_pages, ok, *, page_size: int, block: int):
    batch, capacity = prefix_lens.shape[0], loc.shape[0]
    lane = jnp.arange(power_of_two(batch), dtype=jnp.int32)
    real = lane < batch
    lane = jnp.minimum(lane, batch - 1)
    prefix, seq = plgpu.load(prefix_lens.at[lane]), plgpu.load(seq_lens.at[lane])
    new = jnp.where(real, seq - prefix, 0)
    pages = jnp.where(real, ceil_div(seq, page_size) - ceil_div(prefix, page_size), 0)
    end, page_end = jnp.cumsum(new), jnp.cumsum(pages)
    total, needed = jnp.sum(new), jnp.sum(pages)
    free = free_count[()]
    enough = (needed <= free) & (total <= capacity)

    token = first_token(pl.program_id(0), block, capacity) + jnp.arange(block, dtype=jnp.int32)
    passed = end[None, :] <= token[:, None]  # bool[block, lanes]: the lane lies wholly before the token
    mine = jnp.minimum(jnp.sum(passed.astype(jnp.int32), axis=1), batch - 1)
    start = jnp.max(jnp.where(passed, end[None, :], 0), axis=1)
    first = jnp.max(jnp.where(passed, page_end[None, :], 0), axis=1)

    base = plgpu.load(prefix_lens.at[mine])
    position = base + token - start
    nth = div(position, page_size) - ceil_div(base, page_size)  # negative: still the prefix's last page
    in_use = enough & (token < total)
    opened = in_use & (nth >= 0)
    page = plgpu.load(stack.at[jnp.where(opened, free - 1 - first - nth, 0)])
    fresh = page * page_size + lax.rem(position, jnp.int32(page_size))
    follow = plgpu.load(last_loc.at[mine]) + 1 + token - start
    plgpu.store(loc.at[token], jnp.where(opened, fresh, jnp.where(in_use, follow, 0)))

    @pl.when(pl.program_id(0) == 0)
    def _():
        new_pages[()] = jnp.where(enough, needed, 0)
        ok[()] = enough


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.alloc_extend`, which checks the arguments."""
    block = block_size(prefix_lens.shape[0], capacity)
    return pl.pallas_call(
        functools.partial(_kernel, page_size=page_size, block=block),
        out_shape=(
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        grid=(pl.cdiv(capacity, block),),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="alloc_extend",
    )(stack, free_count, prefix_lens, seq_lens, last_loc)
