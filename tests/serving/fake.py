"""A backend without a device: strict books in Python, for tests of the scheduler alone."""

from __future__ import annotations

import numpy as np

from kvjax.layout import ceil_div
from kvjax.serving import Outcome


class FakeBackend:
    """Pages are owned by exactly one of: the free set, a row, or the tree (which the test passes to `check`).

    Tokens depend on the request and the position alone, so an answer must not change when it is set back.
    """

    def __init__(self, num_pages, page_size, num_rows=8, row_width=10_000):
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

    def run(self, chunks, decodes, steps):
        self.programs.append(([(c.request.rid, c.start, c.end) for c in chunks], [r.rid for r in decodes], steps))
        for c in chunks:
            assert self.rows[c.request.row][2] == c.start
            self._grow(c.request.row, c.end)
            self.prefilled += c.end - c.start
        for r in decodes:
            assert r.done == r.length - 1
            self._grow(r.row, r.done + steps)
        counts, tokens = [], np.zeros((steps, len(decodes)), np.int32)
        for i, r in enumerate(decodes):
            drawn = [self.token(r, r.length + k) for k in range(steps)]
            tokens[:, i] = drawn
            ends = [k + 1 for k, t in enumerate(drawn) if t in r.eos]
            counts.append(ends[0] if ends else steps)
            if ends:  # what a real program would not have taken
                pages = self.rows[r.row][0]
                keep = ceil_div(r.done + counts[-1], self.page_size)
                self.free += pages[keep:]
                del pages[keep:]
                self.rows[r.row][2] = r.done + counts[-1]
        first = [self.token(c.request, c.request.length) for c in chunks]
        return Outcome(len(self.free), np.array(first, np.int32), tokens, np.array(counts, int))

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
