"""What a compiled program does with memory: bytes, kernels, and the operations that touch a whole pool."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import jax

from kvjax.compiled import hlo


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Not launched: names, views and control flow. What the control flow calls is counted through it.
_NO_KERNEL = _words(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all opt-barrier",
    "optimization-barrier add-dependency partition-id replica-id domain copy-done async-update async-done",
    "all-reduce-done all-gather-done collective-permute-done send-done recv-done",
)
_NO_KERNEL_TARGETS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")

# Result as large as a pool, yet nothing of that size is read or written: views, control flow, and the two writes
# that XLA does in place (when it cannot, it puts a copy in front, and that is reported).
_IN_PLACE = _words(
    "parameter tuple get-tuple-element bitcast while conditional call fusion dynamic-update-slice scatter",
    "after-all opt-barrier optimization-barrier add-dependency domain copy-done",
    "async-start async-update async-done",
)
# A small result out of all elements of a large operand.
_READS_ALL = _words("reduce reduce-window dot convolution sort map scan")
# Inside a fusion these read single elements of operand 0: what computes it is evaluated at those alone.
_LAZY = frozenset(("gather", "dynamic-slice", "slice"))

_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class LargeOp:
    """An instruction that produces a large array, or reads all of one, to move, convert, compute or reduce it."""

    opcode: str
    shape: str  # f32[65552,8,128]; of a tuple its largest array, of a reduction what it reads
    nbytes: int
    computation: str
    name: str

    def __str__(self) -> str:
        return f"{self.opcode} {self.shape} ({self.nbytes} bytes) {self.name} in {self.computation}"


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """Facts about one compiled program. Bytes are those of XLA's buffer assignment."""

    argument_bytes: int
    output_bytes: int  # aliased results included
    alias_bytes: int  # of the output, what lies in donated arguments
    temp_bytes: int
    kernels: int  # launches outside loops: fusions, custom calls, copies, sorts, ...; on a CPU its function calls
    loop_kernels: Mapping[str, int]  # body of each while -> launches per turn, its condition included
    module: hlo.Module = dataclasses.field(repr=False)

    def large_ops(self, min_bytes: int) -> list[LargeOp]:
        """The instructions that walk over an array of at least `min_bytes` bytes, one by one.

        Copies, converts, selects, broadcasts, slices, gathers and all other computation with such a result, and
        reductions with such an operand, in loops and in fusions too: a select fused into an in-place scatter still
        walks over the whole pool. Not listed are views and
        control flow, in-place dynamic-update-slice and scatter, aliased results of custom calls, and what a fusion
        evaluates only at the elements that a gather or a slice picks.
        """
        if min_bytes < 1:
            raise ValueError(f"min_bytes must be at least 1, got {min_bytes}")
        return [
            LargeOp(i.opcode, str(largest), largest.nbytes, computation.name, i.name)
            for computation, i in _materialised(self.module, self.module.entry, set())
            for largest in [max(_walked(computation, i), key=lambda a: a.nbytes, default=hlo.Array("token", ()))]
            if largest.nbytes >= min_bytes
        ]


def inspect(compiled: jax.stages.Compiled) -> CompiledReport:
    """The report of a program that `compile_for` or `jit(...).lower(...).compile()` made.

    Raises ValueError when the backend gives no memory statistics or no readable program.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise ValueError(
            "this backend tells neither memory nor text of its programs; use compile_for(..., 'cpu' or 'h200')"
        )
    module = hlo.parse(text)
    return CompiledReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        kernels=count_kernels(module, module.entry),
        loop_kernels=count_loop_kernels(module),
        module=module,
    )


def count_kernels(module: hlo.Module, computation: str) -> int:
    """Launches of one run of `computation`; loops in it are not counted, of branches the longest is."""
    return len(launches(module, computation))


def launches(module: hlo.Module, computation: str) -> list[hlo.Instruction]:
    """The instructions that `count_kernels` counts; the attributes of each say which part of the program made it."""
    found = []
    for i in module[computation].instructions:
        if i.opcode == "call":
            found += [launched for c in i.callees() for launched in launches(module, c)]
        elif i.opcode == "conditional":
            found += max((launches(module, c) for c in i.callees()), key=len, default=[])
        elif i.opcode not in _NO_KERNEL:
            target = _TARGET.search(i.attributes) if i.opcode == "custom-call" else None
            if target is None or target[1] not in _NO_KERNEL_TARGETS:
                found.append(i)
    return found


def count_loop_kernels(module: hlo.Module) -> dict[str, int]:
    """Body of each while in the program -> launches of one turn: body and condition, without loops in them."""
    return {
        body: sum(count_kernels(module, c) for c in i.callees("body", "condition"))
        for _, i in _reachable(module, module.entry, set())
        if i.opcode == "while"
        for body in i.callees("body")
    }


def _walked(computation: hlo.Computation, i: hlo.Instruction) -> tuple[hlo.Array, ...]:
    """The arrays that the instruction writes anew or reads whole."""
    if i.opcode in _IN_PLACE:
        return ()
    if i.opcode in _READS_ALL:
        by_name = computation.by_name
        read = (a for o in i.operands if o in by_name for a in by_name[o].results)
        return (*i.results, *read)
    aliased = _ALIASED.search(i.attributes)
    if aliased is None:
        return i.results
    # {0}: (3, {}) names a result, {}: (3, {}) the only one. Results of custom calls are not nested.
    at = {int(n or 0) for n in re.findall(r"\{(\d*)\}\s*:\s*\(", aliased[1])}
    return tuple(a for n, a in enumerate(i.results) if n not in at)


def _control(i: hlo.Instruction) -> tuple[str, ...]:
    """Computations that run as programs of their own, not as the inside of a kernel."""
    if i.opcode in ("while", "conditional", "call") or i.opcode == "async-start":
        return i.callees()
    return ()


def _reachable(module: hlo.Module, name: str, seen: set[str]) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    if name in seen:
        return
    seen.add(name)
    for i in module[name].instructions:
        yield module[name], i
        for callee in _control(i):
            yield from _reachable(module, callee, seen)


def _materialised(module: hlo.Module, name: str, seen: set[str]) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    """Every instruction that is evaluated at all its elements, inside fusions too."""
    for computation, i in _reachable(module, name, seen):
        yield computation, i
        if i.opcode == "fusion":
            for callee in i.callees("calls"):
                yield from _demanded(module, callee)


def _demanded(module: hlo.Module, name: str) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    """The instructions of a fusion that its root needs in full."""
    computation, instructions = module[name], module[name].by_name
    pending, seen = [computation.root.name], set()
    while pending:
        current = pending.pop()
        if current in seen or current not in instructions:
            continue
        seen.add(current)
        i = instructions[current]
        yield computation, i
        if i.opcode == "fusion":
            for callee in i.callees("calls"):
                yield from _demanded(module, callee)
        if i.opcode not in ("parameter", "constant"):
            pending.extend(i.operands[1:] if i.opcode in _LAZY else i.operands)
