"""The cost of an operation does not depend on the pool: read from the programs of a large one, not from a clock."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kvjax import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from tests.inplace import needs_two_cores

pytestmark = pytest.mark.compiled

PAGES = 262144
LANES = jnp.arange(1, 9, dtype=jnp.int32)
OPERATIONS = {
    "alloc": lambda a, x: a.alloc(x[0] * a.page_size, capacity=64)[:2],
    "alloc_decode": lambda a, x: a.alloc_decode(x, x + a.page_size, x > 1)[:2],
    "alloc_extend": lambda a, x: a.alloc_extend(x, x + 3, x + a.page_size, capacity=64)[:2],
    "free": lambda a, x: (a.free(x), x),
    "free_segment": lambda a, x: (a.free_segment(x), x),
    "free_page_ids": lambda a, x: (a.free_page_ids(x), x) if a.page_size > 1 else (a.free(x), x),
}


@needs_two_cores
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_nothing_is_split_over_threads(name, page_size):
    """Splitting costs more than the operation. Scatters are marked as split but run on one thread."""
    allocator = (
        TokenToKVPoolAllocator.create(PAGES)
        if page_size == 1
        else PagedTokenToKVPoolAllocator.create(PAGES * page_size, page_size)
    )

    def loop(a, x):
        def step(carry, _):
            a, x = carry
            a, loc = OPERATIONS[name](a, x)
            return (a, loc[: LANES.size]), None

        return lax.scan(step, (a, x), None, length=5)[0]

    text = jax.jit(loop, donate_argnums=0).lower(allocator, LANES).compile().as_text()
    assert text is not None
    split = [line.strip() for line in text.splitlines() if "outer_dimension_partitions" in line]
    assert [line for line in split if not line.startswith("%wrapped_scatter")] == []
