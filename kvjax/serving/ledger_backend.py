"""LedgerBackend: the scheduler's device side on the real ledger, without a model.

Every program is jitted with the ledger donated, in a small fixed set of padded shapes; each fetches one vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.extend import alloc_for_extend
from kvjax.ledger import Ledger
from kvjax.serving import rows
from kvjax.serving.backend import Chunk, Outcome
from kvjax.serving.request import Request
from kvjax.steps import alloc_for_decode

T = TypeVar("T")

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
    """Adds (row, ok)."""
    ledger, row, ok = rows.open_row(ledger, slots, n)
    return ledger, _packed(ledger, row, ok)


@_program("capacity")
def _run(
    ledger: Ledger,
    chunks: jax.Array,
    decodes: jax.Array,
    steps: jax.Array,
    *,
    capacity: int,
) -> tuple[Ledger, jax.Array]:
    """chunks: i32[3, lanes], row, length before and after; decodes: i32[b], rows that get `steps` slots. Adds (ok,)."""
    ok = jnp.ones((), bool)
    if chunks.shape[1]:
        ledger, _, _, ok = alloc_for_extend(ledger, chunks[0], chunks[1], chunks[2], capacity=capacity)
    if decodes.shape[0]:

        def body(carry):
            i, ledger, ok = carry
            ledger, _, _, done = alloc_for_decode(ledger, decodes)
            return i + 1, ledger, ok & done

        zero = jnp.zeros((), jnp.int32)
        _, ledger, ok = lax.while_loop(lambda c: (c[0] < steps) & c[2], body, (zero, ledger, ok))
    return ledger, _packed(ledger, ok)


_share, _close, _release = (_program()(f) for f in (rows.share_row, rows.close_row, rows.release_pages))
_row_pages = jax.jit(rows.row_pages)


class LedgerBackend:
    """A `Backend` that allocates and releases for real and makes up the tokens: each is a new negative id.

    prefill_tokens: tokens that the chunks of one program have at most, as the scheduler's. on_compile(name) is called
    before a program runs for the first time in some padded shape. `seconds` and `programs` sum up what the ledger
    took; those first calls, in which the program may be compiled, count in `compile_seconds` instead.
    """

    def __init__(self, ledger: Ledger, prefill_tokens: int = 2048, *, on_compile: Callable[[str], None] | None = None):
        self.ledger, self.on_compile = ledger, on_compile
        self.compile_seconds = 0.0
        self._seen: set[tuple] = set()
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

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request], steps: int, first_finish: bool) -> Outcome:
        del first_finish  # nobody ends before `steps`: the scheduler goes no further than the first limit
        lanes = np.zeros((3, _bucket(len(chunks), LANES)), np.int32)
        for i, c in enumerate(chunks):
            lanes[:, i] = c.request.row, c.start, c.end
        batch = np.zeros(min(_bucket(len(decodes), BATCHES), self.num_rows), np.int32)
        batch[: len(decodes)] = [r.row for r in decodes]
        free, staged, faults, ok = self._fetch(_run, lanes, batch, np.int32(steps), capacity=self._capacity)
        self._demand(ok, faults, f"{len(chunks)} chunks and {steps} steps of {len(decodes)} rows")
        ids = self.private_ids(steps * len(decodes) + len(chunks))
        decoded = ids[len(chunks) :].reshape(steps, len(decodes))
        return Outcome(free + staged, ids[: len(chunks)], decoded, np.full(len(decodes), steps))

    def row_slots(self, row: int, n: int) -> np.ndarray:
        pages = self._timed(lambda: np.asarray(_row_pages(self.ledger, np.int32(row))), ("row_pages",))
        return rows.slots_of(pages, n, self.page_size)

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
        def call() -> None:
            self.ledger = program(self.ledger, *args)

        self._timed(call, _key(program, args))

    def _fetch(self, program, *args, **static) -> list[int]:
        def call() -> list[int]:
            self.ledger, packed = program(self.ledger, *args, **static)
            return np.asarray(packed).tolist()

        self.programs += 1
        return self._timed(call, _key(program, args))

    def _timed(self, call: Callable[[], T], key: tuple) -> T:
        first = key not in self._seen
        if first:
            self._seen.add(key)
            if self.on_compile is not None:
                self.on_compile(key[0])
        start = time.perf_counter()
        out = call()
        took = time.perf_counter() - start
        if first:
            self.compile_seconds += took
        else:
            self.seconds += took
        return out

    def _demand(self, ok: int, faults: int, what: str) -> None:
        if not ok or faults:
            raise RuntimeError(
                f"the ledger answered ok {bool(ok)} with {faults} faults to {what}; the books are wrong."
            )


def _key(program: Callable, args: tuple) -> tuple:
    return (program.__name__.strip("_"), *(np.shape(a) for a in args))


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
