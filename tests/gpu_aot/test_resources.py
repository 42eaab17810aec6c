"""What the kernels take of an H200 in their default configs: no spills to speak of, shared memory that fits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import resources
from kvjax.compiled.resources import compile_for_h200
from pallas_kernels.alloc_decode import alloc_decode
from pallas_kernels.alloc_extend import alloc_extend

SPILL_BYTES = 64  # what a default config may spill per thread
SHARED_BYTES = 227 * 1024  # what a block may have on compute capability 9.0


def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


STACK = (array(100_000), array())
# name: (operation with its static arguments, arguments). kv_write is in test_kv_write.py, with every shape it has.
PROGRAMS = {
    "alloc_decode": (
        functools.partial(alloc_decode, page_size=16),
        (*STACK, array(256), array(256), array(256, dtype=jnp.bool_)),
    ),
    "alloc_extend": (
        functools.partial(alloc_extend, page_size=16, capacity=8192),
        (*STACK, array(64), array(64), array(64)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_default_config_does_not_spill(name):
    fn, args = PROGRAMS[name]
    _, kernels = compile_for_h200(fn, args)
    assert kernels
    for kernel in kernels:
        assert 1 <= kernel.registers <= 255
        assert kernel.spill_bytes <= SPILL_BYTES
        assert (kernel.shared_bytes or 0) <= SHARED_BYTES


SPILLING = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry many(.param .u64 p) .maxntid 1024, 1, 1 .minnctapersm 2
{{
  .reg .b64 %a; .reg .f32 %f<200>; .reg .f32 %s;
  .shared .align 16 .b8 room[96];
  ld.param.u64 %a, [p];
{loads}
  mov.f32 %s, 0f00000000;
{sums}
  st.volatile.shared.f32 [room], %s;
  st.global.f32 [%a], %s;
  ret;
}}
"""


def test_registers_spills_and_shared_memory_are_seen():
    """A kernel that holds 200 values at once and may have 32 registers, written by hand."""
    loads = "\n".join(f"  ld.volatile.global.f32 %f{i}, [%a+{4 * i}];" for i in range(200))
    sums = "\n".join(f"  fma.rn.f32 %s, %s, %s, %f{199 - i};" for i in range(200))
    (kernel,) = resources.of_ptx(SPILLING.format(loads=loads, sums=sums))
    assert (kernel.name, kernel.shared_bytes) == ("many", 96)
    assert kernel.registers == 32
    assert kernel.spill_bytes > 4 * (200 - 32) / 2
    with pytest.raises(ValueError, match=r"no \.target"):
        resources.of_ptx("nothing")
    with pytest.raises(RuntimeError, match="ptxas-blackwell failed"):
        resources.of_ptx(".version 8.0\n.target sm_90\n.address_size 64\nnonsense")
