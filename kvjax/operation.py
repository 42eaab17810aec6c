"""What every public operation has in common: a pytree state, checked int32 inputs, one jit inside.

An eager call must neither retrace its control flow nor cut a 64-bit id silently: arguments are checked on the host
first (`int32`), then handed to a jitted body. Under an outer jit the body is traced into it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.layout import INT32_MAX, INT32_MIN

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the compile key. Never a count: a changing static field retraces each step."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def state(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass registered as a pytree; fields made with `static()` are metadata."""
    return cast(type[T], jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls)))


def narrow(value: Any) -> Any:
    """Host integers as int32 (refused when they do not fit), everything else as it is."""
    if isinstance(value, bool | np.bool_) or value is None:
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        if all(isinstance(v, (int, np.integer, bool, np.bool_)) for v in value):
            value = np.asarray(value, dtype=None if len(value) else np.int32)
        elif isinstance(value, list) and all(isinstance(v, list) for v in value):
            value = np.asarray(value)
        else:
            return type(value)(narrow(v) for v in value)
    if isinstance(value, str | bytes | set | frozenset | dict | range | slice):
        raise ValueError(f"{value!r} is no array; pass a jax or numpy array, or a list of whole numbers.")
    if isinstance(value, (int, np.integer)):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype != np.int32:
        if value.size and (int(value.min()) < INT32_MIN or int(value.max()) > INT32_MAX):
            worst = int(value.max()) if int(value.max()) > INT32_MAX else int(value.min())
            raise ValueError(
                f"{worst} does not fit int32 ({INT32_MIN} .. {INT32_MAX}); slots, pages, rows and lengths are int32."
            )
        return value.astype(np.int32)
    return value


def operation(*static_argnames: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public operation: narrow host integers, then call the jitted body.

    static_argnames: keyword arguments that are part of the compile key (capacities, layer ids).
    """

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        jitted = jax.jit(fn, static_argnames=static_argnames)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in static_argnames:
                _compile_time(name, kwargs.get(name))
            values = [narrow(a) for a in args]
            named = {k: v if k in static_argnames else narrow(v) for k, v in kwargs.items()}
            return jitted(*values, **named)

        return cast(Callable[P, R], call)

    return wrap


def _compile_time(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{name} is part of what is compiled, so it must be a plain Python value, got {type(value).__name__}; "
            "pass an int or a str that is known before the program runs."
        ) from None


def as_array(name: str, value: Any) -> jax.Array:
    """`value` as an array; ValueError naming it where it is none."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {type(value).__name__}: {error}") from None


def int32(name: str, value: Any, ndim: int) -> jax.Array:
    """`value` as an i32 array of rank `ndim`; ValueError for another rank or dtype."""
    array = as_array(name, value)
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}; cast it with .astype(jnp.int32).")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have rank {ndim}, got shape {array.shape}.")
    return array


def mask(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """`value` as a bool array of the given shape; ValueError otherwise."""
    array = as_array(name, value)
    if array.dtype != jnp.bool_:
        raise ValueError(f"{name} must be bool, got {array.dtype}; compare or cast it with .astype(bool).")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, one entry per lane, got {array.shape}.")
    return array


def unbatched(what: str, array: jax.Array, ndim: int) -> None:
    """ValueError where a state that `what` reads to the host is a batch of states, as vmap makes them."""
    if array.ndim != ndim:
        raise ValueError(
            f"{what} reads one state, this is a batch of shape {array.shape[: array.ndim - ndim]}; "
            "pick one first, with jax.tree.map(lambda leaf: leaf[i], states)."
        )


def same_length(**arrays: jax.Array) -> int:
    """Length that all 1-D arrays share; ValueError naming the two that differ."""
    (first, reference), *rest = arrays.items()
    for name, array in rest:
        if array.shape[0] != reference.shape[0]:
            raise ValueError(
                f"{first} has {reference.shape[0]} lanes but {name} has {array.shape[0]}; one entry per lane is needed."
            )
    return reference.shape[0]


def once_if(pred: jax.Array, body: Callable[[T], T], value: T) -> T:
    """body(value) if pred, else value, as a while_loop of at most one turn.

    Not `lax.cond`: under vmap that becomes a select which runs the body on every call, and on some versions a cond
    copies the buffers that it passes through. A loop's carry stays in place.
    """
    _, out = lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), body(c[1])), (pred, value))
    return out
