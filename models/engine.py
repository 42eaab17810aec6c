"""`Engine`: answers prompts of any lengths with continuous batching, on programs that are compiled once.

    engine = Engine(Decoder.from_weights(config, checkpoint.weights), EngineSettings(batch=8, pages=256))
    answers = engine.generate([Request(prompt_ids, max_new_tokens=64), ...])

Who starts, who waits and who is set back is decided by `kvjax.serving.Scheduler`. Pages, tables, KV, sampling and the
ends of answers live in the programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import kvjax.serving as serving
from kvjax.layout import ceil_div, positive
from kvjax.ledger import Ledger
from kvjax.prefix import RadixCache
from kvjax.show import PageSnapshot
from models.backend import Asked, ModelBackend, Stats, build_programs
from models.buckets import Buckets
from models.decoder import Decoder
from models.programs import KVPool, Program, Shapes, abstract_state, create_state, split_decoder
from models.request import Request, refuse_impossible

__all__ = ["Answer", "Engine", "EngineSettings", "PageSnapshot", "Request", "Stats"]


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes of an engine. Everything is allocated and compiled for them once."""

    batch: int = 8  # requests that run at the same time
    page_size: int = 16  # tokens; 1 uses the token allocator
    max_context_len: int = 1024  # tokens per request, prompt and answer together
    pages: int | None = None  # in the pool; None: enough for every lane at full length
    steps: int = 32  # decode steps per program, at most
    chunk: int = 128  # prompt tokens per lane and prefill program, at most
    prefill_tokens: int = 2048  # prompt tokens between two decode steps of the others, at most
    buckets: tuple[tuple[int, int], ...] | None = None  # (lanes, tokens) of the prefill programs; None: from the above
    rows: int | None = None  # requests that the ledger can hold; None: batch
    kv_dtype: Any = jnp.float32
    prefix_cache: bool = False  # keep what was computed, for prompts that begin alike, as long as nobody needs the room
    need_sort: bool = False  # hand out the lowest free pages first (a sorted merge when the free list runs out)
    window_mode: str = "dual"  # of models with window layers: "dual" pools, or a "ring" per row
    implementation: str | None = None  # of the kernels: a name of `pallas_kernels.registry.NAMES`; None: the best here

    def shapes(self) -> Shapes:
        """ValueError for a size below 1."""
        lanes, page = positive("batch", self.batch), positive("page_size", self.page_size)
        full = lanes * ceil_div(positive("max_context_len", self.max_context_len), page)
        pages = full if self.pages is None else positive("pages", self.pages)
        rows = self.batch if self.rows is None else self.rows
        steps = min(positive("steps", self.steps), self.max_context_len)
        positive("prefill_tokens", self.prefill_tokens)
        width = max(t for _, t in self.buckets) if self.buckets else positive("chunk", self.chunk)
        chunk = min(width, self.max_context_len)
        return Shapes(lanes, rows, self.max_context_len, pages * page, page, steps, chunk, self.window_mode)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    tokens: tuple[int, ...]  # the end-of-sequence token included, where it came
    finish: str  # "eos", "length" or "abort"
    retractions: int = 0  # how often the request had to make room and was prefilled again


class Hook(Protocol):
    """Called after every program."""

    def __call__(self, stats: Stats, running: Sequence[serving.Request]) -> None: ...


