"""kv_write compiled for an H200: one launch a layer, in place, 16 bytes a thread, no compare-and-swap."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import compile_for, inspect
from kvjax.compiled.resources import compile_for_h200, of_ptx
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from pallas_kernels import jax_triton_adapter
from pallas_kernels.jax_triton_adapter import version_numbers
from pallas_kernels.kv_write import kv_write

SLOTS = 1_000_003  # far more than any other extent of the programs; nothing is allocated
# name: (store dtype, dtype, values' dtype, rows, per leaf (heads, width, parts), scaled)
SHAPES = {
    "Llama-3-8B decode": ("bfloat16", "bfloat16", "bfloat16", 64, [(8, 128, [128]), (8, 128, [128])], False),
    "Llama-3-8B prefill": ("uint16", "bfloat16", "bfloat16", 8192, [(8, 128, [128]), (8, 128, [128])], False),
    "Qwen3-32B e4m3": ("uint8", "float8_e4m3fn", "bfloat16", 64, [(8, 128, [128]), (8, 128, [128])], True),
    "DeepSeek-V3 latent": ("bfloat16", "bfloat16", "bfloat16", 64, [(1, 576, [512, 64])], False),
    "e5m2 latent": ("uint8", "float8_e5m2", "float32", 64, [(1, 576, [512, 64])], False),
    "SmolLM2-135M": ("float32", "float32", "bfloat16", 3, [(3, 64, [64]), (3, 64, [64])], False),
    "odd sizes": ("float16", "float16", "float32", 37, [(3, 5, [5]), (3, 7, [7])], False),
    "e4m3 without scales": ("uint8", "float8_e4m3fn", "bfloat16", 64, [(8, 128, [128])], False),
    "keys alone": ("bfloat16", "bfloat16", "bfloat16", 1, [(1, 128, [128])], False),
}
LOC_OF_TWO = jax.ShapeDtypeStruct((2,), jnp.int32)
WIDE = ("Llama-3-8B decode", "Llama-3-8B prefill", "Qwen3-32B e4m3", "DeepSeek-V3 latent")


def arguments(name):
    """(leaves, values, loc, scale) without memory, and what kv_write wants beside them."""
    store, dtype, given, rows, leaves, scaled = SHAPES[name]
    array = jax.ShapeDtypeStruct
    kept = tuple(array((SLOTS, heads, width), store) for heads, width, _ in leaves)
    values = tuple(tuple(array((rows, heads, part), given) for part in parts) for heads, _, parts in leaves)
    return (kept, values, array((rows,), jnp.int32), array((), jnp.float32)), jnp.dtype(dtype), scaled


def compiled(name, implementation):
    args, dtype, scaled = arguments(name)

    def write(leaves, values, loc, scale):
        scales = (scale,) * len(leaves) if scaled else None
        return kv_write(leaves, values, loc, dtype=dtype, scales=scales, implementation=implementation)

    program, kernels = compile_for_h200(write, args, donate_argnums=0)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in args[0])
    return inspect(program), kernels, nbytes


@pytest.fixture
def mosaic(monkeypatch, tmp_path):
    """Asked for by tests of the Mosaic GPU kernel: a function that gives what was assembled since the test began."""
    if version_numbers(jax.__version__) < (0, 11):
        pytest.skip("Mosaic GPU kernels are in place from JAX 0.11 on")  # tests/kernels has the refusal
    # XLA's own dump does not have these kernels. Mosaic assembles a kernel once per process.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    return lambda: [kernel for path in sorted(tmp_path.glob("*.ptx")) for kernel in of_ptx(path.read_text())]


BY_MOSAIC = ("Llama-3-8B decode", "Llama-3-8B prefill", "Qwen3-32B e4m3", "e4m3 without scales", "keys alone")


@pytest.mark.parametrize("name", BY_MOSAIC)
def test_mosaic_writes_a_layer_in_place(name, mosaic, record_property):
    facts, by_xla, nbytes = compiled(name, "mosaic")
    (kernel,) = mosaic()
    assert facts.alias_bytes == nbytes
    assert facts.large_ops(nbytes // 1000) == []
    _, _, _, rows, leaves, scaled = SHAPES[name]
    assert facts.kernels == 1 + (len(leaves) if scaled else 0)  # what is divided XLA divides, as for pallas_triton
    assert facts.temp_bytes <= scaled * sum(6 * rows * h * w for h, w, _ in leaves) + 1024
    record_property("registers", kernel.registers)
    assert all(k.spill_bytes == 0 for k in (kernel, *by_xla))
    assert not re.search(r"\batom\.|\bred\.", kernel.ptx)
    if name == "e4m3 without scales":  # NaN stays, and what is too large becomes the largest
        assert "max.NaN.f32" in kernel.ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx


def test_mosaic_computes_addresses_past_32_bits(mosaic):
    """B45: more than 2^32 entries. (Below, the compiler knows from the test of a slot that 32 bits are enough.)"""
    leaf, value = jax.ShapeDtypeStruct((5_000_000, 8, 128), jnp.uint8), jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)
    write = functools.partial(kv_write, dtype=jnp.float8_e5m2, implementation="mosaic")
    facts = inspect(compile_for(write, ((leaf,), ((value,),), LOC_OF_TWO), "h200", donate_argnums=0))
    assert facts.alias_bytes == 5_000_000 * 1024
    (kernel,) = mosaic()
    assert re.search(r"shl\.b64 .*, 10;|mul\.wide\.[su]32 .*, 1024;", kernel.ptx)
    assert not re.search(r"shl\.b32 .*, 10;|mul\.lo\.s32 .*, 1024;", kernel.ptx)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas_triton"])
def test_a_layer_is_written_in_place(implementation, name, request):
    if implementation == "triton":
        request.getfixturevalue("triton")
    facts, kernels, nbytes = compiled(name, implementation)
    assert facts.alias_bytes == nbytes
    assert facts.large_ops(nbytes // 1000) == []
    _, _, _, rows, leaves, scaled = SHAPES[name]
    if implementation == "triton" or (implementation == "pallas_triton" and not scaled):
        assert facts.kernels == 1
        assert facts.temp_bytes <= 64
    else:  # XLA materialises the divisor, in float32: one kernel and one array more
        assert facts.kernels <= len(leaves) + scaled + (rows == 1)  # a scatter of one row becomes two
        assert facts.temp_bytes <= (2 if scaled else 1) * sum(6 * rows * h * w for h, w, _ in leaves) + 1024
    for kernel in kernels:
        assert kernel.spill_bytes == 0
        assert not re.search(r"\batom\.|\bred\.", kernel.ptx), "a compare-and-swap loop, or another atomic"


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", WIDE)
def test_a_thread_of_the_triton_kernel_moves_16_bytes_at_a_time(name):
    _, (kernel,), _ = compiled(name, "triton")
    stores = re.findall(r"st\.global\S*", kernel.ptx)
    assert stores
    assert all("v4.b32" in store for store in stores), stores
    # One narrow load for each list of locations and each scale.
    loads = re.findall(r"ld\.global\S*", kernel.ptx)
    assert sum("v4.b32" in load for load in loads) >= len(stores)


@pytest.mark.usefixtures("triton")
def test_the_address_of_a_row_is_computed_in_64_bits():
    """B45 in the machine's words: a slot is widened and then multiplied by the row."""
    _, (kernel,), _ = compiled("DeepSeek-V3 latent", "triton")
    assert re.search(r"mul\.wide\.s32|mad\.wide\.s32|mul\.lo\.s64|mad\.lo\.s64", kernel.ptx)
    assert not re.search(r"mul\.lo\.s32 .*, (576|1152);", kernel.ptx)


