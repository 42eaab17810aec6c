"""alloc_decode as one Pallas program (Triton lowering): load the lanes, prefix-sum, gather, store.

One program serves the whole batch, so nothing is shared between programs. The lanes are padded to a power of two;
a padding lane repeats the last real lane, and because it computes the same value it may store it there again:
no masked store is needed (interpret mode writes old values through the index of a masked one).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import at_most, power_of_two, warps_of


def _kernel(stack, free_count, seq_lens, last_loc, active, loc, new_pages, ok, *, page_size: int):
    batch = seq_lens.shape[0]
    lane = jnp.arange(power_of_two(batch), dtype=jnp.int32)
    real = lane < batch
    lane = jnp.minimum(lane, batch - 1)
    seq, last = plgpu.load(seq_lens.at[lane]), plgpu.load(last_loc.at[lane])
    free = free_count[()]

    listed = (plgpu.load(active.at[lane]) != 0) & (seq >= 1)
    opens = listed & (lax.rem(seq - 1, jnp.int32(page_size)) == 0)
    taken = (opens & real).astype(jnp.int32)
    total = jnp.sum(taken)
    rank = jnp.cumsum(taken) - opens.astype(jnp.int32)  # exclusive; a padding lane gets its twin's
    enough = total <= free

    served = opens & enough
    page = plgpu.load(stack.at[jnp.where(served, free - 1 - rank, 0)])
    slot = jnp.where(served, page * page_size, last + 1)
    plgpu.store(loc.at[lane], jnp.where(listed & enough, slot, 0))
    new_pages[()] = jnp.where(enough, total, 0)
    ok[()] = enough


unsupported = at_most(4096)  # with more, ptxas spills


def alloc_decode(
    stack: jax.Array,
    free_count: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    *,
    page_size: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.alloc_decode`, which checks the arguments."""
    batch = seq_lens.shape[0]
    return pl.pallas_call(
        functools.partial(_kernel, page_size=page_size),
        out_shape=(
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=warps_of(batch), num_stages=1),
        interpret=interpret,
        name="alloc_decode",
    )(stack, free_count, seq_lens, last_loc, active)
