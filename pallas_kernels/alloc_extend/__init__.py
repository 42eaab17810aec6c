"""alloc_extend: the new slots of a batch of prefill chunks, from the stack of free pages."""

import jax

from pallas_kernels import arguments, registry


def alloc_extend(
    stack: jax.Array,
    free_count: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    *,
    page_size: int,
    capacity: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots for positions prefix_len .. seq_len - 1 of every lane (SGLang `alloc_extend`).

    stack: i32[num_pages], free pages; the next one taken is stack[free_count - 1], then stack[free_count - 2].
    free_count: i32[], how many entries of the stack are free pages.
    prefix_lens, seq_lens: i32[b], tokens before and after; a lane that is not in use has both equal.
    last_loc: i32[b], slot of the token before the first new one; read where the prefix ends inside a page.
    capacity: length of the output, a static shape: lengths are data, so one compilation serves them all.
    implementation, interpret: see `registry.call`.

    The caller guarantees 0 <= prefix_len <= seq_len and that the sums of lengths and pages fit int32.

    Returns (loc, new_pages, ok):
    loc: i32[capacity], the new slots of all lanes back to back in lane order, then 0. Tokens that fall into the
        partly filled last page follow last_loc; every later page is the next free page, in lane order.
    new_pages: i32[], pages taken off the top of the stack.
    ok: bool[], new pages <= free_count and total new tokens <= capacity. Where it is False, loc and new_pages
        are 0 and nothing was taken.

    Costs O(b + capacity) on a CPU, never O(num_pages). Raises ValueError for wrong shapes, dtypes, sizes or
    implementation names.
    """
    arguments.check_size("page_size", page_size)
    arguments.check_size("capacity", capacity)
    arguments.check_stack(stack, free_count)
    arguments.check_lanes({}, prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
    arrays = (stack, free_count, prefix_lens, seq_lens, last_loc)
    static = {"page_size": page_size, "capacity": capacity}
    return registry.call("alloc_extend", implementation, interpret, *arrays, **static)
