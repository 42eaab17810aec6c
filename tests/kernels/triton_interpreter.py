"""Run the Triton implementation of an operation on the CPU, in Triton's own interpreter.

Triton reads TRITON_INTERPRET when it is imported, so this happens in a process of its own; starting it takes seconds,
so a test module collects its calls and makes one `run` of them all. The whole module of an implementation runs there,
its grid and block sizes included: only `jax_triton_adapter.call` is replaced.

Every buffer lies between two guard zones. A kernel that writes outside one of its buffers fails the run; what it
reads outside of an array that it does not update is 0xFF bytes, NaN in every float type and -1 in the integers.
"""

import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  importing it teaches NumPy the names: np.dtype("bfloat16"), np.dtype("float8_e5m2")
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GUARD = 1 << 16  # bytes on each side of a buffer
READ, WRITTEN = 0xFF, 0xA5  # what fills the guards: a NaN would hide a sum that is written there
TYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call `module.function(*arguments, **static)`, as `registry` would make it for the implementation."""

    module: str  # "pallas_kernels.kv_write.triton"
    function: str
    arguments: tuple[Any, ...]  # pytrees of NumPy arrays
    static: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(calls: Sequence[Call], timeout: float = 240) -> list[Any]:
    """The results of the calls, as pytrees of NumPy arrays, from one process. An exception there is a RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "calls"), Path(folder, "results")
        asked.write_bytes(pickle.dumps(list(calls)))
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.kernels.triton_interpreter", str(asked), str(answered)]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the interpreted calls failed:\n{done.stderr[-6000:]}")
        return pickle.loads(answered.read_bytes())


class _Tensor:
    """An array, with what Triton's interpreter wants of a tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    # The interpreter copies tensors to the host and back; these are there already.
    def untyped_storage(self) -> "_Tensor":
        return self

    cpu = untyped_storage

    def new_empty(self, *_: Any, **__: Any) -> "_Tensor":
        return self

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset

    def set_(self, *_: Any) -> None: ...

    copy_ = set_


class _Guarded(_Tensor):
    """A copy of `array` between guards; of an output, which is None, what it looks like."""

    def __init__(self, array: np.ndarray | None, like: Any, fill: int):
        dtype, self._fill = np.dtype(like.dtype), fill
        nbytes = int(np.prod(like.shape)) * dtype.itemsize
        self._bytes = np.full(2 * GUARD + nbytes + 16, fill, np.uint8)
        start = GUARD + (-(self._bytes.ctypes.data + GUARD)) % 16  # as aligned as a device buffer
        inside = self._bytes[start : start + nbytes]
        self._outside = self._bytes[:start], self._bytes[start + nbytes :]
        if array is not None:  # an output that the kernel leaves out keeps the fill, and does not look like zeros
            inside[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        super().__init__(inside.view(dtype).reshape(like.shape))

    def guards_are_whole(self) -> bool:
        return all((guard == self._fill).all() for guard in self._outside)


def call(
    kernel, arrays, *, grid, in_place=(), out_shapes=(), num_warps=4, num_stages=3, **constexprs
) -> tuple[np.ndarray, ...]:
    """What `jax_triton_adapter.call` does, on NumPy arrays in the interpreter."""
    from pallas_kernels import jax_triton_adapter

    jax_triton_adapter.check_arguments(kernel, arrays, in_place, out_shapes, constexprs)
    buffers = [_Guarded(np.asarray(a), a, WRITTEN if i in in_place else READ) for i, a in enumerate(arrays)]
    outputs = [_Guarded(None, shape, WRITTEN) for shape in out_shapes]
    before = [buffer.array.tobytes() for buffer in buffers]
    kernel[tuple(grid)](*buffers, *outputs, *(None for _ in in_place), **constexprs)
    for position, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        assert position in in_place or buffer.array.tobytes() == old, f"argument {position} is no in-place buffer"
    assert all(b.guards_are_whole() for b in (*buffers, *outputs)), "the kernel wrote outside its buffers"
    return (*(buffers[i].array for i in in_place), *(output.array for output in outputs))


def call_on_the_arrays(kernel, arrays, *, grid, in_place=(), num_warps=4, num_stages=3, **constexprs) -> tuple:
    """`call` for arrays that are too large to copy: the kernel runs on them as they are, without guards."""
    kernel[tuple(grid)](*map(_Tensor, arrays), *(None for _ in in_place), **constexprs)
    return tuple(arrays[i] for i in in_place)


def _converted(values: np.ndarray, source: Any, target: Any, _rounding: Any) -> np.ndarray:
    """Bits of `values` (bits or floats of Triton's dtype `source`) rounded to `target`: to nearest, ties to even.

    In place of the interpreter's own conversion, which rounds halves up and loses the carry into the exponent. fp8 does
    not saturate here, so a kernel has to clamp by itself.
    """
    names = {name: np.dtype(known) for known, name in TYPES.items() if known not in ("bool",)}
    held = np.ascontiguousarray(values).view(names[source.name])
    with np.errstate(over="ignore", invalid="ignore"):
        return held.astype(names[target.name]).view(f"uint{target.primitive_bitwidth}")


def _widened(interpreter: Any) -> Any:
    """The interpreter's matmul, with bfloat16 factors as float32: its own multiplies their bits."""
    plain = interpreter.InterpreterBuilder.create_dot

    def factor(x: Any) -> Any:
        if x.dtype.scalar.name != "bf16":
            return x
        wide = interpreter._convert_float(x.data, x.dtype.scalar, interpreter.tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    return lambda builder, a, b, *rest: plain(builder, factor(a), factor(b), *rest)


def main(asked: str, answered: str) -> None:
    import jax
    import triton.runtime.interpreter

    from pallas_kernels import jax_triton_adapter

    triton.runtime.interpreter._convert_float = _converted
    triton.runtime.interpreter.InterpreterBuilder.create_dot = _widened(triton.runtime.interpreter)

    def interpreted(*args: Any, **kwargs: Any) -> tuple[jax.Array, ...]:
        return tuple(map(jax.numpy.asarray, call(*args, **kwargs)))

    jax_triton_adapter.call = interpreted
    results = []
    for asked_call in pickle.loads(Path(asked).read_bytes()):
        function = getattr(importlib.import_module(asked_call.module), asked_call.function)
        arguments = jax.tree.map(jax.numpy.asarray, asked_call.arguments)
        results.append(jax.tree.map(np.asarray, function(*arguments, **asked_call.static)))
    Path(answered).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
