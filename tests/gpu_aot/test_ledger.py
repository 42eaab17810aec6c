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
from kvjax.compiled import compile_for, h200_available, inspect

pytestmark = pytest.mark.aot
IMPLEMENTATIONS = ("triton", "pallas_triton", None)
# name: (lanes, rows, tokens per row, page size, tokens)
SHAPES = {
    "Llama-3-8B serving": (64, 64, 8192, 16, 2**19),
    "DeepSeek-V3": (256, 512, 4096, 64, 2**20),
    "token ring": (64, 64, 4096, 1, 2**18),
    "three lanes, pages of 3": (3, 5, 20_000, 3, 90_000),
}


@pytest.fixture(scope="module", autouse=True)
def h200():
    available, reason = h200_available()
    assert available, reason


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


@functools.cache
def report(operation: str, name: str, implementation: str | None):
    ledger, lane = abstract(name)
    fn = functools.partial(OPERATIONS[operation], implementation=implementation)
    return inspect(compile_for(fn, (ledger, lane, lane, lane), "h200", donate_argnums=0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_one_kernel_in_place(operation, name, implementation):
    facts, (ledger, _) = report(operation, name, implementation), abstract(name)
    assert facts.kernels == 1
    assert facts.loop_kernels == {}
    assert facts.alias_bytes == nbytes(ledger)
    assert facts.temp_bytes < 1024
    assert facts.large_ops(4 * ledger.table.max_context_len) == []  # a row of the page table


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


@pytest.mark.parametrize("implementation", ["xla", *IMPLEMENTATIONS])
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_ledgers_under_vmap_take_the_jax_numpy_code(operation):
    ledger, lane = abstract("three lanes, pages of 3")
    many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), (ledger, lane, lane, lane))
    facts = inspect(compile_for(jax.vmap(OPERATIONS[operation]), many, "h200", donate_argnums=0))
    assert facts.kernels > 1
    assert facts.alias_bytes >= nbytes(many[0])