Stream = Callable[[int, Sequence[int]], None]


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
        snapshots: also compile what `self.snapshots` needs. ValueError for sizes below 1, and for a prefix cache
        with a model that has window layers.
        """
        settings = settings or EngineSettings()
        self.settings, self.config, self.shapes = settings, model.config, settings.shapes()
        self.eos_ids = tuple(model.config.eos_token_ids if eos_ids is None else eos_ids)
        if settings.buckets is None:
            self.buckets = Buckets.default(settings.batch, min(settings.chunk, settings.max_context_len))
        else:
            self.buckets = Buckets(settings.buckets)
        if settings.prefix_cache and model.config.window is not None:
            raise ValueError(
                "prefix_cache keeps whole rows, but the window layers of this model release theirs; leave it off."
            )
        graph, weights = split_decoder(model)
        self._weights = jax.tree.map(jnp.asarray, weights)
        self._kinds = {"kv_dtype": settings.kv_dtype, "need_sort": settings.need_sort}
        self._compile(graph, weights, on_compile, snapshots)
        self._reset()

    @property
    def traces(self) -> int:
        """How often Python ran the body of a program; one per program, however long the engine serves."""
        return sum(program.traces for program in self.programs.values())

    @property
    def pool(self) -> KVPool:
        """The KV pool, as the last program left it."""
        return self.backend.pool

    @property
    def ledger(self) -> Ledger:
        """The ledger, as the last program left it."""
        return self.backend.ledger

    @property
    def stats(self) -> Stats:
        """Counts of the last `generate`."""
        return self.backend.stats

    @property
    def snapshots(self) -> list[PageSnapshot]:
        """Who held which page after each program of the last `generate`, where they were asked for."""
        return self.backend.snapshots

    def generate(
        self, requests: Sequence[Request], *, hook: Hook | None = None, stream: Stream | None = None
    ) -> list[Answer]:
        """Answers in the order of the requests. Each is what the request alone would get.

        hook is called after every program; stream(i, tokens) with the new tokens of request i as they come. Both may
        call `abort`. ValueError, before anything runs, for a request that no empty engine could hold.
        """
        refuse_impossible(requests, self.shapes, self.config.vocab_size)
        self.backend.stats, self.backend.snapshots = Stats(), []
        self.backend.on_program = lambda: None if hook is None else hook(self.stats, self.backend.running)
        self._stream = stream
        self._asked = [self._submit(index, request) for index, request in enumerate(requests)]
        try:
            while self.scheduler.busy:
                self.stats.retractions += len(self.scheduler.step().retracted)
                while self._aborts:
                    self.scheduler.abort(self._asked[self._aborts.pop()])
        except BaseException:
            self._reset()  # an interrupted program has taken the old state with it
            raise
        return [self._answer(r) for r in self._asked]

    def abort(self, index: int) -> None:
        """End request `index` of the `generate` that runs, before its next program; what it has so far is its answer.

        Without effect when it is complete. ValueError for a request that is not there.
        """
        if not 0 <= index < len(self._asked):
            raise ValueError(f"request {index} was to be aborted, but {len(self._asked)} requests run, from 0 on.")
        self._aborts.add(index)

    def _submit(self, index: int, request: Request) -> serving.Request:
        info = Asked(index, not request.ignore_eos, request.temperature, request.top_k, request.top_p, request.seed)
        prompt, eos = np.asarray(request.prompt, np.int32), self.eos_ids if info.ends else ()
        self._count += 1
        asked = serving.Request(self._count, prompt, request.max_new_tokens, eos=eos, info=info)
        self.scheduler.submit(asked)
        return asked

    def _answer(self, r: serving.Request) -> Answer:
        tokens = tuple(r.output.tolist())
        over = "eos" if tokens and tokens[-1] in r.eos else "length"
        return Answer(tokens, "abort" if r.state == serving.ABORTED else over, r.retractions)

    def _pass_on(self, r: serving.Request, tokens: np.ndarray) -> None:
        if self._stream is not None:
            self._stream(r.info.index, tokens.tolist())

    def _reset(self) -> None:
        """An empty pool, an empty ledger, nothing cached."""
        self._asked: list[serving.Request] = []
        self._aborts: set[int] = set()
        self._stream: Stream | None = None
        self._count = 0  # requests so far; two of them are never the same to the prefix cache
        for name in ("scheduler", "backend"):  # lets go of the old pool before there is a new one
            self.__dict__.pop(name, None)
        pool, ledger = create_state(self.config, self.shapes, **self._kinds)
        self.backend = ModelBackend(self._compiled, self._weights, pool, ledger, self.shapes, self.buckets)
        self.tree = RadixCache(self.shapes.page_size) if self.settings.prefix_cache else None
        self.scheduler = serving.Scheduler(
            self.backend,
            self.tree,
            prefill_tokens=self.settings.prefill_tokens,
            max_steps=self.shapes.steps,
            pages_to_front=self.shapes.page_size > 1 and not self.settings.need_sort,
            long_programs=True,
            stream=self._pass_on,
        )

    def _compile(self, graph, weights, on_compile, snapshots: bool) -> None:
        pool, ledger = abstract_state(self.config, self.shapes, **self._kinds)
        self.programs: dict[Any, Program] = build_programs(
            graph,
            weights,
            pool,
            ledger,
            self.shapes,
            self.buckets,
            self.eos_ids,
            prefix_cache=self.settings.prefix_cache,
            snapshots=snapshots,
            implementation=self.settings.implementation,
        )
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        for done, (key, program) in enumerate(self.programs.items()):
            if on_compile is not None:
                on_compile(done, len(self.programs), program.name)
            self._compiled[key] = program.compile()
        if on_compile is not None:
            on_compile(len(self.programs), len(self.programs), "")
