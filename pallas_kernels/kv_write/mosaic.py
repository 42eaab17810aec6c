"""kv_write as one Pallas program per token (Mosaic GPU lowering), in place.

A program is one warpgroup. It reads the token's slot and copies its rows, 128 values at a time, which is the least that
this lowering has: so a row is a multiple of that. A part that fills its row is converted on the way; several parts, and
divided ones, XLA lays side by side first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.jax_triton_adapter import version_numbers
from pallas_kernels.kv_write import plan
from pallas_kernels.kv_write.encoding import encode
from pallas_kernels.kv_write.plan import FIRST_WRITABLE
from pallas_kernels.kv_write.reference import stored_rows

COLUMNS = 128  # threads of a warpgroup, each of which has at least one value


def _row(leaf: jax.Array, parts: tuple[jax.Array, ...], scale: Any, dtype: Any) -> jax.Array:
    """[n, columns]: the values of a leaf, as they are where the kernel can convert them, else as they are stored."""
    whole = len(parts) == 1 and parts[0].shape[1:] == leaf.shape[1:] and scale is None
    row = parts[0] if whole else stored_rows(leaf, parts, scale, dtype)
    return row.reshape(row.shape[0], -1)


def kv_write(leaves, values, scales, loc, valid, *, dtype, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.kv_write`, which checks the arguments."""
    if valid is not None:
        loc = jnp.where(valid, loc, 0)
    slots = leaves[0].shape[0]
    rows = [_row(*one, dtype) for one in zip(leaves, values, scales, strict=True)]

    def write(loc, *refs):
        token = lax.axis_index("token")
        slot = loc[token]

        @pl.when((slot >= FIRST_WRITABLE) & (slot < slots))
        def _():
            for row, leaf in zip(refs[: len(rows)], refs[len(rows) :], strict=True):
                value = row[token]
                if value.dtype != leaf.dtype:
                    if value.dtype != dtype:  # the only conversions to fp8 are those of float32
                        value = value.astype(jnp.float32)
                    value = encode(value, dtype, leaf.dtype)
                leaf[slot] = value

    # A buffer is updated in place as a reference; a result of the kernel would be a new one.
    written = [jax.new_ref(leaf.reshape(slots, -1)) for leaf in leaves]
    # By getattr: JAX below 0.11, which is refused before it comes here, has no such name, and a type checker minds.
    how: dict[str, Any] = {"interpret": getattr(plgpu, "InterpretGPUParams")()} if interpret else {}  # noqa: B009
    plgpu.kernel(write, grid=(loc.shape[0],), grid_names=("token",), **how)(loc, *rows, *written)
    return tuple(jax.freeze(new).reshape(leaf.shape) for new, leaf in zip(written, leaves, strict=True))


def unsupported(leaves, values, scales, loc, valid, *, dtype) -> str | None:
    """See `registry`."""
    del scales, valid
    if version_numbers(jax.__version__) < (0, 11):
        return (
            f"with JAX {jax.__version__} a Mosaic GPU kernel copies the buffer that it updates; it is in place from "
            "JAX 0.11 on"
        )
    for leaf in leaves:
        if math.prod(leaf.shape[1:]) % COLUMNS:
            return (
                f"a row of {leaf.shape[1]} heads x {leaf.shape[2]} is no multiple of {COLUMNS} values, which is what a "
                "Mosaic GPU program moves"
            )
    if plan.capability() < 90:
        return f"Mosaic GPU needs compute capability 9.0 and this GPU has {plan.capability() / 10}"
    return plan.unsupported(leaves, values, loc, dtype)
