"""Logical dtype and store dtype: what a pool means, and what its buffers are made of.

A pool of bfloat16 or fp8 values may be stored as unsigned integers of the same width (SGLang's `store_dtype`): the
CPU backend converts the whole buffer around a scatter into bfloat16 (JAX 0.10.2) or fp8 (every version), and such a
write costs as much as the pool is large. Integers are scattered in place. Only what was gathered is turned back,
never a whole pool. `encode` is the way in: it stands with the kernels that do the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kv_write.encoding import encode as encode

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


def decode(stored: jax.Array, dtype: Any, store_dtype: Any) -> jax.Array:
    """Gathered entries of a store_dtype buffer as `dtype`, bit for bit. For gathered rows; never for a whole pool."""
    return stored if jnp.dtype(dtype) == store_dtype else lax.bitcast_convert_type(stored, dtype)
