"""What the operations of this package share: argument checks on the host, arithmetic on counts that are >= 0."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def div(x: jax.Array, d: int) -> jax.Array:
    """x // d for x >= 0: lax.div spares the sign handling of `//`."""
    return lax.div(x, jnp.int32(d))


def ceil_div(x: jax.Array, d: int) -> jax.Array:
    """ceil(x / d) for x >= 0, without the sum x + d - 1 that could pass int32."""
    return div(x, d) + (lax.rem(x, jnp.int32(d)) != 0).astype(jnp.int32)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


def warps_of(batch: int) -> int:
    """Warps of a program that has one thread for each of `batch` lanes: a power of two, at most 8."""
    return min(8, max(1, power_of_two(batch) // 32))


def at_most(lanes: int) -> Callable[..., str | None]:
    """The `unsupported` (see `registry`) of kernels that hold all lanes of a call in registers.

    The last array of a call has one entry per lane.
    """

    def unsupported(*arrays: jax.Array, **_: int) -> str | None:
        batch = arrays[-1].shape[0]
        if batch <= lanes:
            return None
        return f"a program holds the lanes of a whole call, at most {lanes} lanes, and this one has {batch}"

    return unsupported


def from_top(stack: jax.Array, free_count: jax.Array, depth: jax.Array, width: int) -> jax.Array:
    """stack[free_count - 1 - depth]: the page that is handed out as the depth-th next, i32, shape of depth.

    depth: i32, below `width` where the result is used; any page where it is not, or names no free page. The read goes
    through a window of `width` entries below the top: a slice, and nothing in it has the size of the pool.
    """
    width = min(width, stack.shape[0])
    start = jnp.clip(free_count - width, 0, stack.shape[0] - width)
    window = lax.dynamic_slice(stack, (start,), (width,))
    return window.at[free_count - 1 - depth - start].get(mode="clip")


def check_size(name: str, value: int) -> None:
    """ValueError unless `value` is a Python int >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a Python int of at least 1, got {value!r}")


def check_stack(stack: jax.Array, free_count: jax.Array) -> None:
    """ValueError unless stack is i32[num_pages >= 1] and free_count i32[]."""
    check_array("stack", stack, jnp.int32, (None,))
    check_array("free_count", free_count, jnp.int32, ())
    if stack.shape[0] == 0:
        raise ValueError("stack has shape (0,): a pool needs at least one page")


def check_lanes(dtypes: dict[str, Any], **lanes: jax.Array) -> None:
    """ValueError unless every lane array has the dtype named for it and one common shape [b >= 1]."""
    batch = None
    for name, array in lanes.items():
        check_array(name, array, dtypes.get(name, jnp.int32), (batch,))
        batch = array.shape[0]
    if batch == 0:
        raise ValueError(f"{', '.join(lanes)} are empty: a batch needs at least one lane (mark it unused instead)")


def check_array(name: str, array: jax.Array, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """ValueError unless `array` is a NumPy or JAX array of `dtype` and `shape` (None: any extent)."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(f"{name} must be an array, got {array!r}; wrap it in jnp.asarray with its dtype")
    fits = len(array.shape) == len(shape) and all(w in (None, g) for w, g in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != dtype:
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(
            f"{name} must be {jnp.dtype(dtype).name}[{wanted}], got {array.dtype.name}{list(array.shape)}; "
            f"cast or reshape it before the call"
        )
