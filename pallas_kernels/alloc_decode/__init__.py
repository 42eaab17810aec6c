"""alloc_decode: one new slot per running request, from the stack of free pages."""

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, registry


def alloc_decode(
    stack: jax.Array,
    free_count: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    *,
    page_size: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots of one decode step (SGLang `PagedTokenToKVPoolAllocator.alloc_decode`, and at page size 1 too).

    stack: i32[num_pages], free pages; the next one taken is stack[free_count - 1], then stack[free_count - 2].
    free_count: i32[], how many entries of the stack are free pages.
    seq_lens: i32[b], tokens per lane, the new one included. last_loc: i32[b], slot of the token before it.
    active: bool[b]; the other lanes take nothing and get 0.
    implementation, interpret: see `registry.call`.

    Returns (loc, new_pages, ok):
    loc: i32[b]. Where (seq_len - 1) % page_size == 0 an active lane takes the next free page, in lane order, and
        gets its first slot; other active lanes get last_loc + 1; an active lane of length 0 gets 0.
    new_pages: i32[], pages taken off the top of the stack.
    ok: bool[], new pages <= free_count. Where it is False, loc and new_pages are 0 and nothing was taken.

    Costs O(b), never O(num_pages). Raises ValueError for wrong shapes, dtypes or implementation names.
    """
    arguments.check_size("page_size", page_size)
    arguments.check_stack(stack, free_count)
    arguments.check_lanes({"active": jnp.bool_}, seq_lens=seq_lens, last_loc=last_loc, active=active)
    arrays = (stack, free_count, seq_lens, last_loc, active)
    return registry.call("alloc_decode", implementation, interpret, *arrays, page_size=page_size)
