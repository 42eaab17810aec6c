"""LedgerBackend: the scheduler's device side on the real ledger, without a model.

Every program is jitted with the ledger donated, in a small fixed set of padded shapes; each fetches one vector.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.indexing import put2
from kvjax.layout import NEW_ROW, ceil_div
from kvjax.ledger import OWNED_FROM, Ledger, alloc_for_decode, alloc_for_extend, release_rows
from kvjax.operation import int32
from kvjax.serving.backend import Chunk, Outcome
from kvjax.serving.request import Request

LANES = (16, 256)  # padded chunks of one program
BATCHES = (64, 256, 1024, 4096)  # padded decode rows


def _program(*static: str):
    def wrap(fn):
        return jax.jit(fn, donate_argnums=0, static_argnames=static)

    return wrap


def _packed(ledger: Ledger, *more: jax.Array) -> jax.Array:
    """i32[3 + ...]: free pages, staged pages, faults, and what the program adds: all that the host fetches."""
    a = ledger.allocator
    return jnp.stack([a.free_pages, a.staged_pages, ledger.faults, *(jnp.asarray(m, jnp.int32) for m in more)])


@_program()
def _open(ledger: Ledger, slots: jax.Array, n: jax.Array) -> tuple[Ledger, jax.Array]:
    """A new row whose first n tokens lie in slots (i32[t]); they stay somebody else's. Adds (row, ok)."""
    ledger, rows, _, ok = alloc_for_extend(
        ledger, jnp.full(1, NEW_ROW, jnp.int32), n[None], n[None], capacity=1, prefix_loc=slots[None]
    )
    return ledger, _packed(ledger, rows[0], ok)


@_program("capacity")
def _run(
    ledger: Ledger,
    chunks: jax.Array,
    rows: jax.Array,
    steps: jax.Array,
    *,
    capacity: int,
) -> tuple[Ledger, jax.Array]:
    """chunks: i32[3, lanes], rows and lengths before and after; rows: i32[b], each gets `steps` slots. Adds (ok,)."""
    ok = jnp.ones((), bool)
    if chunks.shape[1]:
        ledger, _, _, ok = alloc_for_extend(ledger, chunks[0], chunks[1], chunks[2], capacity=capacity)
    if rows.shape[0]:

        def body(carry):
            i, ledger, ok = carry
            ledger, _, _, done = alloc_for_decode(ledger, rows)
            return i + 1, ledger, ok & done

        zero = jnp.zeros((), jnp.int32)
        _, ledger, ok = lax.while_loop(lambda c: (c[0] < steps) & c[2], body, (zero, ledger, ok))
    return ledger, _packed(ledger, ok)


@_program()
def _share(ledger: Ledger, row: jax.Array, end: jax.Array, start: jax.Array, slots: jax.Array, n: jax.Array) -> Ledger:
    """The row owns its tokens from `end` on; tokens start .. start + n - 1 lie in slots (i32[t]) now."""
    at = jnp.arange(slots.shape[0], dtype=jnp.int32)
    table = ledger.table
    entries = put2(table.req_to_token, jnp.full(at.shape, row), start + at, slots, valid=at < n)
    lens = ledger.lens.at[row, OWNED_FROM].set(end)
    return Ledger(dataclasses.replace(table, req_to_token=entries), ledger.allocator, lens)


@_program()
def _close(ledger: Ledger, row: jax.Array, end: jax.Array) -> Ledger:
    """Release the row and its pages from token `end` on."""
    lens = ledger.lens.at[row, OWNED_FROM].set(end)
    return release_rows(dataclasses.replace(ledger, lens=lens), row[None])


@_program()
def _release(ledger: Ledger, pages: jax.Array) -> Ledger:
    return dataclasses.replace(ledger, allocator=ledger.allocator.free_page_ids(int32("pages", pages, 1)))


@functools.partial(jax.jit, static_argnames="page_size")
def _row_pages(table: jax.Array, row: jax.Array, *, page_size: int) -> jax.Array:
    return lax.dynamic_index_in_dim(table, row, keepdims=False)[::page_size] // page_size


