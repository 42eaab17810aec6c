"""A small Triton kernel for the tests of the adapter: adds to rows of a buffer in place, and says what was there."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter


@triton.jit
def _kernel(buffer, rows, old, _, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0)
    row = tl.load(rows + lane).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    value = tl.load(buffer + row * WIDTH + column, mask=here)
    tl.store(old + lane * WIDTH + column, value, mask=here)
    tl.store(buffer + row * WIDTH + column, value + 1, mask=here)


def add_rows(buffer: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(buffer with 1 added to buffer[rows], buffer[rows] before that); f32[n, width], i32[m] without duplicates."""
    width = buffer.shape[1]
    buffer, old = jax_triton_adapter.call(
        _kernel,
        (buffer, rows),
        grid=(rows.shape[0],),
        in_place=(0,),
        out_shapes=(jax.ShapeDtypeStruct((rows.shape[0], width), jnp.float32),),
        num_warps=1,
        WIDTH=width,
        BLOCK=128,
    )
    return buffer, old
