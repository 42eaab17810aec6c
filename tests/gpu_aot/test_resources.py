"""Registers, spills and shared memory are read off a kernel; what the kernels here take is said beside each of them."""

import pytest

from kvjax.compiled import resources

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
