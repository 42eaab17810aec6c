"""ModelBackend: what kvjax.serving's scheduler drives: the decoder's compiled programs over one pool and one ledger."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.ledger import Ledger
from kvjax.serving import Chunk, Outcome, Request
from kvjax.serving.rows import slots_of
from kvjax.show import CACHED, FREE, PageSnapshot
from models import rows
from models.buckets import Buckets
from models.lanes import Chunk as ChunkLanes
from models.lanes import Lanes, Report
from models.programs import KVPool, Program, Shapes, build_decode, build_extend


@dataclasses.dataclass
class Stats:
    """Counts of one `generate` call."""

    prefill_tokens: int = 0  # those of retracted requests again
    cached_tokens: int = 0  # not prefilled, as the prefix cache had them
    prefill_seconds: float = 0.0
    prefill_programs: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_programs: int = 0
    steps: int = 0  # of decode
    peak_pages: int = 0  # of requests and prefix cache
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


@dataclasses.dataclass(frozen=True)
class Asked:
    """`info` of the scheduler's requests: what the programs must know beside the tokens."""

    index: int  # place in the caller's list
    ends: bool  # an end-of-sequence token ends the answer
    temperature: float
    top_k: int
    top_p: float
    seed: int


def build_programs(
    graph: Any,
    weights: Any,
    pool: KVPool,
    ledger: Ledger,
    shapes: Shapes,
    buckets: Buckets,
    eos_ids: tuple[int, ...],
    *,
    prefix_cache: bool,
    snapshots: bool,
    implementation: str | None = None,
) -> dict[Any, Program]:
    """Every program of a `ModelBackend`, by bucket or name; those of a prefix cache only where there is one.

    implementation: of the kernels, see `pallas_kernels.registry`.
    """
    model, how = (graph, weights, pool, ledger), {"park": prefix_cache, "implementation": implementation}
    programs: dict[Any, Program] = {bucket: build_extend(*model, *bucket, eos_ids, **how) for bucket in buckets.shapes}
    programs["decode"] = build_decode(*model, shapes.batch, shapes.steps, eos_ids, **how)
    programs["open"] = rows.build_open(ledger, shapes.max_context_len if prefix_cache else 1)
    programs["close"] = rows.build_close(ledger)
    if prefix_cache:
        programs["share"] = rows.build_share(ledger, shapes.max_context_len)
        programs["release"] = rows.build_release(ledger)
        programs["row_pages"] = rows.build_row_pages(ledger)
    if snapshots:
        programs["page_rows"] = rows.build_page_rows(ledger)
    return programs


