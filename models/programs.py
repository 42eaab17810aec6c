"""The two programs of the engine that run the model: extend (a chunk of prefill) and decode (up to k steps in a loop).

Each takes the KV pool and the ledger, donated, and returns them with one packed `Report`. A program can be traced from
shapes alone, so it can be compiled without weights in memory, and for a device that this machine does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvjax.allocators import (
    PagedTokenToKVPoolAllocator,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvjax.extend import alloc_for_extend
from kvjax.indexing import take
from kvjax.layout import INT32_MIN, positive, round_up
from kvjax.ledger import Ledger
from kvjax.operation import state
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from kvjax.rows import ReqToTokenPool
from kvjax.steps import alloc_for_decode, release_rows
from kvjax.window import release_window
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Decoder
from models.lanes import Chunk, Lanes, Report
from models.sampling import SamplingParams, sample

KVPool = MHATokenToKVPool | MLATokenToKVPool | SWAKVPool
WINDOW_MODES = ("dual", "ring")

# A request's own seed and the position of a token make the key of each draw; this one only starts the chain.
_BASE_SEED = 0


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes that the programs are compiled for."""

    batch: int  # lanes of the decode program
    rows: int  # requests that the ledger can hold
    max_context_len: int  # tokens per row
    size: int  # tokens in the pool
    page_size: int  # tokens
    steps: int  # of one decode program, at most
    chunk: int = 1  # tokens of one row that one extend program writes, at most; sizes the window side of a model
    window_mode: str = "dual"  # how window layers keep their tokens: "dual" pools, or a "ring" per row

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name != "window_mode":
                positive(field.name, getattr(self, field.name))
        if self.window_mode not in WINDOW_MODES:
            raise ValueError(f"window_mode must be one of {', '.join(WINDOW_MODES)}, got {self.window_mode!r}.")

    @property
    def pages(self) -> int:
        """Pages that the allocator owns."""
        return self.size // self.page_size

    def window_size(self, window: int) -> int:
        """Tokens of the window side of dual pools: what every row can hold at most, so that it never runs out.

        An extend holds window + chunk + 2 pages of a row before it releases, but never more than the row.
        """
        most = round_up(window + self.chunk, self.page_size) + 2 * self.page_size
        return min(self.size, self.rows * min(most, round_up(self.max_context_len, self.page_size)))


def create_state(
    config: ModelConfig,
    shapes: Shapes,
    *,
    kv_dtype: Any = jnp.float32,
    store_dtype: Any = None,
    need_sort: bool = False,
) -> tuple[KVPool, Ledger]:
    """An empty pool that fits the model, MHA, MLA or SWA, and a ledger of the same size. Works under `jax.eval_shape`.

    Page size 1 is served by the token allocator. store_dtype: see `kvjax.pools.dtypes`; spell it out when compiling
    for another platform. `shapes.size` is what rows hold in full layers; where every layer slides it costs four bytes
    a token, and the window side alone holds keys and values.
    """
    size, page = shapes.size, shapes.page_size
    table = ReqToTokenPool.create(shapes.rows, shapes.max_context_len)
    pool: KVPool
    if config.window is not None:
        sides: SWATokenToKVPoolAllocator | SWARingTokenToKVPoolAllocator
        if shapes.window_mode == "ring":
            sides = SWARingTokenToKVPoolAllocator.create(
                size, page, shapes.rows, config.window, shapes.chunk, need_sort=need_sort
            )
        else:
            sides = SWATokenToKVPoolAllocator.create(size, shapes.window_size(config.window), page, need_sort)
        pool = SWAKVPool.create(
            *sides.pool_sizes,
            page,
            config.full_layers,
            config.window_layers,
            config.num_kv_heads,
            config.head_dim,
            config.v_head_dim,
            dtype=kv_dtype,
            store_dtype=store_dtype,
        )
        ledger = Ledger.create(table, sides, config.window)
        ledger.check_pool(pool)
        return pool, ledger
    if config.kv_lora_rank is not None:
        pool = MLATokenToKVPool.create(
            size, page, config.num_layers, config.kv_lora_rank, config.head_dim, dtype=kv_dtype, store_dtype=store_dtype
        )
    else:
        pool = MHATokenToKVPool.create(
            size,
            page,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.v_head_dim,
            dtype=kv_dtype,
            store_dtype=store_dtype,
        )
    if page == 1:
        allocator = TokenToKVPoolAllocator.create(size, need_sort=need_sort)
    else:
        allocator = PagedTokenToKVPoolAllocator.create(size, page, need_sort=need_sort)
    ledger = Ledger.create(table, allocator)
    ledger.check_pool(pool)
    return pool, ledger


