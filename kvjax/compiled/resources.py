"""What each kernel of a compiled program takes of a GPU: registers, spilled bytes, shared memory.

The PTX is assembled by ptxas, which the `triton` wheel brings (extra `aot`) and which says so; no GPU is needed.
Kernels that jax-triton calls travel as PTX in the payload of their call, XLA dumps that of all others.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from kvjax.compiled.target import compile_for

_OCTAL = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_HEX = re.compile(rb"\\([0-9A-F]{2}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_PAYLOAD = re.compile(
    r'custom_call_target="triton_kernel_call(_ffi)?".*?(?:opaque = |backend_config=)"((?:[^"\\]|\\.)*)"'
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """One GPU kernel, per thread or per block."""

    name: str
    registers: int  # per thread
    spill_bytes: int  # per thread
    shared_bytes: int | None  # per block; None where XLA alone knows what its launch asks for
    ptx: str  # of the module that the kernel stands in


def compile_for_h200(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, list[KernelResources]]:
    """`compile_for(fn, args, "h200", ...)`, and what its kernels take: each distinct one once.

    Raises RuntimeError, with what to do, when the H200's compiler or ptxas is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}  # JAX 0.11 asks for both
        compiled = compile_for(fn, args, "h200", donate_argnums=donate_argnums, kwargs=kwargs, compiler_options=options)
        dumped = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
    found = {text: of_ptx(text) for text in dumped if ".entry" in text}
    for ptx, shared in _triton_calls(compiled.as_text() or ""):
        found[ptx] = [dataclasses.replace(kernel, shared_bytes=shared) for kernel in of_ptx(ptx)]
    return compiled, [kernel for kernels in found.values() for kernel in kernels]


def of_ptx(ptx: str) -> list[KernelResources]:
    """The kernels of a PTX text, assembled for the target that it names."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise ValueError(f"no .target in the PTX text {ptx[:200]!r}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # The newer of the wheel's two assemblers reads every PTX version that the older one does.
        said = _run("ptxas-blackwell", "-v", f"-arch={target[1]}", str(source), "-o", str(Path(folder, "kernel.cubin")))
    kernels = []
    for part in said.split("Compiling entry function '")[1:]:
        spills, registers, shared = (pattern.search(part) for pattern in (_SPILLS, _REGISTERS, _SHARED))
        if spills is None or registers is None:
            raise RuntimeError(f"ptxas said nothing about registers or spills: {part[:500]!r}")
        kernels.append(
            KernelResources(
                name=part.split("'")[0],
                registers=int(registers[1]),
                spill_bytes=max(int(spills[1]), int(spills[2])),
                shared_bytes=None if ".extern .shared" in ptx else int(shared[1]) if shared else 0,
                ptx=ptx,
            )
        )
    return kernels


def _run(tool: str, *arguments: str) -> str:
    found = find_spec("triton")
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / tool if found and found.origin else Path(tool)
    try:
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise RuntimeError(f"{tool} is not there ({path}); install triton, which brings it (extra `aot`).") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{tool} failed: {error.stderr[-2000:]}") from None
    return done.stdout + done.stderr


def _triton_calls(text: str) -> Iterator[tuple[str, int]]:
    """(PTX, bytes of shared memory) of each call of jax-triton in a program's text."""
    for ffi, escaped in _PAYLOAD.findall(text):
        pattern, base = (_HEX, 16) if ffi else (_OCTAL, 8)
        payload = zlib.decompress(pattern.sub(functools.partial(_unescaped, base), escaped.encode("latin-1")))
        call = dict(_fields(payload))[1]
        kernel = dict(_fields(dict(_fields(call))[1]))
        yield kernel[4].decode(), kernel.get(3, 0)


def _unescaped(base: int, match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, base)]) if len(code) > 1 else _ESCAPED.get(code, code)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields: integers and byte strings."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            length = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, message[at : at + length]
            at += length