class LedgerBackend:
    """A `Backend` that allocates and releases for real and makes up the tokens: each is a new negative id.

    prefill_tokens: tokens that the chunks of one program have at most, as the scheduler's. `seconds` and `programs`
    sum up what the ledger took.
    """

    def __init__(self, ledger: Ledger, prefill_tokens: int = 2048):
        self.ledger = ledger
        self.page_size, self.num_pages = ledger.page_size, ledger.allocator.num_pages
        self.num_rows, self.row_width = ledger.table.size, ledger.table.max_context_len
        self.seconds, self.programs = 0.0, 0
        self._capacity, self._next_id = prefill_tokens, -1

    def private_ids(self, n: int) -> np.ndarray:
        """i32[n]: token ids that nobody else has. ValueError after 2^31 of them."""
        if self._next_id - n < np.iinfo(np.int32).min:
            raise ValueError("2,147,483,648 private token ids are used up; replay a shorter trace.")
        out = np.arange(self._next_id, self._next_id - n, -1, dtype=np.int32)
        self._next_id -= n
        return out

    def open_row(self, request: Request, slots: np.ndarray) -> int:
        padded = self._padded(slots)
        _, _, faults, row, ok = self._fetch(_open, padded, np.int32(len(slots)))
        self._demand(ok, faults, f"a row of {len(slots)} cached tokens")
        return row

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request], steps: int) -> Outcome:
        lanes = np.zeros((3, _bucket(len(chunks), LANES)), np.int32)
        for i, c in enumerate(chunks):
            lanes[:, i] = c.request.row, c.start, c.end
        rows = np.zeros(min(_bucket(len(decodes), BATCHES), self.num_rows), np.int32)
        rows[: len(decodes)] = [r.row for r in decodes]
        free, staged, faults, ok = self._fetch(_run, lanes, rows, np.int32(steps), capacity=self._capacity)
        self._demand(ok, faults, f"{len(chunks)} chunks and {steps} steps of {len(decodes)} rows")
        ids = self.private_ids(steps * len(decodes) + len(chunks))
        decoded = ids[len(chunks) :].reshape(steps, len(decodes))
        return Outcome(free + staged, ids[: len(chunks)], decoded, np.full(len(decodes), steps))

    def row_slots(self, row: int, n: int) -> np.ndarray:
        start = time.perf_counter()
        pages = np.asarray(_row_pages(self.ledger.table.req_to_token, np.int32(row), page_size=self.page_size))
        self.seconds += time.perf_counter() - start
        ps = self.page_size
        slots = pages[: ceil_div(n, ps), None] * ps + np.arange(ps, dtype=np.int32)
        return slots.reshape(-1)[:n]

    def share_row(self, row: int, end: int, start: int, slots: np.ndarray) -> None:
        args = (np.int32(row), np.int32(end), np.int32(start), self._padded(slots), np.int32(len(slots)))
        self._change(_share, *args)

    def close_row(self, row: int, end: int) -> None:
        self._change(_close, np.int32(row), np.int32(end))

    def release(self, pages: np.ndarray) -> None:
        padded = np.zeros(_bucket(len(pages), _powers(64, self.num_pages)), np.int32)
        padded[: len(pages)] = pages
        self._change(_release, padded)

    def _padded(self, slots: np.ndarray) -> np.ndarray:
        out = np.zeros(_bucket(max(1, len(slots)), _powers(1024, self.row_width)), np.int32)
        out[: len(slots)] = slots
        return out

    def _change(self, program, *args) -> None:
        start = time.perf_counter()
        self.ledger = program(self.ledger, *args)
        self.seconds += time.perf_counter() - start

    def _fetch(self, program, *args, **static) -> list[int]:
        start = time.perf_counter()
        self.ledger, packed = program(self.ledger, *args, **static)
        out = np.asarray(packed).tolist()
        self.seconds += time.perf_counter() - start
        self.programs += 1
        return out

    def _demand(self, ok: int, faults: int, what: str) -> None:
        if not ok or faults:
            raise RuntimeError(
                f"the ledger answered ok {bool(ok)} with {faults} faults to {what}; the books are wrong."
            )


def _powers(least: int, most: int) -> tuple[int, ...]:
    """Padded sizes: least, 16 x least, ... and most."""
    out = []
    while least < most:
        out.append(least)
        least *= 16
    return (*out, most)


def _bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest padded size that holds n; 0 for none."""
    if n == 0:
        return 0
    found = next((s for s in sizes if s >= n), None)
    return n if found is None else found
