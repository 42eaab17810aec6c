"""A leaf of more than 2^31 bytes for the interpreter: mapped, and hardly any of it in memory."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import jax_triton_adapter
from pallas_kernels.kv_write import triton
from tests.kernels import triton_interpreter

SLOTS, WIDTH = 254_300, 8_448
ONE = 0x38  # in e4m3fn


def rows_written(loc) -> np.ndarray:
    """The rows of a leaf [SLOTS, 1, WIDTH] of bytes that are not zero after a write of ones at `loc`."""
    leaf = np.zeros((SLOTS, 1, WIDTH), np.uint8)  # the system gives memory to the pages that are written
    values = np.ones((len(loc), 1, WIDTH), np.float32)
    replaced = jax_triton_adapter.call
    jax_triton_adapter.call = triton_interpreter.call_on_the_arrays
    try:
        triton.kv_write((leaf,), ((values,),), (None,), np.asarray(loc), None, dtype=jnp.dtype("float8_e4m3fn"))
    finally:
        jax_triton_adapter.call = replaced
    assert (leaf[loc] == ONE).all()
    return np.nonzero(leaf[:, 0, 0])[0]
