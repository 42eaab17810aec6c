"""Which implementations each operation has, and the one way to choose among them.

`implementation=None` takes the best one for the platform; a named implementation is taken or refused, never
replaced. The platform is that of the device the program is traced for: the ambient abstract mesh says so
(`kvjax.compiled.compile_for` sets it, so that a step compiled on a CPU machine for a GPU gets the GPU's kernel),
otherwise it is the default backend of this process.

This package imports nothing from kvjax: kvjax is built on it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

NAMES = ("xla", "triton", "pallas_triton", "mosaic")

# operation -> implementation -> module of the operation's folder; the function carries the operation's name.
TABLE: dict[str, dict[str, str]] = {
    "alloc_decode": {"xla": "reference", "pallas_triton": "pallas_triton"},
    "alloc_extend": {"xla": "reference", "pallas_triton": "pallas_triton"},
    "paged_decode_gqa": {"xla": "reference", "pallas_triton": "pallas_triton"},
    "paged_decode_mla": {"xla": "reference", "pallas_triton": "pallas_triton"},
    "paged_extend": {"xla": "reference", "pallas_triton": "pallas_triton"},
}


def has_pallas_triton() -> bool:
    """Whether this JAX still has Pallas' Triton lowering (deprecated since 0.11)."""
    try:
        import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


def target_platform() -> str:
    """The platform that a program traced now will run on: "cpu", "gpu", ..."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def available(operation: str) -> tuple[str, ...]:
    """The implementations of `operation` that this JAX can trace, "xla" first. ValueError: no such operation."""
    if operation not in TABLE:
        raise ValueError(f"no operation {operation!r}; there are {', '.join(sorted(TABLE))}")
    return tuple(n for n in TABLE[operation] if n != "pallas_triton" or has_pallas_triton())


def call(operation: str, implementation: str | None, interpret: bool, *arrays: jax.Array, **static: Any) -> Any:
    """Run `operation` on `arrays` with the chosen implementation.

    implementation: a name of `NAMES`, or None for the best of the platform lowered for.
    interpret: run the Pallas kernel in the interpreter (any platform, slow); names "pallas_triton" when None.
    static: the operation's static arguments, handed to whichever implementation runs.
    Raises ValueError when a named implementation is unknown, absent or cannot run here.
    """
    arrays = tuple(map(jnp.asarray, arrays))
    if implementation is None and not interpret:
        xla = _load(operation, "xla")
        if target_platform() != "gpu" or "pallas_triton" not in available(operation):
            return xla(*arrays, **static)
        kernel = _load(operation, "pallas_triton")
        # A process with a GPU can still lower for a CPU, and a GPU need not be NVIDIA's.
        return jax.lax.platform_dependent(
            *arrays, cuda=lambda *a: kernel(*a, **static), default=lambda *a: xla(*a, **static)
        )
    name = implementation or "pallas_triton"
    _check_named(operation, name, interpret)
    if name == "pallas_triton":
        static["interpret"] = interpret
    return _load(operation, name)(*arrays, **static)


def _load(operation: str, implementation: str) -> Callable[..., Any]:
    module = import_module(f"pallas_kernels.{operation}.{TABLE[operation][implementation]}")
    return getattr(module, operation)


def _check_named(operation: str, implementation: str, interpret: bool) -> None:
    have = available(operation)
    choose = f"choose one of {', '.join(map(repr, have))}, or None for the best of the platform"
    if implementation not in NAMES:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(NAMES)}; {choose}")
    if implementation not in TABLE[operation]:
        raise ValueError(f"{operation} has no {implementation!r} implementation; {choose}")
    if implementation not in have:
        raise ValueError(f"this JAX ({jax.__version__}) has no Pallas Triton lowering; {choose}")
    if interpret and implementation != "pallas_triton":
        raise ValueError(f"interpret=True is for Pallas kernels, not for {implementation!r}; leave it out")
    if implementation == "pallas_triton" and not interpret and target_platform() != "gpu":
        raise ValueError(
            f"{operation}: 'pallas_triton' needs an NVIDIA GPU and the platform is {target_platform()!r}; pass "
            f"interpret=True to run it in the interpreter, or choose 'xla' or None"
        )
