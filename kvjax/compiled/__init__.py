"""Facts about a compiled program: for which device, how many kernels, how many bytes, which large copies.

Speed claims of this library are checked here, in the program and not by a timer: pools are donated (alias bytes),
nothing of a pool's size is temporary (temp bytes), nothing of a pool's size is copied (`large_ops`).
`kvjax.compiled.resources` says what each kernel takes: registers, spills, shared memory.
"""

from kvjax.compiled.report import CompiledReport, LargeOp, inspect
from kvjax.compiled.target import compile_for, h200_available, h200_topology

__all__ = ["CompiledReport", "LargeOp", "compile_for", "h200_available", "h200_topology", "inspect"]
