"""alloc_extend in plain jax.numpy: the meaning of the operation, in the two forms that are fast.

Both name the same slots. `by_page` works per touched page and writes page-sized windows: what a CPU likes.
`by_token` works per output token and only reads: few kernels on a GPU, but b comparisons per token.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import ceil_div, div, from_top

Result = tuple[jax.Array, jax.Array, jax.Array]


def alloc_extend(
    stack: jax.Array,
    free_count: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    *,
    page_size: int,
    capacity: int,
) -> Result:
    """See `pallas_kernels.alloc_extend`, which checks the arguments."""
    static = {"page_size": page_size, "capacity": capacity}
    return lax.platform_dependent(
        *(stack, free_count, prefix_lens, seq_lens, last_loc),
        cuda=functools.partial(by_token, **static),
        default=functools.partial(by_page, **static),
    )


def by_page(
    stack: jax.Array,
    free_count: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    *,
    page_size: int,
    capacity: int,
) -> Result:
    """One window of up to page_size slots per touched page, all added into the output at once.

    Windows overlap (a page that is not filled ends inside the next window's range), so they are masked with 0 and
    *added*: the sum does not depend on the order in which a scatter visits them.
    """
    batch, i32 = prefix_lens.shape[0], jnp.int32
    held = ceil_div(prefix_lens, page_size)  # pages that the prefix touches
    pages = ceil_div(seq_lens, page_size) - held  # new pages per lane
    head = jnp.minimum(seq_lens, held * page_size) - prefix_lens  # tokens that the prefix's last page still takes
    end, page_end = jnp.cumsum(seq_lens - prefix_lens), jnp.cumsum(pages)
    start, first = end - (seq_lens - prefix_lens), page_end - pages  # i32[b]: first output, rank of the first page
    new_pages = page_end[-1]
    ok = (new_pages <= free_count) & (end[-1] <= capacity)

    # Every new page r (its rank in the call) begins at output r * page_size + shift of its lane, and stops at the
    # lane's end. Both are step functions of r: put the steps down where each lane begins and sum them up.
    most = min(capacity, capacity // page_size + batch)  # new pages that `capacity` tokens can touch
    lane = jnp.stack([start + head - first * page_size, end])
    steps = lane - jnp.pad(lane[:, :-1], ((0, 0), (1, 0)))
    step_at = jnp.zeros((2, most), i32).at[:, first].add(steps, mode="drop")
    shift, stop = jnp.cumsum(step_at, axis=1)
    rank = jnp.arange(most, dtype=i32)
    begin = rank * page_size + shift
    live = ok & (rank < new_pages)
    count = jnp.where(live, jnp.minimum(stop - begin, page_size), 0)
    page = from_top(stack, free_count, rank, most)
    if page_size == 1:  # a page is a token: no prefix ends inside a page, and page r is output r
        return jnp.where(live, page, 0), jnp.where(ok, new_pages, 0), ok

    at = jnp.concatenate([start, jnp.where(live, begin, capacity)])
    slot = jnp.concatenate([last_loc + 1, page * page_size])[:, None] + jnp.arange(page_size, dtype=i32)
    in_use = jnp.arange(page_size, dtype=i32) < jnp.concatenate([jnp.where(ok, head, 0), count])[:, None]
    loc = lax.scatter_add(
        jnp.zeros(capacity + page_size, i32),  # a window may reach past the last token, never past this
        jnp.clip(at, 0, capacity)[:, None],
        jnp.where(in_use, slot, 0),
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return loc[:capacity], jnp.where(ok, new_pages, 0), ok


def by_token(
    stack: jax.Array,
    free_count: jax.Array,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    *,
    page_size: int,
    capacity: int,
) -> Result:
    """Every output token finds its lane by comparing with where the lanes end, then its page by its position."""
    batch, i32 = prefix_lens.shape[0], jnp.int32
    held = ceil_div(prefix_lens, page_size)
    pages = ceil_div(seq_lens, page_size) - held
    before = jnp.arange(batch)[None, :] <= jnp.arange(batch)[:, None]
    end = jnp.sum(jnp.where(before, seq_lens - prefix_lens, 0), axis=1, dtype=i32)
    page_end = jnp.sum(jnp.where(before, pages, 0), axis=1, dtype=i32)
    new_pages = page_end[-1]
    ok = (new_pages <= free_count) & (end[-1] <= capacity)

    token = jnp.arange(capacity, dtype=i32)
    passed = end[None, :] <= token[:, None]  # bool[capacity, b]: the lane lies wholly before the token
    lane = jnp.minimum(jnp.sum(passed, axis=1, dtype=i32), batch - 1)
    start = jnp.max(jnp.where(passed, end, 0), axis=1)  # of the token's lane
    first = jnp.max(jnp.where(passed, page_end, 0), axis=1)

    position = prefix_lens[lane] + token - start
    nth = div(position, page_size) - held[lane]  # which new page of the lane; negative: still the prefix's page
    page = stack.at[free_count - 1 - first - nth].get(mode="clip")
    slot = jnp.where(nth < 0, last_loc[lane] + 1 + token - start, page * page_size + lax.rem(position, i32(page_size)))
    return jnp.where(ok & (token < end[-1]), slot, 0), jnp.where(ok, new_pages, 0), ok
