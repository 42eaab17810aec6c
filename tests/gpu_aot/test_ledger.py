"""The ledger's operations compiled for an H200: one kernel each, everything in place, nothing copied."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    release_rows,
)
from kvjax.compiled import compile_for, inspect
from kvjax.compiled.resources import compile_for_h200
from pallas_kernels import jax_triton_adapter

IMPLEMENTATIONS = ("triton", "pallas_triton")
SPILL_BYTES, SHARED_BYTES = 64, 227 * 1024  # per thread; per block, on compute capability 9.0
# name: (lanes, rows, tokens per row, page size, tokens)
SHAPES = {
    "Llama-3-8B serving": (64, 64, 8192, 16, 2**19),
    "DeepSeek-V3": (256, 512, 4096, 64, 2**20),
    "token ring": (64, 64, 4096, 1, 2**18),
    "three lanes, pages of 3": (3, 5, 20_000, 3, 90_000),
    "the most lanes": (1024, 1024, 4096, 16, 2**20),
}


def abstract(name: str):
    """(ledger, lanes) as shapes."""
    lanes, rows, context, page, size = SHAPES[name]

    def create():
        paged = TokenToKVPoolAllocator.create(size) if page == 1 else PagedTokenToKVPoolAllocator.create(size, page)
        return Ledger.create(ReqToTokenPool.create(rows, context), paged)

    return jax.eval_shape(create), jax.ShapeDtypeStruct((lanes,), jnp.int32)


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


OPERATIONS = {
    "decode": lambda ledger, rows, *_, **k: alloc_for_decode(ledger, rows, **k),
    "extend": functools.partial(alloc_for_extend, capacity=1000),
    "release": lambda ledger, rows, *_, **k: release_rows(ledger, rows, **k),
}


@pytest.fixture(autouse=True)
def _triton_where_it_works(request):
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("implementation") == "triton":
        request.getfixturevalue("triton")


@pytest.mark.parametrize(
    ("implementation", "name"),
    [*(("triton", name) for name in SHAPES), ("pallas_triton", "Llama-3-8B serving"), ("pallas_triton", "token ring")],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_one_kernel_in_place(operation, name, implementation, record_property):
    ledger, lane = abstract(name)
    fn = functools.partial(OPERATIONS[operation], implementation=implementation)
    compiled, (kernel,) = compile_for_h200(fn, (ledger, lane, lane, lane), donate_argnums=0)
    facts = inspect(compiled)
    assert facts.kernels == 1
    assert facts.loop_kernels == {}
    assert facts.alias_bytes == nbytes(ledger)
    assert facts.temp_bytes < 1024
    assert facts.large_ops(4 * ledger.table.max_context_len) == []  # a row of the page table
    record_property("registers", kernel.registers)
    record_property("spill_bytes", kernel.spill_bytes)
    assert kernel.spill_bytes <= SPILL_BYTES
    assert (kernel.shared_bytes or 0) <= SHARED_BYTES


def test_none_is_the_triton_kernel_on_a_gpu(triton):
    ledger, lane = abstract("three lanes, pages of 3")
    for call in OPERATIONS.values():
        compiled = compile_for(call, (ledger, lane, lane, lane), "h200", donate_argnums=0)
        assert inspect(compiled).kernels == 1
        assert "triton_kernel_call" in (compiled.as_text() or "")


STEPS = 8


def decode_loop(ledger, rows, ends, *, implementation):
    """What a decode program does with its ledger: finished rows go back, the others get their next slots."""

    def turn(c):
        step, ledger, rows, loc, positions, ok = c
        ended = lax.dynamic_index_in_dim(ends, step, keepdims=False)
        ledger = release_rows(ledger, jnp.where(ended, rows, 0), implementation=implementation)
        rows = jnp.where(ended, 0, rows)
        ledger, loc, positions, ok = alloc_for_decode(ledger, rows, implementation=implementation)
        return step + 1, ledger, rows, loc, positions, ok

    none = jnp.zeros_like(rows)
    start = (jnp.int32(0), ledger, rows, none, none, jnp.ones((), bool))
    return lax.while_loop(lambda c: (c[0] < STEPS) & c[-1], turn, start)


@pytest.mark.parametrize("implementation", ["xla", *IMPLEMENTATIONS, None])
def test_a_decode_loop_keeps_the_books_in_two_kernels_a_step(implementation, record_property):
    ledger, lane = abstract("Llama-3-8B serving")
    ends = jax.ShapeDtypeStruct((STEPS, *lane.shape), jnp.bool_)
    loop = functools.partial(decode_loop, implementation=implementation)
    facts = inspect(compile_for(loop, (ledger, lane, ends), "h200", donate_argnums=0))
    turn = max(facts.loop_kernels.values())
    record_property("kernels_per_step", turn)
    assert facts.alias_bytes >= nbytes(ledger)
    if implementation == "xla":
        assert turn > 15  # why there are kernels
    else:
        # release and decode; XLA's own are the rows of both as one fusion, the step count, and the loop's condition.
        assert turn == 5
        assert facts.large_ops(4 * ledger.table.max_context_len) == []
        assert len(facts.loop_kernels) == 1  # none of the loops that "xla" has inside


@pytest.mark.parametrize("operation", ["decode", "release"])
def test_many_ledgers_under_vmap_take_the_jax_numpy_code(operation):
    ledger, lane = abstract("three lanes, pages of 3")
    many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), (ledger, lane, lane, lane))
    facts = inspect(compile_for(jax.vmap(OPERATIONS[operation]), many, "h200", donate_argnums=0))
    assert facts.kernels > 1 or jax_triton_adapter.why_not(), "Pallas kernels have a batching rule"
    assert facts.alias_bytes >= nbytes(many[0])
