"""Many weights, few rows: the one place that says how activations and a weight matrix are multiplied.

Matrices are [out, in], as checkpoints store them. A decode step reads each of them once for a handful of rows, so it
lasts as long as that reading. XLA's CPU backend repacks the right operand of a matmul and streams the left one, and its
kernels take the other side in fours or eights. So for few rows the matrix stands on the left and the rows are filled up
to such a number; all matmuls of a SmolLM2 step for 6 rows take 37 ms that way, and 44 ms as `x @ [in, out]`.
From some hundred rows on the arithmetic decides, and the plain form is faster.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.registry import target_platform

FEW_ROWS = 64


def project(x: jax.Array, matrix: jax.Array, *, precision: Any = None, preferred_element_type: Any = None) -> jax.Array:
    """x @ matrix.T: x [..., in], matrix [out, in] -> [..., out]; precision and element type as in `jnp.matmul`."""
    rows = math.prod(x.shape[:-1])
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    if not (1 < rows <= FEW_ROWS and matrix.dtype == jnp.float32 and target_platform() == "cpu"):
        return jnp.einsum("...i,oi->...o", x, matrix, **how)
    # A float32 matmul is exact on a CPU whatever its precision says, but only the default finds the fast kernels. The
    # barriers keep XLA from turning the product around again.
    filled = 4 if rows <= 4 else -(-rows // 8) * 8
    flat = lax.optimization_barrier(jnp.pad(x.reshape(rows, -1), ((0, filled - rows), (0, 0))))
    out = lax.dot_general(matrix, flat, (((1,), (1,)), ((), ())), preferred_element_type=preferred_element_type)
    return lax.optimization_barrier(out).T[:rows].reshape(*x.shape[:-1], -1)