def abstract_state(config: ModelConfig, shapes: Shapes, **kwargs: Any) -> tuple[KVPool, Ledger]:
    """What `create_state` returns, as shapes: nothing is allocated."""
    return jax.eval_shape(lambda: create_state(config, shapes, **kwargs))


def split_decoder(model: Decoder) -> tuple[Any, Any]:
    """(graph, weights) of a decoder, real or `Decoder.abstract`: static data, and the pytree that programs take."""
    return nnx.split(model)


@dataclasses.dataclass
class Program:
    """A function, which of its arguments it takes over, and the shapes of all of them."""

    name: str
    function: Callable[..., Any]
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    traces: int = 0  # how often Python ran `function`: 1 for ever after `compile`

    def lower(self) -> jax.stages.Lowered:
        """Trace the function for its shapes and lower it for the current backend (or the one in context)."""

        def counted(*arguments: Any) -> Any:
            self.traces += 1
            return self.function(*arguments)

        counted.__name__ = self.name
        return jax.jit(counted, donate_argnums=self.donated).lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """The executable. It accepts these shapes and no others, and never traces again."""
        return self.lower().compile()


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a pytree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)


def books_implementation(implementation: str | None) -> str | None:
    """The ledger's implementation in a model's programs: "xla" where the model is all XLA, otherwise the best, for a
    ledger with window layers or state slots has no kernel that could be named."""
    return "xla" if implementation == "xla" else None


def build_extend(
    graph: Any,
    weights: Any,
    pool: KVPool,
    ledger: Ledger,
    lanes: int,
    width: int,
    eos_ids: tuple[int, ...] = (),
    *,
    park: bool = False,
    implementation: str | None = None,
) -> Program:
    """extend(weights, pool, ledger, Chunk) -> (pool, ledger, packed Report of `lanes` lanes, 1 token each).

    weights, pool and ledger may be arrays or shapes. One program per bucket [lanes, width]. park: a request that ends
    keeps its row and its pages, for the host to hand them to a prefix tree. implementation: of the kernels, see
    `pallas_kernels.registry`.
    """

    books = books_implementation(implementation)

    def extend(weights, pool, ledger, chunk: Chunk):
        b, t = chunk.tokens.shape
        with jax.named_scope("ledger"):
            ledger, rows, _, ok = alloc_for_extend(
                ledger, chunk.rows, chunk.prefix_lens, chunk.seq_lens, capacity=b * t, implementation=books
            )
            fewest = _free_pages(ledger)
            new = jnp.where(ok, chunk.seq_lens - chunk.prefix_lens, 0)
            batch, positions = Batch.create(
                ledger.table.req_to_token, rows, chunk.prefix_lens, new, t, window=ledger.window, ledger=ledger
            )
        model = nnx.merge(graph, weights)
        logits, pool = model(chunk.tokens, positions, pool, batch, implementation=implementation)
        final = chunk.final & (new > 0)
        token = _draw(logits, chunk.sampling, chunk.seq_lens, final)
        finished = final & (_is_end(token, eos_ids, chunk.ends) | (chunk.generated + 1 >= chunk.limit))
        with jax.named_scope("ledger"):
            if ledger.slides:  # what the chunk read is left behind only now
                ledger = release_window(ledger, rows, token, max_tokens=t)
            if not park:
                ledger = release_rows(ledger, jnp.where(finished, rows, 0), implementation=books)
        report = _report(
            ledger,
            ok=ok,
            steps=1,
            fewest_free=fewest,
            rows=rows if park else jnp.where(finished, 0, rows),
            lengths=jnp.where(new > 0, chunk.seq_lens, 0),
            finished=finished,
            waiting=jnp.zeros_like(finished),
            produced=final,
            tokens=jnp.where(final, token, 0)[:, None],
        )
        return pool, ledger, report.pack()

    arguments = (abstract(weights), abstract(pool), abstract(ledger), abstract(Chunk.empty(lanes, width)))
    return Program(f"extend_{lanes}x{width}", extend, (1, 2), arguments)


