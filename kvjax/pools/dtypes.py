"""Logical dtype and store dtype: what a pool means, and what its buffers are made of.

A pool of bfloat16 or fp8 values may be stored as unsigned integers of the same width (SGLang's `store_dtype`): the
CPU backend converts the whole buffer around a scatter into bfloat16 (JAX 0.10.2) or fp8 (every version), and such a
write costs as much as the pool is large. Integers are scattered in place. Only what was gathered is turned back,
never a whole pool.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SUPPORTED = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))
_UNSIGNED = {1: jnp.dtype(jnp.uint8), 2: jnp.dtype(jnp.uint16), 4: jnp.dtype(jnp.uint32)}


def pool_dtype(dtype: Any) -> np.dtype:
    """`dtype` as a numpy dtype that pools can hold; ValueError for any other."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in SUPPORTED:
        names = ", ".join(d.name for d in SUPPORTED)
        raise ValueError(f"pools hold {names}, not {dtype!r}; pass one of these as dtype.")
    return found


def default_store_dtype(dtype: Any, platform: str | None = None) -> np.dtype:
    """The dtype that `platform` (default: JAX's current backend) scatters in place for values of `dtype`.

    CPU: bfloat16 as uint16, fp8 as uint8. Elsewhere: fp8 as uint8. All others as they are. A program compiled for a
    platform that is not the current backend needs `store_dtype` spelled out when its pool is created.
    """
    dtype = pool_dtype(dtype)
    if dtype.itemsize == 1 or (dtype == jnp.bfloat16 and (platform or jax.default_backend()) == "cpu"):
        return _UNSIGNED[dtype.itemsize]
    return dtype


def resolve_store_dtype(dtype: Any, store_dtype: Any = None) -> np.dtype:
    """`store_dtype`, or the platform's default when None; ValueError unless it can hold `dtype` bit for bit."""
    dtype = pool_dtype(dtype)
    if store_dtype is None:
        return default_store_dtype(dtype)
    try:
        store = jnp.dtype(store_dtype)
    except TypeError:
        raise ValueError(
            f"store_dtype {store_dtype!r} is no dtype; pass {dtype.name}, {_UNSIGNED[dtype.itemsize].name} or None."
        ) from None
    if store not in (dtype, _UNSIGNED[dtype.itemsize]):
        raise ValueError(
            f"store_dtype {store.name} ({store.itemsize} bytes) cannot hold {dtype.name} ({dtype.itemsize} bytes) bit "
            f"for bit; pass {dtype.name}, {_UNSIGNED[dtype.itemsize].name}, or None for what the platform writes best."
        )
    return store


def encode(values: jax.Array, dtype: Any, store_dtype: Any, scale: Any = None) -> jax.Array:
    """Floating `values` as a pool of `dtype` stores them: [divide,] clamp (fp8), cast, bitcast.

    scale: scalar or None; divides, and the quotient is rounded to the input's dtype, before the cast. Whether a scale
    applies is the pool's decision (`MHATokenToKVPool.set_kv_buffer`), not made here.
    fp8 saturates at 448 (e4m3fn) and 57,344 (e5m2), where a bare cast gives NaN or infinity; NaN stays NaN.
    """
    dtype = jnp.dtype(dtype)
    if scale is not None:
        values = _divide(values, scale)
    if values.dtype != dtype:
        if dtype.itemsize == 1:
            bound = float(jnp.finfo(dtype).max)
            values = jnp.clip(values, -bound, bound)
        values = values.astype(dtype)
    return values if dtype == store_dtype else lax.bitcast_convert_type(values, store_dtype)


def decode(stored: jax.Array, dtype: Any, store_dtype: Any) -> jax.Array:
    """Gathered entries of a store_dtype buffer as `dtype`, bit for bit. For gathered rows; never for a whole pool."""
    return stored if jnp.dtype(dtype) == store_dtype else lax.bitcast_convert_type(stored, dtype)


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
