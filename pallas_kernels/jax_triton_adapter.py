"""The one place where a Triton kernel is called from JAX, through jax-triton: 0.3 (Python 3.11) or 0.4 (3.12 on).

Versions differ in how a buffer is updated in place, in how the PTX version is chosen, and in what they can do at all;
all of it is said here. Kernel modules do `from pallas_kernels import jax_triton_adapter` and call
`jax_triton_adapter.call(...)`: as an attribute, so that the tests can put Triton's interpreter in its place.

The parameters of a kernel, in this order:
    one pointer for each array of `arrays`; those named by `in_place` are read and written through this pointer,
    one pointer for each entry of `out_shapes`,
    one parameter for each entry of `in_place`, which the kernel must not use (jax-triton 0.3 passes the same buffer
        once more, as an output; 0.4 passes None),
    the tl.constexpr parameters, by name.
"""

import functools
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import jax

# PTX 8.8 is what CUDA 12.9 assembles, the last of CUDA 12, which jax[cuda12] brings. Triton would write the version
# of its own, newer assembler, and the older one that JAX uses refuses such a file.
PTX_VERSION = 88

# Part of JAX's name of a device -> compute capability, for programs that are lowered without the device.
CAPABILITIES = {"H200": 90, "H100": 90, "GH200": 90, "B200": 100, "A100": 80, "L40": 89, "L4": 89}


def why_not() -> str | None:
    """Why Triton kernels cannot be called from this installation, as a sentence; None when they can."""
    return _why_not(jax.__version__)


@functools.cache
def _why_not(jax_version: str) -> str | None:
    if version_numbers(jax_version) >= (0, 12):
        return (
            f"jax-triton's triton_call fails under jit with JAX {jax_version}, whose rules for dead code have another "
            "form; it works with JAX 0.10 and 0.11"
        )
    try:
        found = import_module("jax_triton")
        import_module("triton")
    except ImportError as error:
        return f"jax-triton cannot be imported ({error}); install kvjax[cuda12], or kvjax[aot] to compile without a GPU"
    if not hasattr(found, "triton_call"):
        return "the package jax_triton has no triton_call; install jax-triton >= 0.3.1"
    return None


def compute_capability() -> int:
    """Compute capability (90 for an H200) of the NVIDIA GPU that a program traced now will run on.

    Raises ValueError where that cannot be known.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        present = getattr(jax.devices()[0], "compute_capability", None)
        if present is None:
            raise ValueError(
                f"Triton kernels need an NVIDIA GPU, this process runs on {jax.default_backend()!r}; compile with "
                "kvjax.compiled.compile_for, which names one, or choose another implementation"
            )
        return int(float(present) * 10 + 0.5)
    for name, capability in CAPABILITIES.items():
        if name in device.device_kind:
            return capability
    raise ValueError(
        f"the compute capability of {device.device_kind!r} is not known here; known are {', '.join(CAPABILITIES)}; "
        "add it to CAPABILITIES in pallas_kernels/jax_triton_adapter.py"
    )


def call(
    kernel: Any,
    arrays: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    in_place: Sequence[int] = (),
    out_shapes: Sequence[jax.ShapeDtypeStruct] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> tuple[jax.Array, ...]:
    """Launch a `triton.jit` kernel once; see the top of this file for its parameters.

    arrays: JAX arrays, read by the kernel. Numbers go in as constexpr, or as an array of one element.
    grid: up to three extents, Python ints.
    in_place: positions in `arrays` that the kernel updates. Inside a program that donates them, or carries them
        through a loop, nothing is copied.
    out_shapes: what the kernel writes anew.
    constexprs: the kernel's tl.constexpr parameters; hashable.

    Returns the updated arrays in the order of in_place, then the outputs. Raises ValueError where jax-triton cannot
    be used (`why_not`) or the arguments do not fit the kernel. There is no rule for vmap or differentiation.
    """
    if reason := why_not():
        raise ValueError(f"Triton kernels cannot be used here: {reason}.")
    check_arguments(kernel, arrays, in_place, out_shapes, constexprs)
    import jax_triton

    options = {"kernel": kernel, "grid": grid, "num_warps": num_warps, "num_stages": num_stages}
    options["compute_capability"] = compute_capability()
    if version_numbers(version("jax-triton")) < (0, 4):
        _assemble_with_cuda_12()
        updated = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place]
        aliases = {position: len(out_shapes) + n for n, position in enumerate(in_place)}
        results = jax_triton.triton_call(
            *arrays, out_shape=[*out_shapes, *updated], input_output_aliases=aliases, **options, **constexprs
        )
        return (*results[len(out_shapes) :], *results[: len(out_shapes)])
    refs = {position: jax.new_ref(arrays[position]) for position in in_place}
    operands: list[Any] = [refs.get(position, array) for position, array in enumerate(arrays)]
    # The unused parameters come after the outputs, which are the ones that get no argument: so they go by name.
    unused = _parameters(kernel)[len(arrays) + len(out_shapes) :][: len(in_place)]
    results = jax_triton.triton_call(
        *operands,
        out_type=list(out_shapes),
        backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
        **options,
        **dict.fromkeys(unused),
        **constexprs,
    )
    return (*(jax.freeze(ref) for ref in refs.values()), *results)


def check_arguments(
    kernel: Any,
    arrays: Sequence[Any],
    in_place: Sequence[int],
    out_shapes: Sequence[Any],
    constexprs: dict[str, Any],
) -> None:
    """ValueError unless the kernel has just the parameters that `call` will fill."""
    for position, array in enumerate(arrays):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"argument {position} must be an array, got {array!r}; pass numbers as tl.constexpr")
    if bad := [i for i in in_place if not 0 <= i < len(arrays)]:
        raise ValueError(f"in_place names argument {bad[0]}, but there are {len(arrays)} arrays")
    names = _parameters(kernel)
    pointers = len(arrays) + len(out_shapes) + len(in_place)
    if set(names[pointers:]) != set(constexprs) or len(names) != pointers + len(constexprs):
        raise ValueError(
            f"the kernel has the parameters {', '.join(names)}; {len(arrays)} arrays, {len(out_shapes)} outputs, "
            f"{len(in_place)} unused for in-place buffers and the constants {', '.join(constexprs) or '(none)'} "
            "need one each, in this order"
        )


def _parameters(kernel: Any) -> list[str]:
    return list(kernel.arg_names)


def version_numbers(text: str) -> tuple[int, ...]:
    """(0, 12) of "0.12.0.dev1"."""
    return tuple(int(part) for part in text.split(".")[:2])


@functools.cache
def _assemble_with_cuda_12() -> None:
    """Let Triton take the PTX version from the CUDA 12 assembler in its wheel; 0.3 has no option that names one."""
    from triton import knobs

    # Triton has two assemblers and, from Hopper on, takes the newer one. A choice of the user's stays.
    if "TRITON_PTXAS_BLACKWELL_PATH" not in os.environ and knobs.nvidia.ptxas is not None:
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
