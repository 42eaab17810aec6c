"""The allocation operations compiled for an H200: they lower, in few kernels, and hold nothing of the pool's size."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import compile_for, h200_available, inspect
from pallas_kernels.alloc_decode import alloc_decode
from pallas_kernels.alloc_extend import alloc_extend
from pallas_kernels.alloc_extend.reference import by_page, by_token

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="jax-cuda12-plugin is not installed (extra aot)"),
]
NUM_PAGES = 10_000_019  # far more than any extent of the programs below; nothing is allocated
STACK_BYTES = 4 * NUM_PAGES
IMPLEMENTATIONS = ("xla", "pallas_triton", None)


@pytest.fixture(scope="module", autouse=True)
def h200():
    available, reason = h200_available()
    assert available, reason


def shapes(batch, third=jnp.int32, num_pages=NUM_PAGES):
    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    lane = array(jnp.int32, batch)
    return array(jnp.int32, num_pages), array(jnp.int32), lane, lane, array(third, batch)


def report(fn, args, **static):
    return inspect(compile_for(functools.partial(fn, **static), args, "h200"))


@pytest.mark.parametrize(("batch", "page_size", "capacity"), [(64, 16, 8192), (256, 64, 8192), (3, 3, 50), (1, 1, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_alloc_extend_compiles_to_few_kernels(implementation, batch, page_size, capacity):
    static = {"page_size": page_size, "capacity": capacity, "implementation": implementation}
    facts = report(alloc_extend, shapes(batch), **static)
    assert facts.large_ops(STACK_BYTES // 4) == []
    if implementation == "xla":
        assert 2 <= facts.kernels <= 5
        # i32[capacity] times lane, start and first page; i32[b, b] for the prefix sums of a large batch
        assert facts.temp_bytes <= 4 * (3 * capacity + batch * batch + 8 * batch) + 1024
    else:
        assert (facts.kernels, facts.temp_bytes) == (1, 0)
    assert facts.loop_kernels == {}


@pytest.mark.parametrize(("batch", "page_size"), [(64, 16), (256, 64), (3, 3), (1, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_alloc_decode_compiles_to_few_kernels(implementation, batch, page_size):
    facts = report(alloc_decode, shapes(batch, jnp.bool_), page_size=page_size, implementation=implementation)
    assert facts.large_ops(STACK_BYTES // 4) == []
    if implementation == "xla":
        assert 1 <= facts.kernels <= 3
        assert facts.temp_bytes <= 16 * batch + 1024
    else:
        assert (facts.kernels, facts.temp_bytes) == (1, 0)
    assert facts.loop_kernels == {}


def test_the_gpu_form_needs_fewer_kernels_than_the_cpu_form():
    static = {"page_size": 16, "capacity": 8192}
    cpu_form, gpu_form = (report(f, shapes(64), **static).kernels for f in (by_page, by_token))
    assert gpu_form < cpu_form  # the reason why there are two


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_decode_loop_runs_the_allocation_inside_the_program(implementation):
    def steps(stack, free, seq, last, active):
        def step(_, carry):
            free, seq, last = carry
            loc, taken, _ = alloc_decode(stack, free, seq, last, active, page_size=16, implementation=implementation)
            return free - taken, seq + 1, loc

        return jax.lax.fori_loop(0, 8, step, (free, seq, last))

    facts = report(steps, shapes(64, jnp.bool_))
    (per_turn,) = facts.loop_kernels.values()
    assert per_turn <= 6
    assert facts.large_ops(STACK_BYTES // 4) == []
    assert facts.temp_bytes < 8192


def test_vmap_of_the_kernels_stays_one_kernel():
    many = [jax.ShapeDtypeStruct((5, *a.shape), a.dtype) for a in shapes(64, num_pages=1000)]
    extend = functools.partial(alloc_extend, page_size=16, capacity=512, implementation="pallas_triton")
    facts = report(jax.vmap(extend), many)
    assert (facts.kernels, facts.temp_bytes) == (1, 0)
