"""Where an entry of a page table lies, computed by the helper of the Triton kernels and read by nobody."""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.triton_books import table_entry


@triton.jit
def _kernel(entry, out):
    row = tl.load(entry)
    column = tl.load(entry + 1)
    distance = table_entry(out, row, column, tl.load(entry + 2)).to(tl.int64) - out.to(tl.int64)
    tl.store(out, (distance >> 31).to(tl.int32))
    tl.store(out + 1, (distance & 0x7FFFFFFF).to(tl.int32))


def bytes_to(entry: jax.Array) -> jax.Array:
    """i32[2]: bytes from the table's beginning to [row, column] of a table of that width, high part and low 31 bits.

    entry: i32[3], row, column, width.
    """
    (out,) = jax_triton_adapter.call(_kernel, (entry,), grid=(1,), out_shapes=(jax.ShapeDtypeStruct((2,), jnp.int32),))
    return out
