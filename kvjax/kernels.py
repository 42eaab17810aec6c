"""A ledger's operations as one kernel: which ledgers have one, and the way to `pallas_kernels` and back.

A kernel serves the plain ledger: a `ReqToTokenPool` over an allocator that keeps no staged pages. The others have more
books than it knows, and stay with the jax.numpy code of kvjax.extend and kvjax.steps, on every platform.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax

from kvjax.allocators import TokenToKVPoolAllocator
from kvjax.rows import ReqToTokenPool
from pallas_kernels import registry
from pallas_kernels.books import Books

if TYPE_CHECKING:
    from kvjax.ledger import Ledger


def serves(
    operation: str,
    implementation: str | None,
    ledger: Ledger,
    *lanes: jax.Array,
    reason: str | None = None,
    **static: Any,
) -> bool:
    """Whether this call goes to a kernel; `registry.call` then takes it, or says why not.

    lanes, static: the operation's other arguments. reason: why these arguments have no kernel, as a sentence's middle.
    Raises ValueError when a kernel is named and this ledger or call has none.
    """
    registry.check_name(implementation)
    if implementation == "xla" or lanes[0].shape[0] == 0:
        return False
    reason = reason or _why_none(ledger)
    if implementation is None:
        return reason is None and registry.best(operation, *books_of(ledger), *lanes, **static) != "xla"
    if reason is not None:
        raise ValueError(
            f"{operation}: implementation={implementation!r} cannot be used: no kernel knows {reason}; choose 'xla', "
            "or None for the best of the platform."
        )
    return True


def _why_none(ledger: Ledger) -> str | None:
    if ledger.slides:
        return "the window side of this ledger's allocator"
    if not isinstance(ledger.table, ReqToTokenPool):
        return "the state slots of this ledger's table"
    if ledger.allocator.staged is not None:
        return "the sorted merge of an allocator with need_sort"
    return None


def books_of(ledger: Ledger) -> Books:
    """The ledger's arrays, as kernels take them; for ledgers that have one."""
    table, allocator = cast(ReqToTokenPool, ledger.table), ledger.allocator
    return Books(
        req_to_token=table.req_to_token,
        lens=ledger.lens,
        free_rows=table.free_rows_list,
        row_pos=table.pos,
        generation=table.generation,
        row_counters=table.counters,
        pages=allocator.ring if isinstance(allocator, TokenToKVPoolAllocator) else allocator.stack,
        page_pos=allocator.pos,
        counters=allocator.counters,
    )


def with_books(ledger: Ledger, books: Books) -> Ledger:
    """The ledger with these arrays instead."""
    table = dataclasses.replace(
        ledger.table,
        req_to_token=books.req_to_token,
        free_rows_list=books.free_rows,
        pos=books.row_pos,
        generation=books.generation,
        counters=books.row_counters,
    )
    free = "ring" if isinstance(ledger.allocator, TokenToKVPoolAllocator) else "stack"
    allocator = dataclasses.replace(
        ledger.allocator, **{free: books.pages}, pos=books.page_pos, counters=books.counters
    )
    return dataclasses.replace(ledger, table=table, allocator=allocator, lens=books.lens)
