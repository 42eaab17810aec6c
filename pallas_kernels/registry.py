"""Which implementations each operation has, and the one way to choose among them.

`implementation=None` takes the best one for the platform; a named implementation is taken or refused, never
replaced. The platform is that of the device the program is traced for: the ambient abstract mesh says so
(`kvjax.compiled.compile_for` sets it, so that a step compiled on a CPU machine for a GPU gets the GPU's kernel),
otherwise it is the default backend of this process.

An implementation is a function. Its module may also have `unsupported(*arrays, **static) -> str | None`, called with
the arguments of that function (of the arrays only shape and dtype count): a sentence when it cannot do this call. None
passes over it, a named choice raises it.

This package imports nothing from kvjax: kvjax is built on it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels import jax_triton_adapter

NAMES = ("xla", "triton", "pallas_triton", "mosaic")
PALLAS = ("pallas_triton", "mosaic")  # run interpreted too
# In this order, "xla" where none can. "mosaic" is for what the others leave on a JAX without a working jax-triton.
BEST_ON_A_GPU = ("triton", "pallas_triton", "mosaic")

# operation -> implementation -> "module of this package:function".
_ATTENTION = {
    "xla": "attention.reference:attend",
    "triton": "attention.triton:attend",
    "pallas_triton": "attention.pallas_triton:attend",
}
TABLE: dict[str, dict[str, str]] = {
    "alloc_decode": {
        "xla": "alloc_decode.reference:alloc_decode",
        "triton": "alloc_decode.triton:alloc_decode",
        "pallas_triton": "alloc_decode.pallas_triton:alloc_decode",
    },
    "alloc_extend": {
        "xla": "alloc_extend.reference:alloc_extend",
        "triton": "alloc_extend.triton:alloc_extend",
        "pallas_triton": "alloc_extend.pallas_triton:alloc_extend",
    },
    "ledger_decode": {
        "xla": "ledger_decode.reference:ledger_decode",
        "triton": "ledger_decode.triton:ledger_decode",
        "pallas_triton": "ledger_decode.pallas_triton:ledger_decode",
    },
    "ledger_extend": {
        "xla": "ledger_extend.reference:ledger_extend",
        "triton": "ledger_extend.triton:ledger_extend",
        "pallas_triton": "ledger_extend.pallas_triton:ledger_extend",
    },
    "release": {
        "xla": "release.reference:release",
        "triton": "release.triton:release",
        "pallas_triton": "release.pallas_triton:release",
    },
    "kv_write": {
        "xla": "kv_write.reference:kv_write",
        "triton": "kv_write.triton:kv_write",
        "pallas_triton": "kv_write.pallas_triton:kv_write",
        "mosaic": "kv_write.mosaic:kv_write",
    },
    "paged_decode_gqa": _ATTENTION,
    "paged_decode_mla": _ATTENTION,
    "paged_extend": _ATTENTION,
}


def target_platform() -> str:
    """The platform that a program traced now will run on: "cpu", "gpu", ..."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def check_name(implementation: str | None) -> None:
    """ValueError unless it is a name of `NAMES`, or None."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation={implementation!r} is not one of {', '.join(NAMES)}; choose one, or None for the best of "
            "the platform"
        )


def available(operation: str) -> tuple[str, ...]:
    """The implementations of `operation` that this installation can trace, "xla" first. ValueError: no such one."""
    return tuple(n for n in _implementations(operation) if _not_installed(n) is None)


def best(operation: str, *arrays: Any, **static: Any) -> str:
    """The implementation that `implementation=None` takes for this call, on the platform traced for."""
    have = _implementations(operation)
    if target_platform() == "gpu":
        for name in BEST_ON_A_GPU:
            if name in have and _why_not(operation, name, arrays, static) is None:
                return name
    return "xla"


def call(operation: str, implementation: str | None, interpret: bool, *arrays: Any, **static: Any) -> Any:
    """Run `operation` on `arrays` (arrays, or pytrees of them) with the chosen implementation.

    implementation: a name of `NAMES`, or None for the best of the platform lowered for.
    interpret: run the Pallas kernel in the interpreter (any platform, slow); names "pallas_triton" when None.
    static: the operation's static arguments, handed to whichever implementation runs.
    Raises ValueError when a named implementation is unknown, absent or cannot do this call here.
    """
    arrays = jax.tree.map(jnp.asarray, arrays)
    if implementation is None and not interpret:
        name, xla = best(operation, *arrays, **static), _load(operation, "xla")
        if name == "xla":
            return xla(*arrays, **static)
        kernel = _load(operation, name)
        if name == "triton":
            kernel = _batched_by(xla, kernel, static)
        # A process with a GPU can still lower for a CPU, and a GPU need not be NVIDIA's.
        return jax.lax.platform_dependent(
            *arrays, cuda=lambda *a: kernel(*a, **static), default=lambda *a: xla(*a, **static)
        )
    check_name(implementation)
    name = "pallas_triton" if implementation is None else implementation
    if reason := _refused(operation, name, interpret, arrays, static):
        raise ValueError(reason)
    if name in PALLAS:
        static["interpret"] = interpret
    return _load(operation, name)(*arrays, **static)


def _implementations(operation: str) -> dict[str, str]:
    if operation not in TABLE:
        raise ValueError(f"no operation {operation!r}; there are {', '.join(sorted(TABLE))}")
    return TABLE[operation]


def _module(name: str) -> Any:
    return import_module(f"pallas_kernels.{name}")


def _load(operation: str, implementation: str) -> Callable[..., Any]:
    module, function = TABLE[operation][implementation].split(":")
    return getattr(_module(module), function)


def _not_installed(implementation: str) -> str | None:
    """Why this installation cannot trace such kernels."""
    if implementation == "triton":
        return jax_triton_adapter.why_not()
    lowering = {"pallas_triton": "triton", "mosaic": "mosaic_gpu"}.get(implementation)
    if lowering is not None:
        try:
            import_module(f"jax.experimental.pallas.{lowering}")
        except ImportError as error:
            return f"this JAX ({jax.__version__}) has no such Pallas lowering ({error})"
    return None


def _why_not(operation: str, implementation: str, arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Why the implementation cannot do this call on the platform traced for; asked of those that `TABLE` has."""
    if reason := _not_installed(implementation):
        return reason
    if implementation == "triton":
        try:
            jax_triton_adapter.compute_capability()
        except ValueError as error:
            return str(error)
    module, _ = TABLE[operation][implementation].split(":")
    unsupported = getattr(_module(module), "unsupported", None)
    return None if unsupported is None else unsupported(*arrays, **static)


