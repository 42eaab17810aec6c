"""kv_write as one Pallas program per token (Triton lowering), in place.

A program stores its row in chunks of a power of two. A dropped token's program names row 0 in its masked stores, and
never an index outside: the interpreter would shift such a scalar index into the leaf.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import power_of_two
from pallas_kernels.kv_write import plan
from pallas_kernels.kv_write.encoding import encode
from pallas_kernels.kv_write.plan import FIRST_WRITABLE, VECTOR, parts_of

WARPS = 4


def _kernel(loc, *refs, parts, leaf_of, dtype, slots):
    """refs: the values, then the leaves (aliased: not used here), then the leaves as outputs."""
    values, leaves = refs[: len(parts)], refs[len(refs) - len(set(leaf_of)) :]
    slot = loc[pl.program_id(0)]
    kept = (slot >= FIRST_WRITABLE) & (slot < slots)
    slot = jnp.where(kept, slot, 0)
    for value, part, index in zip(values, parts, leaf_of, strict=True):
        leaf = leaves[index]
        chunk = min(power_of_two(part.room), WARPS * 32 * VECTOR // leaf.dtype.itemsize)
        for start in range(0, part.room, chunk):
            column = start + jnp.arange(chunk, dtype=jnp.int32)
            inside = jnp.minimum(column, part.width - 1) if start + chunk > part.width else column
            row = plgpu.load(value.at[pl.program_id(0), inside])
            stored = encode(row, dtype, leaf.dtype)
            if part.room > part.width:
                stored = jnp.where(column < part.width, stored, jnp.zeros_like(stored))
            written = kept & (column < part.room)
            plgpu.store(leaf.at[slot, part.offset + column], stored, mask=written)


def kv_write(leaves, values, scales, loc, valid, *, dtype, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.kv_write`, which checks the arguments."""
    if valid is not None:
        loc = jnp.where(valid, loc, 0)
    parts = [part for one in zip(leaves, values, scales, strict=True) for part in parts_of(*one)]
    leaf_of = [index for index, of_leaf in enumerate(values) for _ in of_leaf]
    # A scaled part is divided before the kernel: in the kernel a division would be an approximation.
    flat = [
        value if scale is None else encode(value, dtype, dtype, scale)
        for of_leaf, scale in zip(values, scales, strict=True)
        for value in of_leaf
    ]
    flat = [value.reshape(loc.shape[0], -1) for value in flat]
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(_kernel, parts=parts, leaf_of=leaf_of, dtype=dtype, slots=leaves[0].shape[0]),
        grid=(loc.shape[0],),
        in_specs=[whole] * (1 + len(flat) + len(rows)),
        out_specs=[whole] * len(rows),
        out_shape=[jax.ShapeDtypeStruct(row.shape, row.dtype) for row in rows],
        input_output_aliases={1 + len(flat) + index: index for index in range(len(rows))},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(loc, *flat, *rows)
    return tuple(new.reshape(leaf.shape) for new, leaf in zip(written, leaves, strict=True))


def unsupported(leaves, values, scales, loc, valid, *, dtype) -> str | None:
    """See `registry`."""
    del scales, valid
    for leaf in leaves:
        elements = math.prod(leaf.shape)
        if elements >= 2**31 and elements * leaf.dtype.itemsize <= 2**32:
            return (
                f"a leaf of {elements} elements in {elements * leaf.dtype.itemsize} bytes is addressed with 32 bits by "
                "Pallas, which looks at the bytes alone and goes to 64 bits past 2^32 of them"
            )
    return plan.unsupported(leaves, values, loc, dtype)
