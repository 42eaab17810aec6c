"""Programs that write a pool well and programs that do it badly: the report tells them apart, on CPU and H200."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kvjax.compiled import compile_for, h200_available, h200_topology, inspect

pytestmark = pytest.mark.compiled

ROWS, WIDTH, NEW = 16_400, 64, 32
AOT = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="jax-cuda12-plugin is not installed (extra aot)"),
]
on_both = pytest.mark.parametrize("platform", ["cpu", pytest.param("h200", marks=AOT)])


def put(pool, idx, new):
    return pool.at[idx].set(new, mode="drop", unique_indices=True)


def looped(pool, idx, new):
    """The write as a decode loop does it: the pool is the carry."""
    return lax.fori_loop(0, idx[0], lambda i, p: put(p, idx + i, new), pool)


def arguments(dtype=jnp.float32):
    shape = jax.ShapeDtypeStruct
    return shape((ROWS, WIDTH), dtype), shape((NEW,), jnp.int32), shape((NEW, WIDTH), dtype)


def facts(fn, platform, dtype=jnp.float32, donate=(0,)):
    """The report, the pool's bytes, and the opcodes that work on half a pool or more."""
    args = arguments(dtype)
    report = inspect(compile_for(fn, args, platform, donate_argnums=donate))
    pool = args[0].size * args[0].dtype.itemsize
    return report, pool, [op.opcode for op in report.large_ops(pool // 2)]


@on_both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint16, jnp.uint8])
def test_a_donated_write_in_a_loop_is_in_place(platform, dtype):
    report, pool, large = facts(looped, platform, dtype)
    assert large == []
    assert report.alias_bytes == report.output_bytes == pool
    assert report.temp_bytes < pool // 16
    assert report.argument_bytes == pool + NEW * 4 + NEW * WIDTH * jnp.dtype(dtype).itemsize
    assert len(report.loop_kernels) == 1
    assert 1 <= next(iter(report.loop_kernels.values())) <= 6
    assert 0 < report.kernels <= 3


@on_both
def test_a_write_that_is_then_read_is_in_place(platform):
    def write_read(pool, idx, new):
        pool = put(pool, idx, new)
        return pool, pool[idx], pool.astype(jnp.float16)[idx]  # the cast follows the gather or is fused into it

    report, pool, large = facts(write_read, platform)
    assert large == []
    assert report.alias_bytes == pool


@on_both
def test_without_donation_the_pool_is_copied(platform):
    report, pool, large = facts(looped, platform, donate=())
    assert large == ["copy"]
    assert report.alias_bytes == 0
    assert report.output_bytes == pool


@on_both
def test_selecting_between_old_and_new_pool_is_caught(platform):
    def choose(pool, idx, new):
        return jnp.where(idx[0] > 0, put(pool, idx, new), pool)

    report, pool, large = facts(choose, platform)
    assert sorted(large) == ["copy", "select"]
    assert report.temp_bytes >= pool


@on_both
def test_a_conditional_write_is_caught_where_it_copies(platform):
    # JAX 0.10.2 copies in the GPU program only; from 0.11 on the branches write in place on both. What must agree
    # is the report with the buffers: a pool-sized temporary and a pool-sized copy come together.
    def maybe(pool, idx, new):
        return lax.cond(idx[0] > 0, put, lambda pool, idx, new: pool, pool, idx, new)

    report, pool, large = facts(maybe, platform)
    assert ("copy" in large) == (report.temp_bytes >= pool)
    if platform == "h200" and jax.__version__.startswith("0.10."):
        assert large.count("copy") == 3


@on_both
def test_casting_the_pool_is_caught(platform):
    def cast(pool, idx, new):
        return put(pool, idx, new), pool.astype(jnp.float16)

    assert "convert" in facts(cast, platform)[2]


@on_both
def test_computing_on_the_whole_pool_under_the_write_is_caught(platform):
    def scale(pool, idx, new):
        return put(pool * 2, idx, new)  # fused with the scatter; no temporary and full alias tell nothing

    report, pool, large = facts(scale, platform)
    assert report.alias_bytes == pool
    assert report.temp_bytes < pool // 16
    assert "multiply" in large


def test_reading_before_the_write_is_caught_on_a_cpu():
    def read_write(pool, idx, new):
        return put(pool, idx, new + pool[idx + 1]), pool[idx]

    report, pool, large = facts(read_write, "cpu")
    assert set(large) == {"copy"}
    assert report.temp_bytes >= pool


def widening():
    """The float types whose scatter the CPU backend does on a widened copy of the pool."""
    old = jax.__version__.startswith("0.10.")
    return [jnp.float8_e4m3fn] + ([jnp.bfloat16] if old else [])


@pytest.mark.parametrize("dtype", widening())
def test_a_scatter_into_narrow_floats_is_caught_on_a_cpu(dtype):
    report, pool, large = facts(put, "cpu", dtype)
    assert "convert" in large
    assert report.temp_bytes >= pool
    assert facts(put, "cpu", jnp.uint16 if dtype == jnp.bfloat16 else jnp.uint8)[2] == []  # what to store instead


def test_a_jitted_function_keeps_its_own_donation():
    jitted = jax.jit(looped, donate_argnums=0)
    assert inspect(compile_for(jitted, arguments())).alias_bytes == ROWS * WIDTH * 4
    with pytest.raises(ValueError, match="jitted already"):
        compile_for(jitted, arguments(), donate_argnums=0)


def test_arguments_may_be_trees_with_arrays_and_numbers_in_them():
    def step(state, n, *, scale):
        return {"pool": state["pool"] + n * scale}

    tree = {"pool": jnp.ones((4, 2), jnp.bfloat16)}
    report = inspect(compile_for(step, (tree, 2), kwargs={"scale": jax.ShapeDtypeStruct((), jnp.bfloat16)}))
    assert report.output_bytes == 16


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="'cpu' or 'h200', got 'tpu'"):
        compile_for(looped, arguments(), "tpu")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("expected", [pytest.param((True, ""), marks=AOT)])
def test_the_h200_is_there_without_a_gpu(expected):
    assert h200_available() == expected
    (device,) = h200_topology().devices
    assert device.device_kind.startswith("NVIDIA H200")
    assert device not in jax.devices()
