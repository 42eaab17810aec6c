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
    "decode": lambda ledger, rows, *_, **k: alloc_for_decode(ledger, rows, rows > 1, **k),
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
    # The mask `rows > 1` of the decode is not the ledger's; it makes the one kernel more.
    assert facts.kernels == (2 if operation == "decode" else 1)
    assert facts.loop_kernels == {}
    assert facts.alias_bytes == nbytes(ledger)
    assert facts.temp_bytes < 1024
    assert facts.large_ops(4 * ledger.lens.shape[0]) == []
