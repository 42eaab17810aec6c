"""`Engine`: answers prompts of any lengths with continuous batching, on programs that are compiled once.

    engine = Engine(Decoder.from_weights(config, checkpoint.weights), EngineSettings(batch=8, pages=256))
    answers = engine.generate([Request(prompt_ids, max_new_tokens=64), ...])

The host only admits, retracts and collects. Pages, tables, KV, sampling and release live in the programs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.layout import ceil_div, positive
from kvjax.show import FREE, PageSnapshot
from models.decoder import Decoder
from models.lanes import Chunk, Lanes, Report
from models.programs import (
    Program,
    Shapes,
    abstract_state,
    build_decode,
    build_extend,
    build_page_rows,
    build_release,
    create_state,
    split_decoder,
)
from models.scheduler import Books, Buckets, Request, Running, Scheduler, refuse_impossible

__all__ = ["Answer", "Engine", "EngineSettings", "PageSnapshot", "Request", "Stats"]


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes of an engine. Everything is allocated and compiled for them once."""

    batch: int = 8  # requests that run at the same time
    page_size: int = 16  # tokens; 1 uses the token allocator
    max_context_len: int = 1024  # tokens per request, prompt and answer together
    pages: int | None = None  # in the pool; None: enough for every lane at full length
    steps: int = 32  # decode steps per program, at most
    chunk: int = 128  # prompt tokens per prefill program, at most
    buckets: tuple[tuple[int, int], ...] | None = None  # (lanes, tokens) of the prefill programs; None: from the above
    rows: int | None = None  # requests that the ledger can hold; None: batch
    kv_dtype: Any = jnp.float32
    need_sort: bool = False  # hand out the lowest free pages first (a sorted merge when the free list runs out)
    window_mode: str = "dual"  # of models with window layers: "dual" pools, or a "ring" per row

    def shapes(self) -> Shapes:
        """ValueError for a size below 1."""
        lanes, page = positive("batch", self.batch), positive("page_size", self.page_size)
        full = lanes * ceil_div(positive("max_context_len", self.max_context_len), page)
        pages = full if self.pages is None else positive("pages", self.pages)
        rows = self.batch if self.rows is None else self.rows
        steps = min(positive("steps", self.steps), self.max_context_len)
        width = max(t for _, t in self.buckets) if self.buckets else positive("chunk", self.chunk)
        chunk = min(width, self.max_context_len)
        return Shapes(lanes, rows, self.max_context_len, pages * page, page, steps, chunk, self.window_mode)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    tokens: tuple[int, ...]  # the end-of-sequence token included, where it came
    finish: str  # "eos" or "length"
    retractions: int = 0  # how often the request had to make room and was prefilled again


@dataclasses.dataclass
class Stats:
    """Counts of one `generate` call."""

    prefill_tokens: int = 0  # those of retracted requests again
    prefill_seconds: float = 0.0
    prefill_programs: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_programs: int = 0
    steps: int = 0  # of decode
    peak_pages: int = 0
    retractions: int = 0
    generated_tokens: int = 0  # of all answers
    finished: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Answer tokens per second of decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Hook(Protocol):
    """Called after every program."""

    def __call__(self, stats: Stats, running: Sequence[Running]) -> None: ...