LAYERS = 3
LOC = jax.ShapeDtypeStruct((16,), jnp.int32)


def mha():
    return MHATokenToKVPool.create(100_000, 16, LAYERS, 8, 128, dtype=jnp.bfloat16, store_dtype=jnp.bfloat16)


def mla():
    return MLATokenToKVPool.create(100_000, 16, LAYERS, 512, 64, dtype=jnp.float8_e4m3fn)


def write_mha(pool, layer, loc, x, implementation):
    k = jnp.broadcast_to(x[:, None, None], (16, 8, 128)).astype(jnp.bfloat16)
    return pool.set_kv_buffer(layer, loc, k, k, implementation=implementation)


def write_mla(pool, layer, loc, x, implementation):
    latent = jnp.broadcast_to(x[:, None, None], (16, 1, 576))
    parts = latent[..., :512], latent[..., 512:]
    return pool.set_mla_kv_buffer(layer, loc, *parts, implementation=implementation)


@pytest.mark.parametrize(
    ("make", "write", "implementation"),
    [(mha, write_mha, None), (mla, write_mla, None), (mha, write_mha, "mosaic")],
    ids=["mha", "mla", "mha by mosaic"],
)
def test_a_loop_over_steps_and_layers_writes_the_pool_in_place(make, write, implementation, request):
    """What a decode loop does: one launch per layer and step, and nothing of a layer's size is copied."""
    if implementation == "mosaic":
        request.getfixturevalue("mosaic")
    pool, best_is_triton = jax.eval_shape(make), jax_triton_adapter.why_not() is None

    def steps(pool, loc, x):
        def step(carry):
            i, pool = carry
            for layer in range(LAYERS):
                pool = write(pool, layer, loc + i, x * i, implementation)
            return i + 1, pool

        return jax.lax.while_loop(lambda carry: carry[0] < loc[0], step, (jnp.int32(0), pool))[1]

    program = compile_for(steps, (pool, LOC, jax.ShapeDtypeStruct((16,), jnp.float32)), "h200", donate_argnums=0)
    facts = inspect(program)
    assert facts.alias_bytes == pool.nbytes
    assert facts.large_ops(pool.nbytes // LAYERS // 10) == []
    (turn,) = facts.loop_kernels.values()
    assert turn <= LAYERS + 5  # the values (one or two), loc + i, the counter, the condition
    if best_is_triton and implementation is None:
        assert (program.as_text() or "").count('custom_call_target="triton_kernel_call') == LAYERS


@pytest.mark.usefixtures("triton")
def test_vmap_of_the_best_implementation_is_xlas():
    """jax-triton has no batching rule; None passes over it, a named choice does not."""
    args, dtype, _ = arguments("keys alone")
    many = [jax.tree.map(lambda a: jax.ShapeDtypeStruct((5, *a.shape), a.dtype), a) for a in args[:3]]

    def write(implementation, *args):
        return jax.vmap(functools.partial(kv_write, dtype=dtype, implementation=implementation))(*args)

    facts = inspect(compile_for(functools.partial(write, None), many, "h200", donate_argnums=0))
    assert facts.alias_bytes == 5 * SLOTS * 128 * 2
    with pytest.raises(NotImplementedError, match="vmap"):  # jax-triton's own refusal: nothing is replaced silently
        compile_for(functools.partial(write, "triton"), many, "h200")
