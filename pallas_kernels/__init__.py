"""Kernels of kvjax, one folder per operation: `from pallas_kernels.alloc_decode import alloc_decode`.

Each folder holds `reference.py` (plain jax.numpy: it defines the meaning and is what a CPU runs), the kernels
that compute the same, and in `__init__.py` the operation itself with its `implementation=` argument.
What several operations share stands beside them (`attention/` holds the kernels of the three that read the pool).
`registry.py` lists what exists and is the one place where a choice is made. Nothing is re-exported here, because
an operation has the name of its folder.
"""
