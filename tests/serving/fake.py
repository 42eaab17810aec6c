"""A backend without a device: strict books in Python, for tests of the scheduler alone."""

from __future__ import annotations

import numpy as np

from kvjax.layout import ceil_div
from kvjax.serving import Outcome


class FakeBackend:
    """Pages are owned by exactly one of: the free set, a row, or the tree (which the test passes to `check`).

    Tokens depend on the request and the position alone, so an answer must not change when it is set back.
    """

    def __init__(self, num_pages, page_size, num_rows=8, row_width=10_000, closes=False):
        self.closes = closes  # rows that end are given back inside the program
        self.num_pages, self.page_size, self.num_rows, self.row_width = num_pages, page_size, num_rows, row_width
        self.free = list(range(1, num_pages + 1))
        self.rows = {}  # row: [pages, pages that belong to the tree, tokens]
        self.prefilled = 0
        self.programs = []  # (chunks as (rid, start, end), decoding rids, steps)

    def token(self, request, position):
        return (hash(request.rid) * 31 + position * 7) % 50 + 2

    def open_row(self, request, slots):
        assert len(slots) % self.page_size == 0
        assert len(self.rows) < self.num_rows
        row = next(r for r in range(1, self.num_rows + 1) if r not in self.rows)
        pages = [int(s) // self.page_size for s in slots[:: self.page_size]]
        assert not set(pages) & set(self.free), "a cached prefix lies in free pages"
        self.rows[row] = [pages, len(pages), len(slots)]
        return row

    def _grow(self, row, end):
        pages = self.rows[row][0]
        while len(pages) < ceil_div(end, self.page_size):
            pages.append(self.free.pop(0))
        self.rows[row][2] = end

    def run(self, chunks, decodes, steps, first_finish):
        self.programs.append(([(c.request.rid, c.start, c.end) for c in chunks], [r.rid for r in decodes], steps))
        closed = []
        for c in chunks:
            assert self.rows[c.request.row][2] == c.start
            self._grow(c.request.row, c.end)
            self.prefilled += c.end - c.start
        first = [self.token(c.request, c.request.length) for c in chunks]
        for c, token in zip(chunks, first, strict=True):
            if c.last and (c.request.remaining == 1 or token in c.request.eos):
                self._end(c.request, closed)
        drawn = [[self.token(r, r.length + k) for k in range(steps)] for r in decodes]
        most = []  # tokens until each row's end, which may lie behind this program
        for r, tokens in zip(decodes, drawn, strict=True):
            assert r.done == r.length - 1
            most.append(min([r.remaining, *(k + 1 for k, t in enumerate(tokens) if t in r.eos)]))
        table = np.array(drawn, np.int32).reshape(len(decodes), steps)
        if first_finish and decodes:
            steps = min(steps, *most)
        counts = [min(steps, m) for m in most]
        for r, m, count in zip(decodes, most, counts, strict=True):
            self._grow(r.row, r.done + count)
            if count == m:
                self._end(r, closed)
        return Outcome(len(self.free), np.array(first, np.int32), table[:, :steps].T, np.array(counts, int), closed)

    def _end(self, request, closed):
        if self.closes:
            self.close_row(request.row, 0)
            closed.append(request)

    def row_slots(self, row, n):
        slots = np.array(self.rows[row][0], np.int32)[:, None] * self.page_size + np.arange(self.page_size)
        return slots.reshape(-1)[:n].astype(np.int32)

    def share_row(self, row, end, start, slots):
        entry = self.rows[row]
        for k, s in enumerate(slots[:: self.page_size]):
            entry[0][start // self.page_size + k] = int(s) // self.page_size
        entry[1] = end // self.page_size

    def close_row(self, row, end):
        pages, _, _ = self.rows.pop(row)
        self.release(np.array(pages[end // self.page_size :]))

    def release(self, pages):
        for p in map(int, pages):
            assert p not in self.free, f"page {p} was released twice"
            assert 1 <= p <= self.num_pages
            self.free.append(p)

    def check(self, scheduler):
        """Every page has exactly one owner, and the sums of the tree and the mirror are right."""
        tree = scheduler.tree
        owned = [] if tree is None else tree.pages().tolist()
        own = [p for pages, shared, _ in self.rows.values() for p in pages[shared:]]
        everything = sorted(self.free + own + owned)
        assert everything == list(range(1, self.num_pages + 1)), (self.free, own, owned)
        borrowed = {p for pages, shared, _ in self.rows.values() for p in pages[:shared]}
        assert borrowed <= set(owned)
        assert scheduler.capacity.free_pages == len(self.free)
        assert {r.row for r in scheduler.running} == set(self.rows)
        if tree is not None:
            locked = sum(len(n.key) for n in tree.walk_nodes() if n.locks)
            assert tree.protected == locked
            assert tree.evictable + tree.protected == len(owned) * self.page_size
