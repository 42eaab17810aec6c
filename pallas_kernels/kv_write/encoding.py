"""What a value becomes before it is stored: divided, clamped, cast, and its bits in the dtype of the buffer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def encode(values: jax.Array, dtype: Any, store_dtype: Any, scale: Any = None) -> jax.Array:
    """Floating `values` as a pool of `dtype` stores them: [divide,] clamp (fp8), cast, bitcast.

    scale: scalar or None; divides, and the quotient is rounded to the input's dtype, before the cast. Whether a scale
    applies is the pool's decision (`MHATokenToKVPool.set_kv_buffer`), not made here.
    fp8 saturates at 448 (e4m3fn) and 57,344 (e5m2), where a bare cast gives NaN or infinity; NaN stays NaN.
    """
    dtype = jnp.dtype(dtype)
    if scale is not None:
        values = _divide(divisible(values), scale)
    if values.dtype != dtype:
        values = divisible(values)  # one kind of fp8 may not hold the other's bound
        if dtype.itemsize == 1:
            bound = float(jnp.finfo(dtype).max)
            values = jnp.clip(values, -bound, bound)
        values = values.astype(dtype)
    return values if dtype == store_dtype else lax.bitcast_convert_type(values, store_dtype)


def divisible(values: jax.Array) -> jax.Array:
    """fp8 values as float32, others as they are: JAX does not promote fp8, and its quotients lose digits."""
    return values.astype(jnp.float32) if values.dtype.itemsize == 1 else values


def _divide(values: jax.Array, scale: Any) -> jax.Array:
    """values / scale, computed in float32 and rounded to the dtype of values (what torch does on a CPU)."""
    wide = jnp.promote_types(values.dtype, jnp.float32)
    # The divisor is materialised at full size: XLA turns x / broadcast(s) and x / constant into a multiplication by
    # 1 / s, which changes a third of the float32 quotients by one unit. A barrier on the scalar does not stop it.
    divisor = lax.optimization_barrier(jnp.full(values.shape, scale, wide))
    quotient = values.astype(wide) / divisor
    if values.dtype == jnp.bfloat16:
        # Explicit, because XLA may drop a cast to bfloat16 that is followed by another cast (excess precision).
        quotient = lax.reduce_precision(quotient, exponent_bits=8, mantissa_bits=7)
    elif values.dtype != wide:
        # float16: reduce_precision would flush its subnormals, so the cast itself is kept from being dropped.
        return lax.optimization_barrier(quotient.astype(values.dtype))
    return quotient.astype(values.dtype)
