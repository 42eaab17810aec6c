"""The page table in the forms that other libraries want, made inside the program.

Each view names the same tokens: of every row its first `kv_lens` tokens, as the request table has them. Shapes are
fixed, lengths are data, and lanes that are not in use (row 0, a row outside the table, length 0) are empty. Where the
fixed shape is too small, `ok` is False and every lane is empty: nobody reads half a sequence.

A page is the one of the pool: `slot // page_size`, page 0 being padding. page_size is the allocator's or a divisor of
it, down to 1, since consecutive tokens of a page have consecutive slots. A leaf [slots, heads, width] is
`paged(leaf, page_size)` for vLLM and FlashInfer ("NHD"), which moves nothing, and `head_major(leaf, page_size)` for
JAX's own kernels, which is a copy of the whole leaf.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.indexing import in_range, take2
from kvjax.layout import PAD_ROW, capacity_of, ceil_div, page_of, positive
from kvjax.operation import int32, operation, same_length, state
from kvjax.ragged import lanes_of

PAD_SLOT_ID = -1  # of vLLM's slot mapping: a token that is not written


@state
class BlockTable:
    """A page table of one row per lane: vLLM's block table, and `page_indices` and `lengths` of JAX's kernels."""

    pages: jax.Array  # i32[b, columns], the lane's pages in order, then 0
    lengths: jax.Array  # i32[b], tokens of the lane; 0: not in use
    ok: jax.Array  # bool[]: every lane fits


@state
class IndptrTable:
    """FlashInfer's paged KV table: the pages of all lanes back to back."""

    kv_indptr: jax.Array  # i32[b + 1], where each lane's pages begin in kv_indices
    kv_indices: jax.Array  # i32[capacity], then 0
    kv_last_page_len: jax.Array  # i32[b], tokens in the lane's last page, 1 .. page_size; 0 for an empty lane
    ok: jax.Array  # bool[]: all pages fit


@operation("page_size", "columns")
def block_table(source: Any, rows: Any, kv_lens: Any, *, page_size: int, columns: int) -> BlockTable:
    """The block table of rows i32[b] with kv_lens i32[b] tokens each (vLLM `block_table` and `seq_lens`).

    source: the ledger, its request table, or i32[rows, max_context_len], the slot of each token.
    columns: pages that a lane can have, vLLM's max_num_blocks_per_req, JAX's pages_per_sequence. For
        `jax.experimental.pallas.ops.gpu.paged_attention` (block_tables) and its TPU twin (page_indices).
    """
    table, rows, lens, page_size = _lanes(source, rows, kv_lens, page_size)
    width = positive("columns", columns)
    ok = jnp.all(ceil_div(lens, page_size) <= width)
    lens = jnp.where(ok, lens, 0)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    pages = _pages(table, rows[:, None], column, page_size)
    return BlockTable(jnp.where(column < ceil_div(lens, page_size)[:, None], pages, 0), lens, ok)


@operation("capacity")
def slot_mapping(source: Any, rows: Any, start: Any, kv_lens: Any, *, capacity: int) -> tuple[jax.Array, jax.Array]:
    """(i32[capacity], ok): slots of tokens start .. kv_lens - 1 of each row, back to back, then -1 (vLLM's padding).

    rows, start, kv_lens: i32[b]. What a step writes: vLLM's `slot_mapping`, which is int64 there.
    """
    table, rows, lens, _ = _lanes(source, rows, kv_lens, 1)
    start = jnp.clip(int32("start", start, 1), 0, lens)
    same_length(rows=rows, start=start)
    capacity = capacity_of(capacity)
    if rows.shape[0] == 0:
        return jnp.full(capacity, PAD_SLOT_ID, jnp.int32), jnp.ones((), jnp.bool_)
    new = lens - start
    ok = _fits(new, capacity)
    lane, offset, valid = lanes_of(jnp.where(ok, new, 0), capacity)
    slots = take2(table, rows[lane], start[lane] + offset)
    return jnp.where(valid, slots, PAD_SLOT_ID), ok


@operation("page_size", "capacity")
def indptr_table(source: Any, rows: Any, kv_lens: Any, *, page_size: int, capacity: int) -> IndptrTable:
    """FlashInfer's kv_indptr, kv_indices and kv_last_page_len of rows i32[b] with kv_lens i32[b] tokens each.

    source: as in `block_table`. capacity: pages of all lanes together.
    """
    table, rows, lens, page_size = _lanes(source, rows, kv_lens, page_size)
    capacity = capacity_of(capacity)
    if rows.shape[0] == 0:
        return IndptrTable(jnp.zeros(1, jnp.int32), jnp.zeros(capacity, jnp.int32), lens, jnp.ones((), jnp.bool_))
    ok = _fits(ceil_div(lens, page_size), capacity)
    lens = jnp.where(ok, lens, 0)
    count = ceil_div(lens, page_size)
    lane, offset, valid = lanes_of(count, capacity)
    pages = _pages(table, rows[lane], offset, page_size)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    last = lens - (count - 1) * page_size
    return IndptrTable(indptr, jnp.where(valid, pages, 0), jnp.where(count > 0, last, 0), ok)


def paged(leaf: jax.Array, page_size: int) -> jax.Array:
    """A leaf [slots, heads, width] as [pages, page_size, heads, width]: vLLM's and FlashInfer's NHD. Nothing moves."""
    size, slots = positive("page_size", page_size), leaf.shape[0]
    if slots % size:
        raise ValueError(
            f"a leaf of {slots} slots does not divide into pages of {size}; create the pool with a size that is a "
            "multiple of its page size."
        )
    return leaf.reshape(slots // size, size, *leaf.shape[1:])


def head_major(leaf: jax.Array, page_size: int) -> jax.Array:
    """A leaf as [heads, pages, page_size, width], what JAX's paged attention kernels read: a copy of all of it."""
    return paged(leaf, page_size).transpose(2, 0, 1, 3)


def _lanes(source: Any, rows: Any, kv_lens: Any, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """(table, rows, lengths with 0 for lanes that are not in use, page_size), checked."""
    size = positive("page_size", page_size)
    held = getattr(source, "page_size", size)
    if held % size:
        raise ValueError(f"pages of {size} tokens are no part of the ledger's pages of {held}; pass a divisor of it.")
    table = int32("source", getattr(getattr(source, "table", source), "req_to_token", source), 2)
    rows, lens = int32("rows", rows, 1), int32("kv_lens", kv_lens, 1)
    same_length(rows=rows, kv_lens=lens)
    used = in_range(rows, table.shape[0], lower=PAD_ROW + 1)
    return table, jnp.where(used, rows, PAD_ROW), jnp.where(used, jnp.clip(lens, 0, table.shape[1]), 0), size


def _pages(table: jax.Array, rows: jax.Array, column: jax.Array, page_size: int) -> jax.Array:
    """The page of each row's tokens from column * page_size on; 0 outside the table."""
    rows, column = jnp.broadcast_arrays(rows, column)
    return page_of(take2(table, rows, column * page_size), page_size)


def _fits(count: jax.Array, capacity: int) -> jax.Array:
    """bool[]: counts >= 0 sum up to at most `capacity`, and to less than 2^30, so that no int32 sum wraps."""
    return (jnp.sum(count.astype(jnp.float32)) < 2.0**30) & (jnp.sum(count, dtype=jnp.int32) <= capacity)