class ModelBackend:
    """A `kvjax.serving.Backend` over compiled programs; `pool` and `ledger` are its device state.

    compiled: those of `build_programs`, under the same keys. on_program is called after every extend and decode
    program, when its report is counted in `stats`. RuntimeError when the device counts other than the host.
    """

    def __init__(
        self,
        compiled: dict[Any, jax.stages.Compiled],
        weights: Any,
        pool: KVPool,
        ledger: Ledger,
        shapes: Shapes,
        buckets: Buckets,
    ):
        self.pool, self.ledger, self.shapes = pool, ledger, shapes
        self.page_size, self.num_pages = shapes.page_size, shapes.pages
        self.num_rows, self.row_width = min(shapes.batch, shapes.rows), shapes.max_context_len
        self.stats, self.snapshots = Stats(), list[PageSnapshot]()
        self.on_program: Callable[[], None] = lambda: None
        self._compiled, self._weights, self._buckets = compiled, weights, buckets
        self._parks = "share" in compiled  # rows that end stay until they are closed
        self._rows: dict[int, Request] = {}  # every row that is taken
        self._ended: set[Request] = set()  # of these, those whose answer is complete

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, and whose answer is not complete."""
        return [r for r in self._rows.values() if r not in self._ended]

    # --- rows ------------------------------------------------------------------------------------------------------

    def open_row(self, request: Request, slots: np.ndarray) -> int:
        self.ledger, packed = self._compiled["open"](self.ledger, self._padded(slots), np.int32(len(slots)))
        row, ok = np.asarray(packed).tolist()
        if not ok:
            raise RuntimeError(f"no row was to be had while {len(self._rows)} of {self.num_rows} are taken; a bug.")
        self._rows[row] = request
        self.stats.cached_tokens += len(slots)
        return row

    def row_slots(self, row: int, n: int) -> np.ndarray:
        return slots_of(np.asarray(self._compiled["row_pages"](self.ledger, np.int32(row))), n, self.page_size)

    def share_row(self, row: int, end: int, start: int, slots: np.ndarray) -> None:
        numbers = np.int32(row), np.int32(end), np.int32(start)
        self.ledger = self._compiled["share"](self.ledger, *numbers, self._padded(slots), np.int32(len(slots)))

    def close_row(self, row: int, end: int) -> None:
        self.ledger = self._compiled["close"](self.ledger, np.int32(row), np.int32(end))
        r = self._rows.pop(row)
        if r in self._ended:
            self._ended.remove(r)
        else:
            self._snapshot("retract")

    def release(self, pages: np.ndarray) -> None:
        width = min(rows.RELEASE_WIDTH, self.num_pages)
        for at in range(0, len(pages), width):
            padded = np.zeros(width, np.int32)
            padded[: len(pages) - at] = pages[at : at + width]
            self.ledger = self._compiled["release"](self.ledger, padded)

    def _padded(self, slots: np.ndarray) -> np.ndarray:
        out = np.zeros(self.row_width if self._parks else 1, np.int32)
        out[: len(slots)] = slots
        return out

    # --- programs --------------------------------------------------------------------------------------------------

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request], steps: int, first_finish: bool) -> Outcome:
        closed: list[Request] = []
        first = np.zeros(len(chunks), np.int32)
        at, report = [c.start for c in chunks], None
        while left := [i for i, c in enumerate(chunks) if at[i] < c.end]:
            report = self._extend(chunks, at, left, first, closed)
        tokens, counts = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
        if decodes:
            report = self._decode(decodes, steps, first_finish, closed)
            tokens, counts = report.tokens[: len(decodes), : report.steps].T, report.produced[: len(decodes)]
        assert report is not None, "the scheduler runs nothing only when there is nothing to run"
        return Outcome(report.free_pages + report.staged_pages, first, tokens, counts, closed)

    def _extend(
        self, chunks: Sequence[Chunk], at: list[int], left: list[int], first: np.ndarray, closed: list[Request]
    ) -> Report:
        """One extend program for the chunks in `left` that gain most; at[i] moves on, first[i] gets a last token."""
        (lanes, width), chosen = self._buckets.choose([chunks[i].end - at[i] for i in left])
        members = [left[i] for i in chosen]
        inputs: Any = ChunkLanes.empty(lanes, width)
        for lane, i in enumerate(members):
            chunk, start = chunks[i], at[i]
            r, end = chunk.request, min(chunk.end, start + width)
            inputs.tokens[lane, : end - start] = r.ids[start:end]
            inputs.rows[lane], inputs.prefix_lens[lane], inputs.seq_lens[lane] = r.row, start, end
            inputs.final[lane] = chunk.last and end == chunk.end
            _describe(inputs, lane, r)
            at[i] = end
        began = time.perf_counter()
        report = self._call((lanes, width), lanes, 1, inputs)
        tokens = int((inputs.seq_lens - inputs.prefix_lens).sum())
        self.stats.prefill_seconds += time.perf_counter() - began
        self.stats.prefill_programs += 1
        self.stats.prefill_tokens += tokens
        for lane, i in enumerate(members):
            if inputs.final[lane]:
                first[i] = report.tokens[lane, 0]
        self._after("prefill", report, [chunks[i].request for i in members], closed, f"a prefill of {tokens} tokens")
        return report

    def _decode(self, decodes: Sequence[Request], steps: int, first_finish: bool, closed: list[Request]) -> Report:
        inputs: Any = Lanes.empty(self.shapes.batch)
        for lane, r in enumerate(decodes):
            inputs.rows[lane], inputs.active[lane], inputs.tokens[lane] = r.row, True, r.ids[r.length - 1]
            _describe(inputs, lane, r)
        leave = len(decodes) - 1 if first_finish else 0
        began = time.perf_counter()
        batch, width = self.shapes.batch, self.shapes.steps
        report = self._call("decode", batch, width, inputs, np.int32(steps), np.int32(leave))
        self.stats.decode_seconds += time.perf_counter() - began
        self.stats.decode_programs += 1
        self.stats.steps += report.steps
        self.stats.decode_tokens += int(np.sum(report.produced))
        self._after("decode", report, decodes, closed, f"{steps} decode steps of {len(decodes)} requests")
        return report

    def _call(self, key: Any, lanes: int, width: int, *inputs: Any) -> Report:
        """Run a program on the device state and fetch its report: one transfer."""
        self.pool, self.ledger, packed = self._compiled[key](self._weights, self.pool, self.ledger, *inputs)
        return Report.unpack(packed, lanes, width)

    def _after(
        self, program: str, report: Report, members: Sequence[Request], closed: list[Request], what: str
    ) -> None:
        """Count what a program did, and check that the device's counts are the host's."""
        for lane, r in enumerate(members):
            if report.finished[lane] and self._parks:
                self._ended.add(r)
            elif report.finished[lane]:
                closed.append(self._rows.pop(r.row))
        free_rows = self.shapes.rows - len(self._rows)
        if not report.ok or report.faults or report.free_rows != free_rows:
            raise RuntimeError(
                f"the ledger answered ok {bool(report.ok)} with {report.faults} faults and {report.free_rows} free "
                f"rows to {what}, and {free_rows} free rows were expected; this is a bug, please report it with the "
                "requests that led here."
            )
        self.stats.generated_tokens += int(np.sum(report.produced))
        self.stats.finished += int(np.sum(report.finished))
        self.stats.peak_pages = max(self.stats.peak_pages, self.num_pages - report.fewest_free)
        self._snapshot(program)
        self.on_program()

    def _snapshot(self, program: str) -> None:
        if "page_rows" not in self._compiled:
            return
        pages = np.asarray(self._compiled["page_rows"](self.ledger))[1:]
        owners = np.full(self.shapes.rows + 1, FREE, np.int32)
        for row, r in self._rows.items():
            owners[row] = r.info.index
        owners = np.where(pages == rows.TREE_PAGE, CACHED, owners[np.maximum(pages, 0)])
        self.snapshots.append(PageSnapshot(self.stats.steps, program, owners))


def _describe(target: Any, lane: int, r: Request) -> None:
    """Write into a lane of a program's input what it has to know about its request."""
    asked, sampling = r.info, target.sampling
    target.generated[lane], target.limit[lane] = r.length - r.prompt_len, r.max_new_tokens
    target.ends[lane] = asked.ends
    sampling.temperature[lane], sampling.top_p[lane] = asked.temperature, asked.top_p
    sampling.top_k[lane], sampling.seed[lane] = asked.top_k, asked.seed
