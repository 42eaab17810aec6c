"""Scheduler: between two programs, decide who starts, what is evicted, who is set back, and take the tokens.

Pure host logic over a `Backend`, a prefix tree and a mirror of the free count. The mirror must equal the device's
count at every fetch; where it does not, `run` raises instead of going on with wrong books.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from itertools import islice

import numpy as np

from kvjax.allocators.capacity import Capacity
from kvjax.layout import ceil_div, round_down, round_up
from kvjax.prefix import RadixCache, released_pages
from kvjax.prefix.radix import EMPTY
from kvjax.serving.admission import LOOK_AHEAD, Rule, candidates
from kvjax.serving.backend import Backend, Chunk, Outcome
from kvjax.serving.request import ABORTED, FINISHED, RUNNING, WAITING, Request

Stream = Callable[[Request, np.ndarray], None]


@dataclasses.dataclass
class Report:
    """What one step of the scheduler did."""

    steps: int = 0  # decode steps of the program; 0: nothing was there to run
    admitted: list[Request] = dataclasses.field(default_factory=list)
    retracted: list[Request] = dataclasses.field(default_factory=list)
    finished: list[Request] = dataclasses.field(default_factory=list)
    prefill_tokens: int = 0
    evicted_tokens: int = 0


class Scheduler:
    """Continuous batching with chunked prefill over one backend.

    tree: the prefix cache, None for none; it must have the backend's page size. prefill_tokens: prefill per step.
    max_steps: decode steps of one program, when nothing else is to do. stream: called with new tokens as they come.
    long_programs: for a backend whose programs end rows themselves. They go on past a finish when nobody waits, and
    up to the first one when somebody does; without it, who starts when does not depend on `max_steps`.
    """

    def __init__(
        self,
        backend: Backend,
        tree: RadixCache | None = None,
        *,
        prefill_tokens: int = 2048,
        reserve_ratio: float = 0.0,
        max_steps: int = 32,
        pages_to_front: bool = True,
        long_programs: bool = False,
        stream: Stream | None = None,
    ):
        if tree is not None and tree.page_size != backend.page_size:
            raise ValueError(
                f"the prefix tree has pages of {tree.page_size}, the pool of {backend.page_size}; make them equal."
            )
        if prefill_tokens < 1 or max_steps < 1:
            raise ValueError(f"prefill_tokens {prefill_tokens} and max_steps {max_steps} must be at least 1.")
        self.backend, self.tree, self.page_size = backend, tree, backend.page_size
        self.prefill_tokens, self.max_steps = prefill_tokens, max_steps
        self.rule = Rule(self.page_size, reserve_ratio)
        self.capacity = Capacity(backend.num_pages, self.page_size, backend.num_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in admission order
        self._rids: set[Hashable] = set()  # of all these
        self.finishes = 0
        self._to_front, self._stream, self._arrivals = pages_to_front, stream, 0
        self._long = long_programs

    @property
    def busy(self) -> bool:
        """Something is waiting or running."""
        return bool(self.waiting or self.running)

    def evictable(self) -> int:
        """Tokens that the tree would give."""
        return 0 if self.tree is None else self.tree.evictable

    # --- from outside, at any moment between two programs ----------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError when it can never be served, for then nothing else would move either, and when
        it has been queued before or another one of its rid is waiting or running."""
        if request.rid in self._rids or request.state != WAITING:
            raise ValueError(
                f"request {request.rid} is {request.state} and was submitted before, or another one of its rid is "
                "still there; make a new Request, with an rid that nobody waiting or running has."
            )
        pool, need = self.backend.num_pages * self.page_size, round_up(request.total, self.page_size)
        if need > pool:
            raise ValueError(
                f"request {request.rid} needs {need} tokens in pages of {self.page_size} ({request.prompt_len} in, up "
                f"to {request.max_new_tokens} out), but the pool holds {pool}; shorten it or make the pool larger."
            )
        if request.total > self.backend.row_width:
            raise ValueError(
                f"request {request.rid} needs a row of {request.total} tokens, but rows hold {self.backend.row_width}; "
                "shorten it or make the request table wider."
            )
        self._rids.add(request.rid)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self.waiting.append(request)

    def abort(self, request: Request) -> bool:
        """Drop a request wherever it stands; False (and no effect) when it is over already."""
        if request.state == WAITING and request in self.waiting:
            self.waiting.remove(request)
        elif request.state == RUNNING:
            self.running.remove(request)
            self._give_back(request)
            self.finishes += 1  # its room is free: who was retracted may try again
        else:
            return False
        request.state = ABORTED
        self._rids.discard(request.rid)
        return True

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self, limit: int | None = None) -> Report:
        """Admit, make room, run one program, take its tokens. limit: decode steps at most (until the next arrival)."""
        report = Report()
        decodes = self._decodes(report)
        pledged = self._pages_for(decodes, 1)
        self._admit(report)
        chunks = self._chunks(pledged)
        while not decodes and not chunks and self.running:  # half-prefilled requests hold what they wait for
            self._retract(report)
            chunks = self._chunks(0)
        if not decodes and not chunks:
            return report
        steps = 1 if chunks or (self.waiting and not self._long) else self._steps(decodes, limit)
        pages = self._pages_for(decodes, steps) + sum(self._pages(c.start, c.end) for c in chunks)
        self._make_room(pages, report)
        outcome = self.backend.run(chunks, decodes, steps, first_finish=bool(self.waiting))
        self._take(outcome, chunks, decodes, report)
        report.steps = steps
        return report

    def _decodes(self, report: Report) -> list[Request]:
        """Requests that get a token in this step; the newest are set back until the pages of the others are there."""
        while True:
            decodes = [r for r in self.running if not r.prefilling]
            if self._pages_for(decodes, 1) * self.page_size <= self.capacity.available_size() + self.evictable():
                return decodes
            self._retract(report)

    def _retract(self, report: Report) -> None:
        newest = self.running.pop()
        self._give_back(newest)
        newest.set_back(self.finishes)
        self.waiting.appendleft(newest)
        report.retracted.append(newest)

    def _admit(self, report: Report) -> None:
        while self.waiting and len(self.running) < self.backend.num_rows:
            # A retracted request waits for room: whoever starts meanwhile would take it away again.
            back = [r for r in self.waiting if r.finishes == self.finishes] if self.waiting[0].finishes >= 0 else []
            order = back[:1] or candidates(self.waiting, self.running, self.tree, self.page_size)
            chosen = next(iter(order), None)
            if chosen is None or not self.rule.fits(chosen, self.running, self.capacity, self.tree, self.finishes):
                break
            self.waiting.remove(chosen)
            self._start(chosen)
            report.admitted.append(chosen)
        if report.admitted:
            latest = max(r.arrival for r in report.admitted)
            for r in islice(self.waiting, LOOK_AHEAD):
                r.passed_over += r.arrival < latest

    def _start(self, r: Request) -> None:
        slots = EMPTY
        if self.tree is not None:
            match = self.tree.match_prefix(r.key(), r.extra_key)
            self.tree.lock(match.node)
            slots, r.node = match.slots, match.node
        r.row = self.backend.open_row(r, slots)
        r.done = r.cached = len(slots)
        r.goal, r.finishes, r.passed_over, r.state = r.length, -1, 0, RUNNING
        if not r.retractions:
            r.cached_first = r.cached
        r.cursor = None
        self.running.append(r)

    def _chunks(self, pledged: int) -> list[Chunk]:
        """Prefill of this step, in admission order, as far as budget and pages reach."""
        budget, out = self.prefill_tokens, []
        room = self.capacity.free_pages + self.evictable() // self.page_size - pledged
        for r in self.running:
            if not r.prefilling:
                continue
            pages = ceil_div(r.done, self.page_size)
            end = min(r.done + budget, r.goal, (pages + room) * self.page_size)
            if end <= r.done:
                break
            out.append(Chunk(r, r.done, end))
            budget -= end - r.done
            room -= self._pages(r.done, end)
            if not budget:
                break
        return out

    def _steps(self, decodes: list[Request], limit: int | None) -> int:
        """How many steps this program runs: up to the first (long programs: last) limit, and as far as pages reach."""
        furthest = max if self._long and not self.waiting else min
        most = self.max_steps if limit is None else limit
        steps = min(self.max_steps, furthest(r.remaining for r in decodes), most)
        room = self.capacity.free_pages + self.evictable() // self.page_size
        while steps > 1 and self._pages_for(decodes, steps) > room:
            steps //= 2
        return max(1, steps)

    def _pages(self, start: int, end: int) -> int:
        return ceil_div(end, self.page_size) - ceil_div(start, self.page_size)

    def _pages_for(self, decodes: list[Request], steps: int) -> int:
        ps = self.page_size
        return sum(-(-(r.done + min(steps, r.remaining)) // ps) + (-r.done // ps) for r in decodes)

    def _make_room(self, pages: int, report: Report) -> None:
        self.capacity, pieces, ok = self.capacity.check_decode_capacity(self.tree, pages * self.page_size)
        if pieces:
            report.evicted_tokens += sum(map(len, pieces))
            self.backend.release(released_pages(pieces, self.page_size, self._to_front))
        if not ok:
            raise RuntimeError(
                f"{pages} pages are needed and {self.capacity.free_pages} are free after eviction, which the plan of "
                "the step had counted on; the books are wrong."
            )

    # --- after the program -----------------------------------------------------------------------------------------

    def _take(self, outcome: Outcome, chunks: list[Chunk], decodes: list[Request], report: Report) -> None:
        pages = 0
        over: list[Request] = []
        for r, count, tokens in zip(decodes, outcome.decode_counts, outcome.decode_tokens.T, strict=True):
            count = int(count)
            pages += self._pages(r.done, r.done + count)
            r.done += count
            self._add_tokens(r, tokens[:count], over)
        ready = []
        for chunk, token in zip(chunks, outcome.chunk_tokens, strict=True):
            r = chunk.request
            pages += self._pages(chunk.start, chunk.end)
            report.prefill_tokens += chunk.end - chunk.start
            r.done = chunk.end
            if chunk.last:
                ready.append((r, token))
        self.capacity = self.capacity.took(pages - sum(r.owned_pages(self.page_size) for r in outcome.closed))
        if self.capacity.free_pages != outcome.free_pages:
            raise RuntimeError(
                f"the device counts {outcome.free_pages} free pages, the mirror {self.capacity.free_pages}; a page was "
                "taken or released behind the scheduler's back."
            )
        for r, token in ready:
            self._add_tokens(r, np.asarray([token], np.int32), over)
            if r not in over:
                self._share(r)
        if over:
            gone = set(over)
            self.running = [r for r in self.running if r not in gone]
        for r in over:
            self._finish(r, r in outcome.closed)
        if any(r.state != FINISHED for r in outcome.closed):
            raise RuntimeError("the program closed the row of a request that is not over; the books are wrong.")
        report.finished = over

    def _add_tokens(self, r: Request, tokens: np.ndarray, over: list[Request]) -> None:
        r.ids[r.length : r.length + len(tokens)] = tokens
        r.length += len(tokens)
        if self._stream is not None and len(tokens):
            self._stream(r, tokens)
        if not r.remaining or (r.eos and len(tokens) and int(tokens[-1]) in r.eos):
            over.append(r)

    def _share(self, r: Request) -> None:
        """A prefilled prompt becomes the tree's, so that others can start from it while the request goes on."""
        if self.tree is None:
            return
        end = round_down(r.done, self.page_size)
        if end <= r.cached:
            return
        slots = self.backend.row_slots(r.row, end)
        had = self._insert(r, slots)
        match = self.tree.match_prefix(r.ids[:end], r.extra_key)
        # What the tree had already lies elsewhere: the row is rewritten to it, and reads what others read.
        self.backend.share_row(r.row, end, r.cached, match.slots[r.cached : had] if had > r.cached else EMPTY)
        self.tree.lock(match.node)
        self._unlock(r)
        r.node, r.cached = match.node, end

    def _insert(self, r: Request, slots: np.ndarray) -> int:
        """Hand slots of the row to the tree; the row's copies of what the tree has already are released."""
        assert self.tree is not None
        had = self.tree.insert(r.ids[: len(slots)], slots, r.extra_key, owner=r.rid)
        if had > r.cached:
            pages = slots[r.cached : had : self.page_size] // self.page_size
            self.backend.release(pages)
            self.capacity = self.capacity.gave(len(pages))
        return had

    def _finish(self, r: Request, closed: bool) -> None:
        if not closed:
            end = r.cached
            if self.tree is not None:
                end = round_down(r.done, self.page_size)
                if end > r.cached:
                    self._insert(r, self.backend.row_slots(r.row, end))
            self.backend.close_row(r.row, end)
            self.capacity = self.capacity.gave(ceil_div(r.done, self.page_size) - end // self.page_size)
        self._unlock(r)
        r.state, r.row = FINISHED, 0
        self._rids.discard(r.rid)
        self.finishes += 1

    def _give_back(self, r: Request) -> None:
        """The row and every page of it that is not the tree's."""
        self.backend.close_row(r.row, r.cached)
        self.capacity = self.capacity.gave(r.owned_pages(self.page_size))
        self._unlock(r)
        r.row = 0

    def _unlock(self, r: Request) -> None:
        if r.node is not None:
            assert self.tree is not None
            self.tree.unlock(r.node)
            r.node = None

    def find(self, rid: Hashable) -> Request | None:
        """A waiting or running request by its id."""
        return next((r for r in (*self.running, *self.waiting) if r.rid == rid), None)
