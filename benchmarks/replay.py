"""What serving costs on the host: radix cache on a real trace, ledger per request in its replay, a scheduling step.

The committed cut of the Mooncake trace; KVJAX_TRACE names a longer one (with KVJAX_POOL_TOKENS for its pool).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure import Measurement
from kvjax.layout import ceil_div
from kvjax.prefix import RadixCache
from kvjax.serving import Chunk, Outcome, Request, Scheduler
from kvjax.serving.replay import Replay, ReplayOptions, ReplayResult
from kvjax.serving.traces import TraceRequest, read_trace

CUT = Path(__file__).parents[1] / "tests" / "data" / "traces" / "mooncake_150.jsonl"
PAGE = 16
STEPS = 1000


class NoDevice:
    """A backend that only counts, so that a step's time is the scheduler's alone."""

    page_size, num_rows, row_width = PAGE, 4096, 1 << 20

    def __init__(self, num_pages: int):
        self.num_pages = self.free = num_pages

    def open_row(self, request: Request, slots: np.ndarray) -> int:
        return 1

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request], steps: int, first_finish: bool) -> Outcome:
        for c in chunks:
            self.free -= ceil_div(c.end, PAGE) - ceil_div(c.start, PAGE)
        for r in decodes:
            self.free -= ceil_div(r.done + steps, PAGE) - ceil_div(r.done, PAGE)
        tokens = np.full((steps, len(decodes)), 7, np.int32)
        return Outcome(self.free, np.full(len(chunks), 7, np.int32), tokens, np.full(len(decodes), steps))

    def row_slots(self, row: int, n: int) -> np.ndarray:
        return np.arange(PAGE, PAGE + n, dtype=np.int32)

    def share_row(self, row: int, end: int, start: int, slots: np.ndarray) -> None:
        pass

    def close_row(self, row: int, end: int) -> None:
        raise AssertionError("nobody finishes in this benchmark")

    def release(self, pages: np.ndarray) -> None:
        self.free += len(pages)


def scheduling_steps(running: int, waiting: int, steps: int) -> list[float]:
    """Milliseconds of each scheduling step with so many running and waiting requests, a prefix cache on."""
    backend, rng = NoDevice(1 << 15), np.random.default_rng(0)
    scheduler = Scheduler(backend, RadixCache(PAGE), prefill_tokens=1 << 20)
    for rid in range(running):
        scheduler.submit(Request(rid, rng.integers(0, 9999, 64, np.int32), 10 * steps))
    scheduler.step()
    # Each could start, but for the first one, which has to wait until the pool is all but empty.
    for rid in range(waiting):
        size = 512 if rid else (backend.num_pages - 100) * PAGE
        scheduler.submit(Request(running + rid, rng.integers(0, 9999, size, np.int32), 4))
    out = []
    for _ in range(steps):
        start = time.perf_counter()
        report = scheduler.step(1)
        out.append((time.perf_counter() - start) * 1e3)
        assert report.steps == 1
        assert (len(scheduler.running), len(scheduler.waiting)) == (running, waiting)
    return out


def radix(trace: Sequence[TraceRequest], pool_tokens: int) -> tuple[list[float], float]:
    """(microseconds of each request's match + insert + evict, hit rate) with a tree of at most `pool_tokens`."""
    tree, next_id, hits, total = RadixCache(PAGE), -1, 0, 0
    times = []
    for r in trace:
        private = np.arange(next_id, next_id - r.input_len, -1, dtype=np.int32)
        next_id -= r.input_len
        ids = r.tokens(lambda n, private=private: private[:n])
        slots = np.arange(PAGE, PAGE + len(ids), dtype=np.int32)
        start = time.perf_counter()
        match = tree.match_prefix(ids[:-1])
        tree.evict(tree.evictable + len(ids) - pool_tokens)
        tree.insert(ids, slots)
        times.append((time.perf_counter() - start) * 1e6)
        hits, total = hits + match.length, total + len(ids)
    return times, hits / total


def replayed(trace: Sequence[TraceRequest], pool_tokens: int) -> tuple[ReplayResult, list[float]]:
    """A replay, and the milliseconds of each of its ledger programs (chunks and decode steps)."""
    replay, times = Replay(trace, ReplayOptions(pool_tokens, PAGE)), []
    run = replay.backend.run

    def timed(*args, **how) -> Outcome:
        start = time.perf_counter()
        out = run(*args, **how)
        times.append((time.perf_counter() - start) * 1e3)
        return out

    replay.backend.run = timed
    return replay.run(), times


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Radix cost and hit rate, ledger and wall time per replayed request, a scheduling step at 256 + 128."""
    path = Path(os.environ.get("KVJAX_TRACE", CUT))
    pool = int(os.environ.get("KVJAX_POOL_TOKENS", 131_072))
    trace = read_trace(path, 20 if quick else None)
    config = {"trace": path.name, "requests": len(trace), "pool": pool, "page_size": PAGE}
    progress("replay: radix cache")
    times, hits = radix(trace, pool)
    yield Measurement("replay/radix match + insert + evict", median(times), "us per request, median", config)
    yield Measurement("replay/radix hit rate", hits * 100, "%", config)
    progress("replay: ledger")
    result, programs = replayed(trace, pool)
    yield Measurement("replay/ledger program", median(programs), "ms, median", {**config, "programs": len(programs)})
    yield Measurement("replay/ledger", result.ledger_seconds / result.finished * 1e3, "ms per request", config)
    yield Measurement("replay/wall", result.wall_seconds, "s", config)
    progress("replay: scheduling step")
    times = scheduling_steps(256, 128, 100 if quick else STEPS)
    yield Measurement("replay/scheduling step", median(times), "ms, median", {"running": 256, "waiting": 128})
