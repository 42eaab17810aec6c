"""What paged_decode_gqa, paged_decode_mla and paged_extend share; not an operation itself.

`options.py` the static part of a call and its checks, `plan.py` how a call is cut into programs, `reference.py` the
meaning in jax.numpy, `triton.py` and `pallas_triton.py` the two kernels (attention, and the merge of its splits).
"""
