"""Random states of a ledger and calls on them, as NumPy arrays: what every implementation must treat alike.

A state is made in one go, not by calls, so that it holds what a ledger holds after a long life: witnesses that point
anywhere, slots of requests that are gone in the page table, garbage behind the ends of lists and in the padding row.
"""
# pyright: reportArgumentType=false
# States are NumPy arrays here, in the fields and arguments of jax.Array.

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.books import COMMITTED, Books

LARGEST, SMALLEST = 2**31 - 1, -(2**31)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a ledger and of the calls on it."""

    batch: int
    rows: int
    context: int  # tokens per row
    page_size: int
    num_pages: int
    capacity: int  # new tokens of an extend
    ring: bool = False

    @property
    def slots(self) -> int:
        return (self.num_pages + 1) * self.page_size


SHAPES = {
    "one lane, pages of 64": Shape(1, 2, 150, 64, 7, 130),
    "odd batch, pages of 3": Shape(5, 7, 20, 3, 40, 37),
    "token ring": Shape(4, 6, 12, 1, 50, 24, ring=True),
    "token pages": Shape(3, 5, 9, 1, 30, 20),
    "pages of 16": Shape(8, 9, 70, 16, 45, 100),
    "Llama-3-8B serving": Shape(64, 64, 512, 16, 1500, 1024),
}


def _list(rng: np.random.Generator, entries: np.ndarray, extent: int, ids: int, head: int = 0):
    """(list of `extent` places that begins with the entries at `head`, witness of ids 0 .. ids), garbage elsewhere."""
    order, pos = rng.integers(1, ids + 1, extent), rng.integers(-3, extent + 3, ids + 1)
    at = (head + np.arange(len(entries))) % extent
    order[at], pos[entries] = entries, at
    return order.astype(np.int32), pos.astype(np.int32)


def random_books(rng: np.random.Generator, s: Shape, free_share: float, live_share: float = 0.8) -> Books:
    """A sound ledger: about `live_share` of the rows are live, about `free_share` of the pages left over are free."""
    ps = s.page_size
    ids = rng.permutation(s.rows).astype(np.int32) + 1
    live, free_rows = np.split(ids, [int(rng.binomial(s.rows, live_share))])
    left = list(rng.permutation(s.num_pages).astype(np.int32) + 1)
    table = rng.integers(0, s.slots, (s.rows + 1, s.context))
    lens = np.zeros((s.rows + 1, 3), np.int64)
    for row in live:
        allocated = min(int(rng.integers(0, s.context + 1)), len(left) * ps)
        if rng.random() < 0.3:
            allocated = allocated // ps * ps
        pages = np.array([left.pop() for _ in range(-(-allocated // ps))], np.int64)
        token = np.arange(allocated)
        table[row, :allocated] = pages[token // ps] * ps + token % ps
        committed = allocated if rng.random() < 0.7 else int(rng.integers(0, allocated + 1))
        owned = 0 if rng.random() < 0.6 else int(rng.integers(0, committed // ps + 1)) * ps
        lens[row] = committed, allocated, owned
    lens[0], table[0] = rng.integers(-9, s.context + 9, 3), rng.integers(-9, s.slots + 9, s.context)
    free = np.array(left[: int(rng.binomial(len(left), free_share))], np.int32)
    head = int(rng.integers(s.num_pages)) if s.ring else 0
    pages, page_pos = _list(rng, free, s.num_pages, s.num_pages, head)
    free_list, row_pos = _list(rng, free_rows, s.rows, s.rows)
    faults = int(rng.integers(4))
    return Books(
        req_to_token=table.astype(np.int32),
        lens=lens.astype(np.int32),
        free_rows=free_list,
        row_pos=row_pos,
        generation=rng.integers(0, 5, s.rows + 1).astype(np.int32),
        row_counters=np.array([len(free_rows), faults], np.int32),
        pages=pages,
        page_pos=page_pos,
        counters=np.array([head, len(free), 0, faults] if s.ring else [len(free), 0, faults], np.int32),
    )


def live_rows(books: Books) -> np.ndarray:
    """The rows that are handed out."""
    free = books.free_rows[: books.row_counters[0]]
    return np.setdiff1d(np.arange(1, books.lens.shape[0], dtype=np.int32), free)


def corrupted(rng: np.random.Generator, s: Shape, books: Books) -> Books:
    """The same ledger with wrong entries in its page table: pages that stand twice, are free, or do not exist."""
    table = books.req_to_token.copy()
    for row in live_rows(books):
        column = rng.integers(0, s.context, 3)
        column[0] = max(0, books.lens[row, COMMITTED] - 1)
        column[1] = column[1] // s.page_size * s.page_size
        junk = [0, 1, s.page_size, -1, -s.page_size - 1, s.slots, s.slots + 99, LARGEST, SMALLEST]
        table[row, column] = [*rng.choice(junk, 2), int(table[rng.integers(1, s.rows + 1), 0])]
    return books._replace(req_to_token=table)


def _disturbed(rng: np.random.Generator, s: Shape, books: Books, rows: np.ndarray, always: bool) -> np.ndarray:
    """Sometimes one lane holds a row twice, a free row, or what is no row."""
    if not always and rng.random() < 0.5:
        return rows
    bad = rows[rows > 0]
    if bad.size == 0 or rng.random() < 0.5:
        bad = [-2, s.rows + 1, LARGEST, SMALLEST, *books.free_rows[: int(books.row_counters[0])][:3]]
    rows = rows.copy()
    rows[rng.integers(0, rows.size)] = rng.choice(bad)
    return rows


def _lanes(rng: np.random.Generator, s: Shape, rows: np.ndarray) -> np.ndarray:
    rows = rng.permutation(rows)[: s.batch]
    return rng.permutation(np.pad(rows, (0, s.batch - rows.size))).astype(np.int32)


def decode_call(rng: np.random.Generator, s: Shape, books: Books) -> tuple[np.ndarray, ...]:
    """(rows, active)."""
    rows = live_rows(books)
    if rng.random() < 0.85:
        rows = rows[books.lens[rows, COMMITTED] < s.context]
    rows = _disturbed(rng, s, books, _lanes(rng, s, rows), False)
    return rows, rng.random(s.batch) < rng.choice([0.8, 1.0])


def extend_call(rng: np.random.Generator, s: Shape, books: Books) -> tuple[np.ndarray, ...]:
    """(rows, prefix_lens, seq_lens): new rows, chunks that go on, rows that are resumed below what they were given."""
    rows = _lanes(rng, s, live_rows(books))
    spare, prefix = int(books.row_counters[0]), np.zeros(s.batch, np.int32)
    for lane in np.flatnonzero(rows == 0)[: spare + (rng.random() < 0.05)]:
        rows[lane] = -1 if rng.random() < 0.8 else 0
    held = rows > 0
    committed = books.lens[rows[held], COMMITTED]
    prefix[held] = np.where(rng.random(committed.size) < 0.7, committed, rng.integers(0, committed + 1))
    room = np.where(rows == 0, 0, s.context - prefix)
    share = max(1, s.capacity // max(1, np.count_nonzero(rows)))
    new = np.minimum(room, rng.integers(0, share + 2, s.batch))
    if rng.random() < 0.15:
        new = room
    seq = prefix + new
    wrong = rng.random()
    if wrong < 0.2:
        rows = _disturbed(rng, s, books, rows, True)
    elif wrong < 0.25:
        seq[rng.integers(s.batch)] = rng.choice([-1, s.context + 1, LARGEST])
    elif wrong < 0.3:
        prefix[rng.integers(s.batch)] += rng.choice([-LARGEST, -1, 1])
    return rows, prefix, seq.astype(np.int32)


def release_call(rng: np.random.Generator, s: Shape, books: Books) -> tuple[np.ndarray, ...]:
    """(rows,)."""
    rows = live_rows(books)
    rows = _lanes(rng, s, rows[rng.random(rows.size) < rng.choice([0.2, 0.9])])
    if rng.random() < 0.3:  # the same few rows, again and again
        rows = rng.choice(_disturbed(rng, s, books, rows, True)[:3], s.batch)
    return (_disturbed(rng, s, books, rows, False),)


CALLS = {"ledger_decode": decode_call, "ledger_extend": extend_call, "release": release_call}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operation: its arrays, and what is fixed when it is compiled."""

    operation: str
    shape: Shape
    books: Books
    lanes: tuple[np.ndarray, ...]

    @property
    def static(self) -> dict[str, Any]:
        sizes = {"page_size": self.shape.page_size}
        return {**sizes, "capacity": self.shape.capacity} if self.operation == "ledger_extend" else sizes

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (*self.books, *self.lanes)


def cases(operation: str, shape: Shape, count: int, seed: int = 0) -> list[Case]:
    """`count` calls, each on a state of its own; every third state is corrupted, every fourth is short of pages."""
    rng, made = np.random.default_rng([seed, *operation.encode(), *dataclasses.astuple(shape)]), []
    for n in range(count):
        books = random_books(rng, shape, 0.05 if n % 4 == 3 else 0.9, rng.choice([0.3, 0.8, 1.0]))
        if n % 3 == 2:
            books = corrupted(rng, shape, books)
        made.append(Case(operation, shape, books, CALLS[operation](rng, shape, books)))
    return made
