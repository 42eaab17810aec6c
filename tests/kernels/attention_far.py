"""A pool that pretends to be larger than memory, for Triton's interpreter: its rows lie 2^32 bytes behind its pointer.

Runs in the process of `triton_interpreter` only. An offset that is computed in 32 bits ends outside of the process.
"""

import dataclasses
import sys
from typing import Any

import jax
import numpy as np

from pallas_kernels.attention import triton
from pallas_kernels.attention.options import Options

FAR = 2**32  # bytes, at least


def attend_far(q, k, table, *arrays: jax.Array, options: Options) -> jax.Array:
    """`triton.attend` on pools whose slots all come after `FAR` bytes that nobody owns."""
    row_bytes = k.shape[1] * k.shape[2] * k.dtype.itemsize
    skipped = -(-FAR // row_bytes)
    buffers: Any = vars(sys.modules["__main__"])["_Tensor"]
    near, plain = buffers.data_ptr, triton.make_plan

    def data_ptr(buffer) -> int:
        return near(buffer) - skipped * row_bytes * (buffer.array.shape == k.shape)

    def make_plan(*given):
        return dataclasses.replace(plan := plain(*given), slots=plan.slots + skipped)

    buffers.data_ptr, triton.make_plan = data_ptr, make_plan
    try:
        return triton.attend(q, k, np.asarray(table) + skipped, *arrays, options=options)
    finally:
        buffers.data_ptr, triton.make_plan = near, plain