class Engine:
    """A decoder, a pool, a ledger and their programs. Not thread-safe; one `generate` at a time."""

    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        *,
        eos_ids: Sequence[int] | None = None,
        on_compile: Callable[[int, int, str], None] | None = None,
        snapshots: bool = False,
    ):
        """Allocates the pool and compiles every program.

        eos_ids: tokens that end an answer; None: the model's. on_compile(done, total, name) follows the compiling.
        snapshots: also compile what `self.snapshots` needs. ValueError for sizes below 1.
        """
        settings = settings or EngineSettings()
        self.settings, self.config, self.shapes = settings, model.config, settings.shapes()
        self.eos_ids = tuple(model.config.eos_token_ids if eos_ids is None else eos_ids)
        if settings.buckets is None:
            self.buckets = Buckets.default(settings.batch, min(settings.chunk, settings.max_context_len))
        else:
            self.buckets = Buckets(settings.buckets)
        graph, weights = split_decoder(model)
        self._weights = jax.tree.map(jnp.asarray, weights)
        self._kinds = {"kv_dtype": settings.kv_dtype, "need_sort": settings.need_sort}
        self._compile(graph, weights, on_compile, snapshots)
        self._reset()
        self.stats = Stats()
        self.snapshots: list[PageSnapshot] = []  # of the last `generate`, where they were asked for

    @property
    def traces(self) -> int:
        """How often Python ran the body of a program; one per program, however long the engine serves."""
        return sum(program.traces for program in self.programs.values())

    def generate(self, requests: Sequence[Request], *, hook: Hook | None = None) -> list[Answer]:
        """Answers in the order of the requests. Each is what the request alone would get.

        ValueError, before anything runs, for a request that no empty engine could hold.
        """
        refuse_impossible(requests, self.shapes, self.config.vocab_size)
        scheduler = Scheduler(self.shapes, self.books)
        everyone = [Running(index, request) for index, request in enumerate(requests)]
        scheduler.queue.extend(everyone)
        self.stats, self.snapshots = Stats(), []
        try:
            while scheduler.queue or scheduler.running:
                scheduler.admit()
                if any(self._in_prefill(r) for r in scheduler.running):
                    self._extend(scheduler)
                else:
                    self._decode(scheduler)
                if hook is not None:
                    hook(self.stats, scheduler.running)
        except BaseException:
            self._reset()  # an interrupted program has taken the old state with it
            raise
        return [Answer(tuple(r.answer), "eos" if self._ends(r) else "length", r.retractions) for r in everyone]

    def _ends(self, r: Running) -> bool:
        return not r.request.ignore_eos and r.answer[-1] in self.eos_ids

    @staticmethod
    def _in_prefill(r: Running) -> bool:
        # In decode the row lacks only the last token, which the next step feeds. A prompt of one token, or a
        # retracted request, lacks at least one too, but has no row yet.
        return r.row == 0 or r.left_to_prefill > 1 or not r.answer

    # --- programs ----------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """An empty pool and an empty ledger."""
        for name in ("pool", "ledger"):  # lets go of the old ones before there are new ones
            self.__dict__.pop(name, None)
        self.pool, self.ledger = create_state(self.config, self.shapes, **self._kinds)
        self.books = Books(self.shapes)

    def _compile(self, graph, weights, on_compile, snapshots: bool) -> None:
        shapes, eos = self.shapes, self.eos_ids
        pool, ledger = abstract_state(self.config, shapes, **self._kinds)
        self.programs: dict[Any, Program] = {
            bucket: build_extend(graph, weights, pool, ledger, *bucket, eos) for bucket in self.buckets.shapes
        }
        self.programs["decode"] = build_decode(graph, weights, pool, ledger, shapes.batch, shapes.steps, eos)
        self.programs["release"] = build_release(ledger, shapes.batch)
        if snapshots:
            self.programs["page_rows"] = build_page_rows(ledger)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        for done, (key, program) in enumerate(self.programs.items()):
            if on_compile is not None:
                on_compile(done, len(self.programs), program.name)
            self._compiled[key] = program.compile()
        if on_compile is not None:
            on_compile(len(self.programs), len(self.programs), "")

    def _run(self, key: Any, lanes: int, width: int, *inputs: Any) -> Report:
        """Run a program on the engine's state and fetch its report: one transfer."""
        self.pool, self.ledger, packed = self._compiled[key](self._weights, self.pool, self.ledger, *inputs)
        return Report.unpack(packed, lanes, width)

    def _extend(self, scheduler: Scheduler) -> None:
        waiting = [r for r in scheduler.running if self._in_prefill(r)]
        (lanes, width), chosen = self.buckets.choose([r.left_to_prefill for r in waiting])
        members = [waiting[i] for i in chosen]
        chunk: Any = Chunk.empty(lanes, width)
        for lane, r in enumerate(members):
            tokens = r.tokens
            end = min(len(tokens), r.written + width)
            chunk.tokens[lane, : end - r.written] = tokens[r.written : end]
            chunk.rows[lane] = r.row or -1
            chunk.prefix_lens[lane], chunk.seq_lens[lane] = r.written, end
            chunk.final[lane] = end == len(tokens)
            _describe(chunk, lane, r)
        start = time.perf_counter()
        report = self._run((lanes, width), lanes, 1, chunk)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.prefill_programs += 1
        if not report.ok:
            raise RuntimeError(
                f"a prefill of {int(chunk.seq_lens.sum() - chunk.prefix_lens.sum())} tokens was refused with "
                f"{report.free_pages} pages free, though it was checked to fit; this is a bug."
            )
        self.stats.prefill_tokens += int((chunk.seq_lens - chunk.prefix_lens).sum())
        for lane, r in enumerate(members):
            self.books.free_rows -= r.row == 0
            self.books.grow(r.written, int(report.lengths[lane]))
            r.written, r.row = int(report.lengths[lane]), int(report.rows[lane])
            self._collect(scheduler, r, report, lane)
        self._after(scheduler, "prefill", report)

    def _decode(self, scheduler: Scheduler) -> None:
        lanes: Any = Lanes.empty(self.shapes.batch)
        members = list(scheduler.running)
        for lane, r in enumerate(members):
            lanes.rows[lane], lanes.active[lane], lanes.tokens[lane] = r.row, True, r.answer[-1]
            _describe(lanes, lane, r)
        # While requests wait, the first lane that ends makes room for one of them.
        leave = len(members) - 1 if scheduler.queue else 0
        start = time.perf_counter()
        batch, steps = self.shapes.batch, self.shapes.steps
        report = self._run("decode", batch, steps, lanes, np.int32(steps), np.int32(leave))
        self.stats.decode_seconds += time.perf_counter() - start
        self.stats.decode_programs += 1
        self.stats.steps += int(report.steps)
        self.stats.decode_tokens += int(np.sum(report.produced))
        for lane, r in enumerate(members):
            self.books.grow(r.written, int(report.lengths[lane]))
            r.written = int(report.lengths[lane])
            self._collect(scheduler, r, report, lane)
        self._after(scheduler, "decode", report)
        if not report.ok:
            if not np.any(report.waiting):
                raise RuntimeError("a decode step was refused though no lane waits for a page; this is a bug.")
            self._retract(scheduler)

    def _collect(self, scheduler: Scheduler, r: Running, report: Report, lane: int) -> None:
        r.answer.extend(report.tokens[lane, : int(report.produced[lane])].tolist())
        self.stats.generated_tokens += int(report.produced[lane])
        if report.finished[lane]:
            self.books.give_back(r.written)
            r.row, r.ended = 0, True
            scheduler.running.remove(r)
            self.stats.finished += 1

    def _retract(self, scheduler: Scheduler) -> None:
        newest = scheduler.retract()
        self.stats.retractions += 1
        report = self._release([newest])
        self._after(scheduler, "retract", report)

    def _release(self, members: list[Running]) -> Report:
        rows = np.zeros(self.shapes.batch, np.int32)
        rows[: len(members)] = [r.row for r in members]
        self.ledger, packed = self._compiled["release"](self.ledger, rows)
        for r in members:
            self.books.give_back(r.written)
            r.row, r.written = 0, 0
        return Report.unpack(packed, self.shapes.batch, 1)

    def _after(self, scheduler: Scheduler, program: str, report: Report) -> None:
        self.books.check(report)
        self.stats.peak_pages = max(self.stats.peak_pages, self.shapes.pages - int(report.fewest_free))
        if "page_rows" in self._compiled:
            rows = np.asarray(self._compiled["page_rows"](self.ledger))[1:]
            owners = np.full(self.shapes.rows + 1, FREE, np.int32)
            for r in scheduler.running:
                owners[r.row] = r.index
            owners[0] = FREE
            self.snapshots.append(PageSnapshot(self.stats.steps, program, owners[rows]))


def _describe(target: Any, lane: int, r: Running) -> None:
    """Write into a lane of a `Chunk` or `Lanes` what the programs have to know about its request."""
    request, sampling = r.request, target.sampling
    target.generated[lane], target.limit[lane] = len(r.answer), request.max_new_tokens
    target.ends[lane] = not request.ignore_eos
    sampling.temperature[lane], sampling.top_p[lane] = request.temperature, request.top_p
    sampling.top_k[lane], sampling.seed[lane] = request.top_k, request.seed
