"""The static part of an attention call, its arguments by name, and what is refused on the host."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments, registry

EXTRAS = ("v", "positions", "k_scale", "v_scale", "sinks")  # arrays that a call may have or not, in this order
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_SCALAR = {"k_scale", "v_scale"}
# Of a config, least and most: above, a kernel would not fit a multiprocessor, or would not finish compiling.
_EXTENTS = {"block_m": (16, 256), "block_n": (16, 256), "splits": (1, 256), "num_warps": (1, 32), "num_stages": (1, 8)}


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut and compiled; `plan.default_config` has one for every shape."""

    block_m: int = 16  # query rows (tokens x heads of one KV head) per program: a power of two >= 16
    block_n: int = 64  # keys per turn of the loop: a power of two >= 16
    splits: int = 1  # programs that share the keys of one lane; above 1 a second kernel merges them
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        for name, (least, most) in _EXTENTS.items():
            value = getattr(self, name)
            arguments.check_size(name, value)
            if name in ("splits", "num_stages"):
                if value > most:
                    raise ValueError(f"{name} is {value}; at most {most} was expected.")
            elif not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} is {value}; a power of two from {least} to {most} was expected.")


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything about a call that is not an array; hashable."""

    scale: float  # of the scores, before k_scale
    dtype: np.dtype  # what the pool's words mean
    rank: int | None = None  # latent attention: values are the first `rank` columns of the keys
    window: int | None = None
    softcap: float | None = None
    k_scale: float | None = None  # a traced scale comes as an array instead
    v_scale: float | None = None
    precision: Any = None
    block: int | None = None  # table columns per turn of the reference
    config: Config | None = None
    extras: tuple[str, ...] = ()  # names of the arrays behind kv_lens

    @property
    def exact(self) -> bool:
        """float32 factors are multiplied as float32 and not rounded to TF32."""
        return self.precision is not None and str(getattr(self.precision, "name", self.precision)).lower() in (
            "highest",
            "float32",
        )


def call(operation: str, implementation: str | None, interpret: bool, *arrays: jax.Array, **how: Any) -> jax.Array:
    """Run `operation` with what `prepare(*arrays, **how)` makes of its arguments."""
    arrays, options = prepare(*arrays, **how)
    return registry.call(operation, implementation, interpret, *arrays, options=options)


def prepare(
    q: jax.Array,
    k: jax.Array,
    req_to_token: jax.Array,
    rows: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    dtype: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    v: jax.Array | None = None,
    positions: jax.Array | None = None,
    sinks: jax.Array | None = None,
    **static: Any,
) -> tuple[tuple[jax.Array, ...], Options]:
    """(arrays, options) as an implementation takes them; ValueError says what does not fit.

    q: [b, Hq, D], or [b, t, Hq, D] with positions i32[b, t].
    """
    for name, array in (("q", q), ("k", k)):
        if not hasattr(array, "shape"):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}; wrap it in jnp.asarray.")
    given = {"v": v, "positions": positions, "sinks": sinks}
    static |= {"scale": _known("scale", scale, float), "dtype": _dtype(k.dtype if dtype is None else dtype)}
    for name, kind in (("window", operator.index), ("block", operator.index), ("softcap", float)):
        if static.get(name) is not None:
            static[name] = _known(name, static[name], kind)
    if (config := static.get("config")) is not None and not isinstance(config, Config):
        raise ValueError(f"config must be an attention.options.Config or None, got {config!r}.")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(value, int | float):
            static[name] = float(value)
        else:
            given[name] = value
    present: dict[str, Any] = {name: given[name] for name in EXTRAS if given.get(name) is not None}
    extras = {name: _array(name, value) for name, value in present.items()}
    options = Options(**static, extras=tuple(extras))
    _check(q, k, req_to_token, rows, kv_lens, options, extras)
    return (q, k, req_to_token, rows, kv_lens, *extras.values()), options


def _known(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    """`value` as a Python number: it is part of what is compiled."""
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):  # JAX's errors for traced values are TypeErrors
        wanted = "whole number" if kind is operator.index else "number"
        raise ValueError(
            f"{name} must be a {wanted} that is known when the program is compiled, got {value!r}; pass a Python one."
        ) from None


def _dtype(value: Any) -> np.dtype:
    try:
        return jnp.dtype(value)
    except TypeError:
        raise ValueError(f"dtype {value!r} is none that JAX knows; pass what the pool's words mean.") from None


def _array(name: str, value: Any) -> jax.Array:
    if hasattr(value, "shape"):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {value!r}: {error}") from None


def _check(q, k, req_to_token, rows, kv_lens, options: Options, extras: dict[str, jax.Array]) -> None:
    if q.ndim != (4 if "positions" in extras else 3):
        raise ValueError(
            f"q has shape {q.shape}; [b, heads, head_dim] was expected for decode and [b, t, heads, head_dim] for a "
            "chunk."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise ValueError(f"q is {q.dtype.name}; float32, bfloat16 or float16 was expected, cast it before the call.")
    b = q.shape[0]
    arguments.check_array("req_to_token", req_to_token, jnp.int32, (None, None))
    arguments.check_array("rows", rows, jnp.int32, (b,))
    arguments.check_array("kv_lens", kv_lens, jnp.int32, (b,))
    if 0 in (*q.shape, *req_to_token.shape):
        raise ValueError(f"q {q.shape} and req_to_token {req_to_token.shape} must not be empty.")
    _check_pool("k", k, options.dtype)
    heads, (kv_heads, k_dim) = q.shape[-2], k.shape[1:]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} KV heads; a multiple is needed.")
    if options.rank is None:
        if q.shape[-1] != k_dim:
            raise ValueError(f"queries have head size {q.shape[-1]}, keys {k_dim}; they must be equal.")
        if "v" not in extras:
            raise ValueError("values are missing: pass v, or the rank of a latent pool.")
        _check_pool("v", extras["v"], options.dtype)
        if extras["v"].shape[:2] != k.shape[:2]:
            raise ValueError(f"v has shape {extras['v'].shape}, k {k.shape}; slots and KV heads must be equal.")
    else:
        arguments.check_size("rank", options.rank)
        if kv_heads != 1 or not options.rank <= q.shape[-1] <= k_dim:
            raise ValueError(
                f"latents of shape {k.shape} were given with queries of {q.shape[-1]} columns and rank {options.rank}; "
                "one KV head and rank <= query columns <= stored columns were expected."
            )
    if "positions" in extras:
        arguments.check_array("positions", extras["positions"], jnp.int32, (b, q.shape[1]))
    if "sinks" in extras and extras["sinks"].shape != (heads,):
        raise ValueError(f"sinks has shape {extras['sinks'].shape}; one score for each of {heads} heads was expected.")
    for name in _SCALAR & extras.keys():
        if extras[name].shape != ():
            raise ValueError(f"{name} has shape {extras[name].shape}; one scalar for the whole tensor was expected.")
    for name in ("window", "block"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, got {options.softcap}; None means no cap.")


def _check_pool(name: str, pool: jax.Array, dtype: np.dtype) -> None:
    if pool.ndim != 3 or 0 in pool.shape:
        raise ValueError(f"{name} has shape {pool.shape}; a pool of [slots, kv_heads, width] was expected.")
    if not jnp.issubdtype(dtype, jnp.floating) or pool.dtype not in (dtype, _WORDS.get(dtype.itemsize)):
        raise ValueError(
            f"{name} holds {pool.dtype.name} words for values of dtype {dtype.name}; pass the pool's dtype, whose "
            "words are itself or unsigned integers of its width."
        )
