"""ReqToTokenPool: which row a request holds, and which slot each of its tokens lies in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import freelist
from kvjax.indexing import in_range, put, put2, take, take2
from kvjax.layout import INT32_MAX, positive
from kvjax.operation import int32, mask, operation, state, static

FREE, FAULTS = range(2)  # entries of `counters`


@state
class ReqToTokenPool:
    """Request table (SGLang: ReqToTokenPool). Rows 1 .. size; row 0 is the padding row and is never handed out.

    Free rows are SGLang's list: taken from its end, freed rows appended there. A freed row keeps its tokens and its
    generation; whoever reads a row later compares generations. They survive `clear` and wrap to -2**31 after 2**31
    hand-outs of one row, so compare them for equality only.
    """

    req_to_token: jax.Array  # i32[size + 1, max_context_len], slot of each token of each row
    free_rows_list: jax.Array  # i32[size], free rows; entry counters[FREE] - 1 is handed out last of a batch
    pos: jax.Array  # i32[size + 1], witness of each row (kvjax.freelist)
    generation: jax.Array  # i32[size + 1], how often each row was handed out
    counters: jax.Array  # i32[2]: free rows, faults
    size: int = static()  # rows that can be handed out
    max_context_len: int = static()  # tokens per row

    @classmethod
    def create(cls, size: int, max_context_len: int) -> ReqToTokenPool:
        """All rows free, all entries 0. Raises ValueError for sizes below 1 or row ids past int32."""
        rows, width = positive("size", size), positive("max_context_len", max_context_len)
        for name, value in (("size", rows), ("max_context_len", width)):
            if value >= INT32_MAX:
                raise ValueError(f"{name} {value} does not fit int32 (at most {INT32_MAX - 1}); make it smaller.")
        order, pos = _all_free(rows)
        table, generation = jnp.zeros((rows + 1, width), jnp.int32), jnp.zeros(rows + 1, jnp.int32)
        return cls(table, order, pos, generation, jnp.array([rows, 0], jnp.int32), rows, width)

    @classmethod
    def from_list(cls, free: Sequence[int], *, size: int, max_context_len: int) -> ReqToTokenPool:
        """A table with the given free list (last entry handed out first), for tests."""
        base = cls.create(size, max_context_len)
        order, pos = np.zeros(size, np.int32), np.full(size + 1, size, np.int32)
        order[: len(free)] = list(free)
        pos[np.asarray(list(free), np.int32)] = np.arange(len(free), dtype=np.int32)
        counters = jnp.array([len(free), 0], jnp.int32)
        return dataclasses.replace(base, free_rows_list=jnp.array(order), pos=jnp.array(pos), counters=counters)

    @property
    def faults(self) -> jax.Array:
        """i32[]: row releases that were refused, once per distinct row and call."""
        return self.counters[..., FAULTS]

    def available_size(self) -> jax.Array:
        """i32[]: free rows."""
        return self.counters[..., FREE]

    @property
    def num_free_rows(self) -> jax.Array:
        """i32[]: free rows, as entries of `free_rows_list`."""
        return self.counters[..., FREE]

    def with_entries(self, req_to_token: jax.Array) -> ReqToTokenPool:
        """The table with these entries instead: i32[size + 1, max_context_len]."""
        return dataclasses.replace(self, req_to_token=req_to_token)

    def to_list(self) -> list[int]:
        """The free list, oldest entry first, read to the host."""
        return np.asarray(self.free_rows_list)[: int(np.asarray(self.counters)[FREE])].tolist()

    def is_free(self, rows: jax.Array) -> jax.Array:
        """bool, shape of rows: the row is on the free list; False for ids out of range."""
        return freelist.is_free(rows, self.pos, self.free_rows_list, self.available_size())

    def is_live(self, rows: jax.Array) -> jax.Array:
        """bool, shape of rows: the row is handed out."""
        return in_range(rows, self.size + 1, 1) & ~self.is_free(rows)

    @operation()
    def alloc_rows(self, want: jax.Array) -> tuple[ReqToTokenPool, jax.Array, jax.Array]:
        """A row for every lane that wants one, or none at all.

        want: bool[b]. Returns (pool, rows i32[b]: the last free rows in list order, in lane order, 0 on other lanes
        and everywhere on failure; ok bool[]). The generation of each row handed out rises by 1.
        """
        want = mask("want", want, (jnp.size(want),))
        rank, total = freelist.exclusive_rank(want)
        free = self.available_size()
        ok = total <= free
        taken = jnp.where(ok, total, 0)
        rows = jnp.where(want & ok, take(self.free_rows_list, free - total + rank), 0)
        generation = put(self.generation, rows, take(self.generation, rows) + 1, lower=1)
        counters = self.counters.at[FREE].add(-taken)
        return dataclasses.replace(self, generation=generation, counters=counters), rows, ok

    @operation()
    def free_rows(self, rows: jax.Array) -> ReqToTokenPool:
        """Append the rows (i32[m], 0 = padding) to the free list in the given order; rows that are free count."""
        rows = int32("rows", rows, 1)
        if rows.shape[0] == 0:
            return self
        pos, fresh = freelist.first_occurrences(rows, self.pos, self.is_live(rows))
        faults = freelist.count_distinct(rows, (rows != 0) & ~fresh)
        rank, total = freelist.exclusive_rank(fresh)
        at = self.available_size() + rank
        order = put(self.free_rows_list, at, rows, valid=fresh)
        pos = put(pos, rows, at, valid=fresh, lower=1)
        return dataclasses.replace(
            self, free_rows_list=order, pos=pos, counters=self.counters + jnp.stack([total, faults])
        )

    @operation()
    def write(
        self, rows: jax.Array, positions: jax.Array, locs: jax.Array, valid: jax.Array | None = None
    ) -> ReqToTokenPool:
        """req_to_token[rows[i], positions[i, j]] = locs[i, j].

        rows: i32[b]; positions, locs: i32[b, t]; valid: bool[b, t] (None: every lane). Row 0, rows and positions
        outside the table and lanes that are not valid write nothing.
        """
        rows = int32("rows", rows, 1)
        positions, locs = int32("positions", positions, 2), int32("locs", locs, 2)
        if positions.shape != locs.shape or positions.shape[0] != rows.shape[0]:
            raise ValueError(
                f"positions {positions.shape} and locs {locs.shape} must be [b, t] with b = {rows.shape[0]} rows."
            )
        used = jnp.broadcast_to((rows > 0)[:, None], locs.shape)
        if valid is not None:
            used &= mask("valid", valid, locs.shape)
        row = jnp.broadcast_to(rows[:, None], locs.shape)
        return dataclasses.replace(self, req_to_token=put2(self.req_to_token, row, positions, locs, valid=used))

    @operation()
    def locs(self, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """Slots of tokens: rows i32[b], positions i32[b, t] -> i32[b, t]; 0 for row 0 and positions outside."""
        rows, positions = int32("rows", rows, 1), int32("positions", positions, 2)
        row = jnp.broadcast_to(rows[:, None], positions.shape)
        used = in_range(row, self.size + 1, 1) & in_range(positions, self.max_context_len)
        return jnp.where(used, take2(self.req_to_token, row, positions), 0)

    @operation()
    def clear(self) -> ReqToTokenPool:
        """Every row free again; generations, entries and the fault count stay."""
        order, pos = _all_free(self.size)
        counters = jnp.stack([jnp.asarray(self.size, jnp.int32), self.faults])
        return dataclasses.replace(self, free_rows_list=order, pos=pos, counters=counters)


def _all_free(n: int) -> tuple[jax.Array, jax.Array]:
    row = jnp.arange(n + 1, dtype=jnp.int32)
    return row[1:], row - 1
