"""Kernels of kvjax, one folder per operation: `from pallas_kernels.alloc_decode import alloc_decode`.

Each folder holds in `__init__.py` the operation itself with its `implementation=` argument, in `reference.py` plain
jax.numpy (it defines the meaning and is what a CPU runs), and the kernels that compute the same. The three operations
that read the pool share theirs, in `attention/`. What else several operations share stands beside the folders.
`registry.py` lists what exists and is the one place where a choice is made. Nothing is re-exported here, because
an operation has the name of its folder.
"""
