"""The arrays of a ledger, as the kernels of its operations take them, and the checks that they share.

A kernel sees one flat list of arrays instead of kvjax' dataclasses, because this package imports nothing from kvjax.
The field names are those of `kvjax.ReqToTokenPool`, the allocators and `kvjax.Ledger`, which explain them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments
from pallas_kernels.arguments import power_of_two

COMMITTED, ALLOCATED, OWNED_FROM = range(3)  # columns of `lens`
FREE_ROWS, ROW_FAULTS = range(2)  # entries of `row_counters`
HEAD = 0  # entry of `counters` with a ring, whose other entries stand one place later than a stack's
OTHERS = 16  # lanes that are compared with all lanes at once


class Books(NamedTuple):
    """What a ledger is made of. Free pages are a stack, or with token pages a ring (`counters` tells them apart)."""

    req_to_token: jax.Array  # i32[rows + 1, max_context_len], slot of each token of each row
    lens: jax.Array  # i32[rows + 1, 3], tokens: committed, allocated, owned_from
    free_rows: jax.Array  # i32[rows], list of free rows
    row_pos: jax.Array  # i32[rows + 1], where each row stood in it last
    generation: jax.Array  # i32[rows + 1], how often each row was handed out
    row_counters: jax.Array  # i32[2]: free rows, faults
    pages: jax.Array  # i32[num_pages], free pages: a stack, or a ring
    page_pos: jax.Array  # i32[num_pages + 1], where each page stood in it last
    counters: jax.Array  # stack: i32[3] free, staged, faults. Ring: i32[4] head, free, staged, faults

    @property
    def ring(self) -> bool:
        """Whether the free pages are a ring: first in, first out."""
        return self.counters.shape[0] == 4

    @property
    def free(self) -> int:
        """Entry of `counters` that counts the free pages; faults stand two places later."""
        return int(self.ring)

    def sizes(self, batch: int, page_size: int) -> dict[str, int]:
        """What every Triton kernel of a ledger has as tl.constexpr, for a call of `batch` lanes."""
        lanes = power_of_two(batch)
        rows, width = self.req_to_token.shape
        return {
            "BATCH": batch,
            "LANES": lanes,
            "OTHERS": min(OTHERS, lanes),
            "ROWS": rows,
            "WIDTH": width,
            "PAGES": self.pages.shape[0],
            "PAGE": page_size,
            "RING": self.ring,
        }

    def shapes(self, fields: tuple[str, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of these fields, as results of a kernel that updates them."""
        return tuple(jax.ShapeDtypeStruct(getattr(self, f).shape, jnp.int32) for f in fields)


def aliases(updated: tuple[str, ...]) -> dict[int, int]:
    """Argument -> result of the fields that a kernel updates in place.

    A kernel takes the whole of Books first, and returns the fields that it updates first, in the order named here.
    """
    return {Books._fields.index(field): result for result, field in enumerate(updated)}


def check(books: Books, page_size: int) -> None:
    """ValueError unless the arrays fit each other and the page size."""
    arguments.check_size("page_size", page_size)
    arguments.check_array("req_to_token", books.req_to_token, jnp.int32, (None, None))
    rows = books.req_to_token.shape[0]
    arguments.check_array("lens", books.lens, jnp.int32, (rows, 3))
    arguments.check_array("free_rows", books.free_rows, jnp.int32, (rows - 1,))
    arguments.check_array("row_pos", books.row_pos, jnp.int32, (rows,))
    arguments.check_array("generation", books.generation, jnp.int32, (rows,))
    arguments.check_array("row_counters", books.row_counters, jnp.int32, (2,))
    arguments.check_array("pages", books.pages, jnp.int32, (None,))
    arguments.check_array("page_pos", books.page_pos, jnp.int32, (books.pages.shape[0] + 1,))
    arguments.check_array("counters", books.counters, jnp.int32, (4 if books.ring else 3,))
    if books.ring and page_size != 1:
        raise ValueError(f"a ring hands out single slots, got page_size {page_size}; pass 1, or a stack's counters.")
    if min(books.req_to_token.shape) < 1 or rows < 2 or books.pages.shape[0] < 1:
        raise ValueError(
            f"a ledger needs a row, a column and a page, got a table of {tuple(books.req_to_token.shape)} and "
            f"{books.pages.shape[0]} pages; create it with larger sizes."
        )


unsupported = arguments.at_most(1024)  # of every kernel of a ledger