def _refused(operation: str, name: str, interpret: bool, arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Why a named choice is refused, with the way out."""
    have = _implementations(operation)
    # Kernels need a GPU, so where there is none they are no way out.
    can = ("xla",) if target_platform() != "gpu" and not interpret else available(operation)
    others = ", ".join(repr(other) for other in can if other != name)
    choose = f"choose {'one of ' * (', ' in others)}{others}, or None for the best of the platform"
    if name not in have:
        return f"{operation} has no {name!r} implementation; {choose}"
    if interpret and name not in PALLAS:
        return f"interpret=True is for Pallas kernels, not for {name!r}; leave it out"
    if name != "xla" and not interpret and target_platform() != "gpu":
        way = f"; pallas_kernels.{operation} runs it in the interpreter with interpret=True" if name in PALLAS else ""
        needs = f"{operation}: {name!r} needs an NVIDIA GPU and the platform is {target_platform()!r}"
        return f"{needs}; {choose}{way}"
    if reason := _why_not(operation, name, arrays, static):
        return f"{operation}: {name!r} cannot be used: {reason}; {choose}"
    return None


def _batched_by(xla: Callable[..., Any], kernel: Callable[..., Any], static: dict[str, Any]) -> Callable[..., Any]:
    """`kernel`, with `xla` in its place under vmap: jax-triton has no batching rule."""

    def run(*arrays: Any, **_: Any) -> Any:
        leaves, tree = jax.tree.flatten(arrays)

        @custom_vmap
        def flat(*leaves: jax.Array) -> Any:
            return kernel(*jax.tree.unflatten(tree, leaves), **static)

        @flat.def_vmap
        def _(_size: int, in_batched: list[bool], *leaves: jax.Array) -> Any:
            axes = tuple(0 if batched else None for batched in in_batched)
            out = jax.vmap(lambda *x: xla(*jax.tree.unflatten(tree, x), **static), in_axes=axes)(*leaves)
            return out, jax.tree.map(lambda _: True, out)

        return flat(*leaves)

    return run
