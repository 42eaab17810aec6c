"""kv_write: new keys and values (or latents) into one layer's buffers, in place, one launch on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, registry
from pallas_kernels.kv_write.encoding import divisible


def kv_write(
    leaves: tuple[jax.Array, ...],
    values: tuple[tuple[jax.Array, ...], ...],
    loc: jax.Array,
    *,
    dtype: Any,
    scales: tuple[Any, ...] | None = None,
    valid: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """leaf[loc[i]] = row i of the values, for every leaf (SGLang `set_kv_buffer`, `set_mla_kv_buffer`).

    leaves: store_dtype[slots, heads, width] each: (k, v), (k,) or (latent,), all of one slot count.
    values: for each leaf its parts, floating[n, heads, part], laid side by side along the last axis; the columns behind
        them become zero. ((k,), (v,)) or ((nope, rope),). More than one part needs heads == 1.
    loc: i32[n], slots. Slot 0 and locations outside [0, slots) are dropped. A slot named twice keeps one of its rows,
        undefined which; the two leaves may then keep different ones.
    dtype: what the values mean in the leaf; store_dtype is that, or the unsigned integer of its width.
    scales: for each leaf None or a scalar that divides its values (float32 arithmetic, rounded to the values' dtype)
        before the cast. None: no leaf has one.
    valid: bool[n] or None; the other rows are dropped.
    implementation, interpret: see `registry.call`.

    fp8 saturates at its largest finite value; NaN stays NaN. In place where the leaves are donated or carried.
    Costs O(n rows), never O(slots). Raises ValueError for wrong shapes, dtypes or implementation names.
    """
    scales = (None,) * len(leaves) if scales is None else scales
    _check(leaves, values, scales, loc, valid, jnp.dtype(dtype))
    values = tuple(
        tuple(divisible(part) if scale is not None else part for part in parts)
        for parts, scale in zip(values, scales, strict=True)
    )
    return registry.call(
        "kv_write", implementation, interpret, leaves, values, scales, loc, valid, dtype=jnp.dtype(dtype)
    )


def _check(leaves, values, scales, loc, valid, dtype) -> None:
    if not leaves or not len(leaves) == len(values) == len(scales):
        raise ValueError(f"{len(leaves)} leaves, {len(values)} values and {len(scales)} scales; give each leaf one")
    arguments.check_array("loc", loc, jnp.int32, (None,))
    rows = loc.shape[0]
    if valid is not None:
        arguments.check_array("valid", valid, jnp.bool_, (rows,))
    for scale in scales:
        if scale is not None and jnp.shape(scale) != ():
            raise ValueError(f"a scale has shape {jnp.shape(scale)}; one scalar for a whole leaf was expected")
    for leaf, parts in zip(leaves, values, strict=True):
        arguments.check_array("leaf", leaf, leaf.dtype, (leaves[0].shape[0], None, None))
        unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
        if leaf.dtype not in (dtype, unsigned):
            raise ValueError(
                f"a leaf of {leaf.dtype} cannot hold {dtype.name}; make it {dtype.name} or {unsigned.name}"
            )
        heads, width = leaf.shape[1:]
        for part in parts:
            arguments.check_array("values", part, part.dtype, (rows, heads, None))
            if not jnp.issubdtype(part.dtype, jnp.floating):
                raise ValueError(f"values must be floating, got {part.dtype}; cast them, or view stored bits as values")
        taken = [part.shape[-1] for part in parts]
        if not parts or sum(taken) > width or (len(parts) > 1 and heads > 1):
            raise ValueError(
                f"parts of widths {taken} do not fit a row of {heads} heads x {width}: they need one head when there "
                "are several, and together at most its width"
            )
