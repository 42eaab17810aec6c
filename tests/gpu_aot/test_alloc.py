"""The allocation operations compiled for an H200: they lower, in few kernels, and hold nothing of the pool's size."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import compile_for, inspect
from kvjax.compiled.resources import compile_for_h200
from pallas_kernels.alloc_decode import alloc_decode
from pallas_kernels.alloc_extend import alloc_extend
from pallas_kernels.alloc_extend.reference import by_page, by_token

NUM_PAGES = 10_000_019  # far more than any extent of the programs below; nothing is allocated
STACK_BYTES = 4 * NUM_PAGES
SHARED_BYTES = 227 * 1024  # what a block may have on compute capability 9.0
IMPLEMENTATIONS = ("xla", "triton", "pallas_triton", None)


@pytest.fixture(autouse=True)
def _triton_where_it_works(request):
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("implementation") == "triton":
        request.getfixturevalue("triton")


def shapes(batch, third=jnp.int32, num_pages=NUM_PAGES):
    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    lane = array(jnp.int32, batch)
    return array(jnp.int32, num_pages), array(jnp.int32), lane, lane, array(third, batch)


def report(fn, args, **static):
    return inspect(compile_for(functools.partial(fn, **static), args, "h200"))


def one_kernel(record_property, fn, args, **static):
    """One launch without a temporary and without spills; returns nothing."""
    compiled, (kernel,) = compile_for_h200(functools.partial(fn, **static), args)
    facts = inspect(compiled)
    assert (facts.kernels, facts.temp_bytes, facts.loop_kernels) == (1, 0, {})
    assert facts.large_ops(STACK_BYTES // 4) == []
    record_property("registers", kernel.registers)
    assert kernel.spill_bytes == 0
    assert (kernel.shared_bytes or 0) <= SHARED_BYTES


EXTEND = [(64, 16, 8192), (256, 64, 8192), (3, 3, 50), (1, 1, 1)]  # lanes, page size, capacity
MANY = (1024, 16, 4096)


@pytest.mark.parametrize(
    ("implementation", "batch", "page_size", "capacity"),
    [*((way, *sizes) for way in IMPLEMENTATIONS for sizes in EXTEND), ("triton", *MANY), ("pallas_triton", *MANY)],
)
def test_alloc_extend_compiles_to_few_kernels(implementation, batch, page_size, capacity, record_property):
    static = {"page_size": page_size, "capacity": capacity, "implementation": implementation}
    if implementation == "xla":
        facts = report(alloc_extend, shapes(batch), **static)
        assert 2 <= facts.kernels <= 5
        # i32[capacity] times lane, start and first page; i32[b, b] for the prefix sums of a large batch
        assert facts.temp_bytes <= 4 * (3 * capacity + batch * batch + 8 * batch) + 1024
        assert facts.large_ops(STACK_BYTES // 4) == []
        assert facts.loop_kernels == {}
    else:
        one_kernel(record_property, alloc_extend, shapes(batch), **static)


@pytest.mark.parametrize(
    ("implementation", "batch", "page_size"),
    [*((way, *sizes[:2]) for way in IMPLEMENTATIONS for sizes in EXTEND), ("triton", 1024, 16)],
)
def test_alloc_decode_compiles_to_few_kernels(implementation, batch, page_size, record_property):
    static = {"page_size": page_size, "implementation": implementation}
    if implementation == "xla":
        facts = report(alloc_decode, shapes(batch, jnp.bool_), **static)
        assert 1 <= facts.kernels <= 3
        assert facts.temp_bytes <= 16 * batch + 1024
        assert facts.large_ops(STACK_BYTES // 4) == []
        assert facts.loop_kernels == {}
    else:
        one_kernel(record_property, alloc_decode, shapes(batch, jnp.bool_), **static)


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


def test_none_is_the_triton_kernel(triton):
    for operation, third, static in ((alloc_decode, jnp.bool_, {}), (alloc_extend, jnp.int32, {"capacity": 64})):
        compiled = compile_for(functools.partial(operation, page_size=16, **static), shapes(3, third), "h200")
        assert "triton_kernel_call" in (compiled.as_text() or "")
