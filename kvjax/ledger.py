"""The ledger: a request table and an allocator as one pytree. The operations that span both are in kvjax.extend
(`alloc_for_extend`) and kvjax.steps (`alloc_for_decode`, `release_rows`, `set_committed`).

The table may be a hybrid one. The ledger is generic over its allocator: it uses only `page_size`, `continues`,
`alloc_extend`, `alloc_decode`, `free_page_ids`, `available_size` and `clear`. An allocator with a window side
(kvjax.allocators.swa and its neighbours) has the questions of its section "what the ledger asks" besides. These
branches are static: a ledger without a window side compiles to the program it had.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.allocators import (
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvjax.indexing import take2
from kvjax.layout import ceil_div, page_of, positive
from kvjax.operation import operation, state, static
from kvjax.rows import HybridReqToTokenPool, ReqToTokenPool

Table = ReqToTokenPool | HybridReqToTokenPool
WindowAllocator = SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator | SWARingTokenToKVPoolAllocator
Allocator = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator | WindowAllocator

COMMITTED, ALLOCATED, OWNED_FROM, WINDOW_FROM = range(4)  # columns of `lens`; the last one only with a window side


@state
class Ledger:
    """Who holds what: rows, the slots of their tokens, and how much of each row is its own."""

    table: Table
    allocator: Any  # one of `Allocator`
    # i32[size + 1, 3], tokens: committed, allocated, owned_from of each row; 0 for free rows. With a window side there
    # is a fourth column, window_from: the window layers hold the row's tokens from there on.
    lens: jax.Array
    window: int | None = static(default=None)  # tokens that a window layer sees; None: nothing is ever released early

    @classmethod
    def create(cls, table: Table, allocator: Allocator, window: int | None = None) -> Ledger:
        """A ledger without live rows over a fresh request table and a fresh allocator.

        window: tokens that a window layer sees, the newest included; None keeps everything (and is all that an
        allocator without a window side allows). ValueError for other types, and when it does not fit the allocator.
        """
        if not isinstance(table, Table) or not isinstance(allocator, Allocator):
            raise ValueError(
                f"a ledger is made of a request table and an allocator, got {type(table).__name__} and "
                f"{type(allocator).__name__}; pass Ledger.create(ReqToTokenPool, allocator)."
            )
        slides = isinstance(allocator, WindowAllocator)
        if window is not None and not slides:
            raise ValueError(
                f"a window of {window} needs an allocator with a window side, got {type(allocator).__name__}; "
                "use SWATokenToKVPoolAllocator, PureSWATokenToKVPoolAllocator or SWARingTokenToKVPoolAllocator."
            )
        if isinstance(allocator, SWARingTokenToKVPoolAllocator):
            allocator.check_rows(table.size, window)
        lens = jnp.zeros((table.size + 1, 4 if slides else 3), jnp.int32)
        return cls(table, allocator, lens, None if window is None else positive("window", window))

    @property
    def slides(self) -> bool:
        """Whether the allocator has a window side."""
        return self.lens.shape[-1] > WINDOW_FROM

    @property
    def page_size(self) -> int:
        """Tokens per page; 1 with the token allocator."""
        return self.allocator.page_size

    @property
    def committed(self) -> jax.Array:
        """i32[size + 1]: tokens of each row whose KV is in the pool, or will be when the step ends."""
        return self.lens[..., COMMITTED]

    @property
    def allocated(self) -> jax.Array:
        """i32[size + 1]: tokens of each row that have a slot; at least `committed`."""
        return self.lens[..., ALLOCATED]

    @property
    def owned_from(self) -> jax.Array:
        """i32[size + 1], page-aligned: pages before it belong to a prefix tree or to another row."""
        return self.lens[..., OWNED_FROM]

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases of rows and of pages that were refused."""
        return self.table.faults + self.allocator.faults

    def check_pool(self, pool: Any) -> None:
        """ValueError unless every slot that the allocator can hand out exists in the pool, and no other.

        A pool with fewer slots would drop writes that the ledger believes in; one with more is wasted memory.
        """
        if not hasattr(pool, "size") or not hasattr(pool, "page_size"):
            raise ValueError(f"check_pool needs a KV pool with a size and a page_size, got {type(pool).__name__}.")
        wanted = self.allocator.pool_sizes if self.slides else self.allocator.size
        holds = getattr(pool, "sizes", pool.size)
        if self.slides and isinstance(holds, tuple):  # no layers of one kind: nothing is ever written there
            wanted = tuple(want if has else 0 for want, has in zip(wanted, holds, strict=True))
        if (holds, pool.page_size) != (wanted, self.allocator.page_size):
            raise ValueError(
                f"the allocator hands out slots of {wanted} tokens in pages of "
                f"{self.allocator.page_size}, but {type(pool).__name__} holds {holds} in pages of "
                f"{pool.page_size}; create both with the same size and page_size."
            )

    @operation()
    def clear(self) -> Ledger:
        """No live rows, every page free; generations and fault counts stay."""
        return Ledger(self.table.clear(), self.allocator.clear(), jnp.zeros_like(self.lens), self.window)


def as_ledger(what: str, value: Any) -> Ledger:
    """`value`, which is a Ledger; ValueError otherwise. what: the operation that asks."""
    if not isinstance(value, Ledger):
        raise ValueError(f"{what} works on a kvjax.Ledger, got {type(value).__name__}; pass Ledger.create(...).")
    return value


def row_pages(
    table: Table, rows: jax.Array, start: jax.Array, end: jax.Array, used: jax.Array, page_size: int
) -> jax.Array:
    """i32[m * pages per row]: pages of tokens [start, end) of each used row, row after row; 0 elsewhere."""
    first = jnp.arange(ceil_div(table.max_context_len, page_size), dtype=jnp.int32) * page_size
    column = jnp.broadcast_to(first, (rows.shape[0], first.shape[0]))
    held = used[:, None] & (column >= start[:, None]) & (column < end[:, None])
    slot = take2(table.req_to_token, jnp.broadcast_to(rows[:, None], column.shape), column)
    return jnp.where(held, page_of(slot, page_size), 0).reshape(-1)
