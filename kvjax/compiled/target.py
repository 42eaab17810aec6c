"""Compile for a device: a CPU, or an H200 that need not be there.

The CUDA plugin (packages jax-cuda12-plugin and jax-cuda12-pjrt, extra `aot`) compiles for a described GPU without a
driver. Set JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the first JAX call of the process: the
plugin is registered once, when JAX looks up its first device, and refuses itself there if its check of NVIDIA's
libraries fails.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import jax
from jax.experimental import topologies

from kvjax.compat import traced_for

CONFIG = "h200.target_config.txt"
DEVICE_KIND, CORES = "NVIDIA H200", 132


@functools.cache
def h200_topology() -> topologies.TopologyDescription:
    """The description of one H200; `.devices[0]` is a device that programs can be compiled for but not run on.

    Raises RuntimeError, with what to do, when this installation cannot compile for it.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # in time if JAX has seen no device yet
    text = resources.files("kvjax.compiled").joinpath(CONFIG).read_text()
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    except Exception as error:  # what comes differs by version and by what is missing
        raise RuntimeError(
            f"cannot compile for an H200 here: {type(error).__name__}: {error}. Install jax-cuda12-plugin and "
            f"jax-cuda12-pjrt {jax.__version__} (extra `aot`) and set JAX_PLATFORMS=cpu and "
            f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the first JAX call of the process."
        ) from error


def h200_available() -> tuple[bool, str]:
    """Whether programs can be compiled for an H200 here, and if not, why."""
    try:
        h200_topology()
    except RuntimeError as error:
        return False, str(error)
    return True, ""


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    platform: Literal["cpu", "h200"] = "cpu",
    *,
    donate_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile `fn(*args, **kwargs)` for `platform`; nothing is allocated and nothing runs.

    fn: a function, or one that is jitted already (then its own donation counts and donate_argnums stays empty).
    args, kwargs: pytrees of jax.ShapeDtypeStruct, or of arrays, of which only shape and dtype are read; leaves
        without a dtype (Python numbers, static arguments) are handed on as they are. A sharding that a
        ShapeDtypeStruct carries is kept, the others are placed on the one device.
    compiler_options: XLA's, for this program.

    Raises ValueError for an unknown platform or donation that would be ignored, RuntimeError when the H200's
    compiler is not there.
    """
    if platform == "h200":
        device, context = h200_topology().devices[0], traced_for(DEVICE_KIND, CORES, "cuda")
    elif platform == "cpu":
        device, context = jax.devices("cpu")[0], traced_for("cpu", None, "cpu")
    else:
        raise ValueError(f"platform must be 'cpu' or 'h200', got {platform!r}")
    if not hasattr(fn, "trace"):
        fn = jax.jit(fn, donate_argnums=donate_argnums)
    elif donate_argnums != ():
        raise ValueError("fn is jitted already: give donate_argnums to its jax.jit, or pass the plain function")
    placed = jax.sharding.SingleDeviceSharding(device)
    abstract = functools.partial(_abstract, placed)
    positional = jax.tree.map(abstract, tuple(args))
    named = {name: jax.tree.map(abstract, value) for name, value in (kwargs or {}).items()}
    with context:
        # Jitted by the lines above, so it has `trace`; its declared type, a plain callable, does not say so.
        lowered = fn.trace(*positional, **named).lower()  # pyright: ignore[reportFunctionMemberAccess]
        return lowered.compile(dict(compiler_options) if compiler_options else None)


def _abstract(placed: jax.sharding.Sharding, leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    kept = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept or placed, weak_type=weak)
