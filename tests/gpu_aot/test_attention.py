"""Paged attention compiled for an H200 at serving sizes, with the configs that a caller gets by default."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import kv_bytes
from benchmarks.shapes import SHAPES, Shape
from kvjax.compiled import compile_for, inspect
from kvjax.compiled.resources import compile_for_h200
from pallas_kernels.attention.options import prepare
from pallas_kernels.attention.plan import make_plan
from pallas_kernels.paged_decode_gqa import paged_decode_gqa
from pallas_kernels.paged_decode_mla import paged_decode_mla
from pallas_kernels.paged_extend import paged_extend

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
SHARED = 227 * 1024  # bytes that a block can have on an H200
SLOTS = 2**19  # more than the rows hold; nothing is allocated


prepared: Any = prepare  # takes shapes too


@dataclasses.dataclass(frozen=True)
class Made:
    """A call with shapes in place of arrays."""

    operation: Any
    arguments: tuple
    static: dict
    pool_bytes: int  # of the smallest pool
    scratch: int  # bytes that splits keep between the two kernels
    kv_bytes: int  # that the call reads


def made(shape: Shape, *, v_dim=None, compute=BF16, dtype=None, words=None, **static) -> Made:
    def array(kind, *extents):
        return jax.ShapeDtypeStruct(extents, kind)

    dtype = dtype or compute
    i32, stored = jnp.int32, words or dtype
    tokens = (shape.batch, shape.new) if shape.new > 1 else (shape.batch,)
    q = array(compute, *tokens, shape.heads, shape.dim)
    k = array(stored, SLOTS, shape.kv_heads, shape.dim)
    v = None if shape.rank else array(stored, SLOTS, shape.kv_heads, v_dim or shape.dim)
    table, lane = array(i32, shape.batch + 1, shape.context), array(i32, shape.batch)
    positions = array(i32, *tokens) if shape.new > 1 else None
    static |= {"scale": shape.dim**-0.5, "dtype": dtype}
    if shape.new > 1:
        operation, arguments = paged_extend, (q, k, v, table, lane, positions, lane)
        how = {"rank": shape.rank}
    elif shape.rank:
        operation, arguments, how = paged_decode_mla, (q, k, table, lane, lane), {"rank": shape.rank}
    else:
        operation, arguments, how = paged_decode_gqa, (q, k, v, table, lane, lane), {}
    _, options = prepared(q, k, table, lane, lane, v=v, positions=positions, rank=shape.rank, **static)
    plan = make_plan(
        jax.ShapeDtypeStruct((shape.batch, shape.new, *q.shape[-2:]), compute), k, table, {"v": v}, options, "triton"
    )
    splits = plan.config.splits
    scratch = 4 * shape.batch * shape.new * shape.heads * splits * (plan.v_dim + 2) if splits > 1 else 0
    smallest = min(x.size * x.dtype.itemsize for x in (k, v) if x is not None)
    return Made(operation, arguments, static | how, smallest, scratch, kv_bytes(shape))


CASES = {
    **{name: made(shape) for name, shape in SHAPES.items()},
    "Qwen3-32B decode, fp8": made(SHAPES["Qwen3-32B decode"], dtype=E4M3, words=jnp.uint8, k_scale=0.1, v_scale=0.1),
    "SmolLM2 decode, f32": made(Shape(9, 3, 64, batch=6, context=1024), compute=F32, precision="highest"),
    "gpt-oss window layer": made(Shape(64, 8, 64), window=128),
    "Gemma-3 window layer": made(Shape(4, 2, 256, batch=8), window=1024, softcap=30.0),
    "MHA 80 / 64, f16": made(Shape(16, 16, 80, batch=8), v_dim=64, compute=jnp.float16),
    "MHA 96, batch 1": made(Shape(12, 12, 96, batch=1)),
    "DeepSeek-V3 chunk of 64": made(Shape(128, 1, 576, batch=4, new=64, rank=512)),
    "32 heads over latents": made(Shape(32, 1, 576, batch=16, rank=512)),
    "Gemma-3 chunk": made(Shape(8, 2, 256, batch=4, new=64), window=512),
    "DeepSeek-V3 decode, f32": made(Shape(128, 1, 576, rank=512), compute=F32, precision="highest"),
    "DeepSeek-V2-Lite decode, f32": made(Shape(16, 1, 576, rank=512), compute=F32),
    "Gemma-3 chunk, f32": made(Shape(4, 2, 256, batch=4, context=1024, new=64), compute=F32),
    "Llama-3-8B chunk, f32": made(Shape(32, 8, 128, batch=4, new=64), compute=F32, precision="highest"),
    "DeepSeek-V3 2 drafts": made(Shape(128, 1, 576, new=2, rank=512)),
}


BY_PALLAS = (
    "Llama-3-8B decode",
    "Qwen3-32B decode, fp8",
    "Llama-3-8B chunk of 512",
    "Gemma-3 chunk",
    "MHA 80 / 64, f16",
)
BY_PALLAS += ("DeepSeek-V3 decode", "DeepSeek-V2-Lite decode, f32", "DeepSeek-V3 2 drafts")


@pytest.mark.parametrize(
    ("implementation", "name"), [*(("triton", n) for n in CASES), *(("pallas_triton", n) for n in BY_PALLAS)]
)
def test_compiles_to_at_most_two_kernels_without_a_copy_or_spills(implementation, name, request):
    if implementation == "triton":
        request.getfixturevalue("triton")
    case = CASES[name]

    def run(*arrays):
        return case.operation(*arrays, **case.static, implementation=implementation)

    compiled, kernels = compile_for_h200(run, case.arguments)
    facts = inspect(compiled)
    assert facts.kernels == len(kernels) == (2 if case.scratch else 1)
    for kernel in kernels:
        assert kernel.spill_bytes <= 64, kernel.name
        assert (kernel.shared_bytes or 0) <= SHARED, kernel.name
    assert facts.loop_kernels == {}
    assert facts.large_ops(case.pool_bytes // 4) == []
    assert facts.temp_bytes <= case.scratch + 4096
    if case.operation is not paged_extend:  # the tiles of a chunk read the same keys
        assert case.scratch <= case.kv_bytes / 8  # written and read again: at most a quarter more traffic


@pytest.mark.usefixtures("triton")
def test_none_takes_triton_and_xla_reads_with_many_kernels():
    case = CASES["Llama-3-8B decode"]
    texts = {}
    for implementation in (None, "triton", "xla"):

        def run(*arrays, chosen=implementation):
            return case.operation(*arrays, **case.static, implementation=chosen)

        texts[implementation] = inspect(compile_for(run, case.arguments, "h200"))
    assert texts[None].kernels == texts["triton"].kernels == 2
    assert max(texts["xla"].loop_kernels.values()) > 4
