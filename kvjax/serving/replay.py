"""replay: a trace through scheduler, prefix tree and the jitted ledger, on a virtual clock in integer microseconds.

A step takes `step_us` and gives every running request one token, plus up to `prefill_tokens` of prefill. Requests
join at the next step boundary after their arrival; an idle clock jumps to the next one. What happens does not depend
on how fast the machine is, nor on how many steps a program runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvjax.allocators import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvjax.invariants import report as invariant_report
from kvjax.layout import ceil_div, positive
from kvjax.ledger import Ledger
from kvjax.prefix import RadixCache
from kvjax.rows import ReqToTokenPool
from kvjax.serving.ledger_backend import LedgerBackend
from kvjax.serving.request import Request
from kvjax.serving.scheduler import Report, Scheduler
from kvjax.serving.traces import TraceRequest

TABLE_ENTRIES = 1 << 23  # the request table takes about 32 MiB where the number of rows is left open
ROWS = (16, 256)  # and has no fewer and no more rows than these


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """How a trace is replayed."""

    pool_tokens: int
    page_size: int = 16
    step_us: int = 20_000
    prefill_tokens: int = 2048
    reserve_ratio: float = 0.0
    rows: int | None = None  # None: by the longest request
    policy: str = "lru"
    prefix_cache: bool = True
    max_steps: int = 32
    check_every: int = 100  # finished requests between two checks of the whole ledger; 0: at the end only

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "page_size", "step_us", "prefill_tokens", "max_steps"):
            positive(name, getattr(self, name))
        if self.rows is not None:
            positive("rows", self.rows)
        if self.check_every < 0:
            raise ValueError(f"check_every must be 0 (at the end only) or more, got {self.check_every}.")


@dataclasses.dataclass
class ReplayResult:
    """Figures of a replay. Times of requests are virtual (us), `*_seconds` are this machine's."""

    finished: int = 0
    refused: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the input, at each request's first admission
    evicted_tokens: int = 0
    retractions: int = 0
    programs: int = 0
    virtual_us: int = 0
    checks: int = 0
    wall_seconds: float = 0.0
    ledger_seconds: float = 0.0  # without the first call of each program, which compiles it
    compile_seconds: float = 0.0  # those first calls
    peak_pages: int = 0  # of requests and tree
    peak_held_pages: int = 0  # in use by requests
    queue_us: list[int] = dataclasses.field(default_factory=list)  # arrival to first admission
    # One entry per program: when it ended, and pages then.
    at_us: list[int] = dataclasses.field(default_factory=list)
    held_pages: list[int] = dataclasses.field(default_factory=list)  # pages that running requests use
    tree_pages: list[int] = dataclasses.field(default_factory=list)  # unlocked pages of the tree
    empty_slots: list[int] = dataclasses.field(default_factory=list)  # unused slots in last pages
    waiting: list[int] = dataclasses.field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the input that was not computed."""
        return self.cached_tokens / max(1, self.input_tokens)

    def mean(self, series: Sequence[int]) -> float:
        """Mean over virtual time of a series."""
        if len(series) < 2:
            return float(series[0]) if len(series) else 0.0
        spans = np.diff(np.asarray(self.at_us))
        return float(np.average(np.asarray(series)[1:], weights=spans)) if spans.sum() else float(np.mean(series))


def make_ledger(trace: Sequence[TraceRequest], options: ReplayOptions) -> Ledger:
    """An empty ledger for the trace: rows as wide as its longest request."""
    width = max(r.input_len + r.output_len for r in trace)
    rows = options.rows or min(max(TABLE_ENTRIES // width, ROWS[0]), ROWS[1])
    if options.page_size == 1:
        allocator = TokenToKVPoolAllocator.create(options.pool_tokens)
    else:
        allocator = PagedTokenToKVPoolAllocator.create(options.pool_tokens, options.page_size)
    return Ledger.create(ReqToTokenPool.create(rows, width), allocator)


class Replay:
    """One replay; `run` goes to the end. RuntimeError with the pages concerned when the books do not add up."""

    def __init__(
        self, trace: Sequence[TraceRequest], options: ReplayOptions, on_compile: Callable[[str], None] | None = None
    ):
        """on_compile(name): called before a program of the ledger runs for the first time in some shape."""
        self.trace, self.options, self.result = list(trace), options, ReplayResult()
        self.backend = LedgerBackend(make_ledger(trace, options), options.prefill_tokens, on_compile=on_compile)
        self.tree = RadixCache(options.page_size, policy=options.policy) if options.prefix_cache else None
        self.scheduler = Scheduler(
            self.backend,
            self.tree,
            prefill_tokens=options.prefill_tokens,
            reserve_ratio=options.reserve_ratio,
            max_steps=options.max_steps,
            pages_to_front=options.page_size > 1,
        )
        self.now = 0  # us
        self._arrived: dict[Request, int] = {}

    def run(self, progress: Callable[[int, int], None] | None = None) -> ReplayResult:
        """Until the last request has finished. progress(done, all) is called after every program."""
        began, out, position = time.perf_counter(), self.result, 0
        while position < len(self.trace) or self.scheduler.busy:
            while position < len(self.trace) and self.trace[position].arrival_us <= self.now:
                self._submit(self.trace[position], position)
                position += 1
            next_at = self.trace[position].arrival_us if position < len(self.trace) else None
            if not self.scheduler.busy:
                self.now = self.now if next_at is None else next_at
                continue
            limit = None if next_at is None else ceil_div(next_at - self.now, self.options.step_us)
            self._step(limit)
            if progress is not None:
                progress(out.finished + out.refused, len(self.trace))
        self._check_end()
        out.wall_seconds, out.virtual_us = time.perf_counter() - began, self.now
        out.ledger_seconds, out.compile_seconds = self.backend.seconds, self.backend.compile_seconds
        return out

    def _submit(self, line: TraceRequest, number: int) -> None:
        request = Request(number, line.tokens(self.backend.private_ids), line.output_len)
        try:
            self.scheduler.submit(request)
        except ValueError:
            self.result.refused += 1
            return
        self._arrived[request] = line.arrival_us

    def _step(self, limit: int | None) -> None:
        out, before = self.result, self.result.finished
        report = self.scheduler.step(limit)
        assert report.steps, "a busy scheduler runs something in every step"
        for r in report.admitted:
            if not r.retractions:
                out.queue_us.append(self.now - self._arrived.pop(r))
                out.input_tokens += r.prompt_len
                out.cached_tokens += r.cached_first
        self.now += report.steps * self.options.step_us
        out.programs += 1
        out.retractions += len(report.retracted)
        out.evicted_tokens += report.evicted_tokens
        out.finished += len(report.finished)
        out.output_tokens += sum(len(r.output) for r in report.finished)
        self._sample(report)
        every = self.options.check_every
        if every and before // every != out.finished // every:
            self.check()

    def _sample(self, report: Report) -> None:
        out, s, ps = self.result, self.scheduler, self.options.page_size
        tree = s.evictable() // ps
        used = self.backend.num_pages - s.capacity.free_pages
        out.at_us.append(self.now)
        out.held_pages.append(used - tree)
        out.tree_pages.append(tree)
        out.empty_slots.append(sum(-r.done % ps for r in s.running))
        out.waiting.append(len(s.waiting))
        out.peak_pages, out.peak_held_pages = max(out.peak_pages, used), max(out.peak_held_pages, used - tree)

    def check(self) -> None:
        """Every page and row of the ledger, with the tree's pages; the mirror against the device."""
        self.result.checks += 1
        pages = np.zeros(self.backend.num_pages, np.int32)
        if self.tree is not None:
            owned = self.tree.pages()
            pages[: len(owned)] = owned
        if wrong := invariant_report(self.backend.ledger, jax.numpy.asarray(pages)):
            raise RuntimeError(f"after {self.result.finished} requests the ledger is broken: {wrong}")
        free = int(self.backend.ledger.allocator.available_size()) // self.options.page_size
        if free != self.scheduler.capacity.free_pages:
            raise RuntimeError(f"the device counts {free} free pages, the mirror {self.scheduler.capacity.free_pages}.")

    def _check_end(self) -> None:
        """Nothing is lost: free + evictable = pool, nothing protected; after a reset every page is free."""
        self.check()
        s, pool = self.scheduler, self.backend.num_pages * self.options.page_size
        free, tree = s.capacity.available_size(), self.tree
        protected, evictable = (tree.protected, tree.evictable) if tree is not None else (0, 0)
        if free + evictable != pool or protected:
            raise RuntimeError(
                f"after the last request {free} tokens are free, {evictable} evictable and {protected} protected, in a "
                f"pool of {pool}; {pool - free - evictable} leaked."
            )
        if self.result.finished + self.result.refused != len(self.trace):
            raise RuntimeError(f"{self.result.finished} of {len(self.trace)} requests finished.")
        if tree is not None:
            self.backend.release(tree.pages())
            tree.reset()
        free = int(self.backend.ledger.allocator.available_size())
        if free != pool or int(self.backend.ledger.faults):
            raise RuntimeError(f"after the reset {free} of {pool} tokens are free; the rest leaked.")
        if wrong := invariant_report(self.backend.ledger):
            raise RuntimeError(f"after the reset the ledger is broken: {wrong}")