@state
class _Loop:
    """What the decode loop carries. The ledger already holds the slots of the step that comes next."""

    pool: Any
    ledger: Ledger
    rows: jax.Array  # i32[b]; 0 once the lane is finished
    tokens: jax.Array  # i32[b], fed by the next step
    active: jax.Array  # bool[b]
    generated: jax.Array  # i32[b]
    loc: jax.Array  # i32[b], where the next step writes
    positions: jax.Array  # i32[b], of the next step's tokens
    goes_on: jax.Array  # bool[], there is a next step, if its slots were to be had
    ok: jax.Array  # bool[], they were
    step: jax.Array  # i32[], steps done
    fewest: jax.Array  # i32[], pages
    lengths: jax.Array  # i32[b], tokens whose KV is written
    finished: jax.Array  # bool[b]
    produced: jax.Array  # i32[b]
    out: jax.Array  # i32[b, k]


def build_decode(
    graph: Any,
    weights: Any,
    pool: KVPool,
    ledger: Ledger,
    lanes: int,
    steps: int,
    eos_ids: tuple[int, ...] = (),
    *,
    park: bool = False,
    implementation: str | None = None,
) -> Program:
    """decode(weights, pool, ledger, Lanes, steps i32[], leave i32[]) -> (pool, ledger, packed Report).

    Runs until `steps` steps are done (at most the `steps` that it was built for), no more than `leave` lanes are
    active, or a step can not have its pages; that step changes nothing, and the report says which lanes wait.
    A lane ends with an end-of-sequence token or at its limit: its last token is never fed, so its KV is never
    written, and its row and pages go back before the next step takes any. park: they stay with the lane's request
    instead, for the host to hand them to a prefix tree. implementation: of the kernels, see `build_extend`.
    """

    books = books_implementation(implementation)

    def decode(weights, pool, ledger, inputs: Lanes, limit_steps, leave):
        def reserve(ledger, rows, active, step):
            """The next step's slots, if there is a next step."""
            goes_on = (step < jnp.minimum(limit_steps, steps)) & (jnp.sum(active, dtype=jnp.int32) > leave)
            with jax.named_scope("ledger"):
                ledger, loc, positions, ok = alloc_for_decode(ledger, rows, active & goes_on, implementation=books)
            return ledger, loc, positions, goes_on, ok

        def step(c: _Loop) -> _Loop:
            batch = Batch(
                rows=jnp.where(c.active, c.rows, 0),
                q_lens=c.active.astype(jnp.int32),
                kv_lens=jnp.where(c.active, c.positions + 1, 0),
                req_to_token=c.ledger.table.req_to_token,
                write_loc=c.loc,
            )
            if c.ledger.window is not None:
                batch = batch.with_window(c.positions[:, None], c.ledger.window, c.ledger)
            model, tokens, at = nnx.merge(graph, weights), c.tokens[:, None], c.positions[:, None]
            logits, pool = model(tokens, at, c.pool, batch, implementation=implementation)
            token = jnp.where(c.active, _draw(logits, inputs.sampling, c.positions + 1, c.active), 0)
            generated = c.generated + c.active
            # Window layers read the mapping, and whatever writes it next must come behind that, or XLA copies it.
            # Everything below depends on the tokens therefore, even in a program without end tokens; always true.
            drawn = jnp.min(token) > INT32_MIN if c.ledger.slides else True
            ended = c.active & drawn & (_is_end(token, eos_ids, inputs.ends) | (generated >= inputs.limit))
            ledger = c.ledger
            if not park:
                with jax.named_scope("ledger"):
                    ledger = release_rows(ledger, jnp.where(ended, c.rows, 0), implementation=books)
            rows, active = jnp.where(ended, 0, c.rows), c.active & drawn & ~ended
            ledger, loc, positions, goes_on, ok = reserve(ledger, rows, active, c.step + 1)
            return _Loop(
                pool=pool,
                ledger=ledger,
                rows=rows,
                tokens=jnp.where(active, token, c.tokens),
                active=active,
                generated=generated,
                loc=loc,
                positions=positions,
                goes_on=goes_on,
                ok=ok,
                step=c.step + 1,
                fewest=jnp.minimum(c.fewest, _free_pages(ledger)),
                lengths=c.lengths + c.active,
                finished=c.finished | ended,
                produced=c.produced + c.active,
                out=lax.dynamic_update_slice_in_dim(c.out, token[:, None], c.step, axis=1),
            )

        active, none = inputs.active & (inputs.rows > 0), jnp.zeros(lanes, jnp.int32)
        rows, lengths = jnp.where(active, inputs.rows, 0), jnp.where(active, take(ledger.committed, inputs.rows), 0)
        ledger, loc, positions, goes_on, ok = reserve(ledger, rows, active, jnp.zeros((), jnp.int32))
        first = _Loop(
            pool=pool,
            ledger=ledger,
            rows=rows,
            tokens=inputs.tokens,
            active=active,
            generated=inputs.generated,
            loc=loc,
            positions=positions,
            goes_on=goes_on,
            ok=ok,
            step=jnp.zeros((), jnp.int32),
            fewest=_free_pages(ledger),
            lengths=lengths,
            finished=jnp.zeros(lanes, bool),
            produced=none,
            out=jnp.zeros((lanes, steps), jnp.int32),
        )
        end = lax.while_loop(lambda c: c.goes_on & c.ok, step, first)
        report = _report(
            end.ledger,
            ok=end.ok,
            steps=end.step,
            fewest_free=end.fewest,
            rows=rows if park else end.rows,
            lengths=end.lengths,
            finished=end.finished,
            waiting=end.active & ~end.ok & (end.lengths % end.ledger.page_size == 0),
            produced=end.produced,
            tokens=end.out,
        )
        return end.pool, end.ledger, report.pack()

    number = jax.ShapeDtypeStruct((), jnp.int32)
    inputs = abstract(Lanes.empty(lanes))
    arguments = (abstract(weights), abstract(pool), abstract(ledger), inputs, number, number)
    return Program(f"decode_{lanes}x{steps}", decode, (1, 2), arguments)


def _free_pages(ledger: Ledger) -> jax.Array:
    """i32[]: free and staged pages."""
    return ledger.allocator.free_pages + ledger.allocator.staged_pages


def _report(ledger: Ledger, **fields: Any) -> Report:
    return Report(
        free_pages=ledger.allocator.free_pages,
        staged_pages=ledger.allocator.staged_pages,
        free_rows=ledger.table.available_size(),
        faults=ledger.faults,
        **fields,
    )


def _draw(logits: jax.Array, sampling: SamplingParams, positions: jax.Array, wanted: jax.Array) -> jax.Array:
    """i32[b]: a token for each wanted lane; the others count as greedy, so that they cost nothing."""
    temperature = jnp.where(wanted, sampling.temperature, 0.0)
    return sample(logits, dataclasses.replace(sampling, temperature=temperature), jax.random.key(_BASE_SEED), positions)


def _is_end(token: jax.Array, eos_ids: tuple[int, ...], ends: jax.Array) -> jax.Array:
    """bool[b]: the token is one of eos_ids, on lanes that end there."""
    found = jnp.zeros(token.shape, bool)
    for eos in eos_ids:
        found |= token == eos
    return found & ends
