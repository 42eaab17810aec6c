"""Runs prompts through the real thing: ledger, pool, chunked prefill of a padded batch, batched decode."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    release_rows,
    release_window,
)
from kvjax.layout import NEW_ROW, round_up
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Decoder
from tests.quick import FAST_COMPILE


@dataclass
class Greedy:
    """What one prompt gave."""

    prompt_logits: np.ndarray  # f32[L, vocab], or [1, vocab]: the last row alone
    tokens: np.ndarray  # i32[steps]
    logits: np.ndarray  # f32[steps, vocab], row t is the one whose argmax is tokens[t]


def run_greedy(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    steps: int,
    *,
    page_size: int,
    chunk: int,
    every_logit: bool,
    mode: str = "one",
    spoil: bool = False,
) -> list[Greedy]:
    """All prompts in one batch, beside one lane that is never in use; `chunk` prompt tokens of each at a time.

    mode: "one" pool for all layers, nothing is released early; "dual" pools (one of window slots where every layer
    slides), as many window slots as the bound allows; "ring", a ring per row.
    spoil: after every program, write NaN into all window pages that are free ("dual").
    Fails when the ledger refuses anything, when a value is not finite, or when pages are left over at the end.
    """
    graph, weights = nnx.split(decoder)
    config, window = decoder.config, decoder.config.window
    lanes, lengths = len(prompts) + 1, np.array([*map(len, prompts), 0], np.int32)
    context = round_up(int(lengths.max()) + steps, 64) + 1  # no multiple of a page or of a block
    size = int(sum(round_up(int(n) + steps, page_size) for n in lengths[:-1]))
    table = ReqToTokenPool.create(lanes, context)
    if mode == "one" or window is None:
        ledger = Ledger.create(table, PagedTokenToKVPoolAllocator.create(size, page_size))
        pool = pool_for(config, size, page_size)
    else:
        bound = len(prompts) * round_up(window + chunk + 2 * page_size, page_size)
        if mode == "ring":
            allocator = SWARingTokenToKVPoolAllocator.create(size, page_size, lanes, window, chunk)
        elif config.full_layers:
            allocator = SWATokenToKVPoolAllocator.create(size, min(size, bound), page_size)
        else:
            size = min(size, bound)
            allocator = PureSWATokenToKVPoolAllocator.create(size, page_size)
        ledger = Ledger.create(table, allocator, window)
        pool = window_pool_for(config, allocator.pool_sizes, page_size)
    ledger.check_pool(pool)

    @functools.partial(jax.jit, donate_argnames=("ledger", "pool"), compiler_options=FAST_COMPILE)
    def extend(weights, ledger, pool, rows, prefix, tokens, q_lens):
        ledger, rows, _, ok = alloc_for_extend(ledger, rows, prefix, prefix + q_lens, capacity=tokens.size)
        entries, t = ledger.table.req_to_token, tokens.shape[1]
        batch, positions = Batch.create(entries, rows, prefix, q_lens, t, window=window, ledger=ledger)
        which = "all" if every_logit else "last"
        logits, pool = nnx.merge(graph, weights)(tokens, positions, pool, batch, logits=which)
        if ledger.slides:
            ledger = release_window(ledger, rows, jnp.argmax(logits, -1), max_tokens=t)
        return ledger, pool, rows, logits if every_logit else logits[:, None], ok

    @functools.partial(jax.jit, donate_argnames=("ledger", "pool"), compiler_options=FAST_COMPILE)
    def decode(weights, ledger, pool, rows, tokens):
        ledger, _, positions, ok = alloc_for_decode(ledger, rows)
        active = (rows > 0).astype(jnp.int32)
        entries = ledger.table.req_to_token
        batch, positions = Batch.create(entries, rows, positions, active, 1, window=window, ledger=ledger)
        logits, pool = nnx.merge(graph, weights)(tokens[:, None], positions, pool, batch)
        return ledger, pool, logits, ok

    @functools.partial(jax.jit, donate_argnames=("pool",), compiler_options=FAST_COMPILE)
    def spoiled(pool, ledger):
        """NaN wherever the window side has handed nothing out, and in what was released."""
        side = ledger.allocator.swa_attn_allocator if config.full_layers else ledger.allocator.allocator
        free = side.is_free(jnp.arange(side.num_pages + 1)).at[0].set(True)
        inner = pool.swa_kv_pool
        bad = jnp.repeat(free, page_size)[:, None, None]
        leaves = jax.tree.map(lambda leaf: jnp.where(bad, jnp.nan, leaf), (inner.k, inner.v))
        return dataclasses.replace(pool, swa_kv_pool=dataclasses.replace(inner, k=leaves[0], v=leaves[1]))

    rows = np.where(lengths > 0, NEW_ROW, 0).astype(np.int32)
    pieces: list[list[np.ndarray]] = [[] for _ in prompts]
    for start in range(0, int(lengths.max()), chunk):
        q_lens = np.clip(lengths - start, 0, chunk)
        tokens = np.full((lanes, chunk), 1, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : q_lens[i]] = prompt[start : start + q_lens[i]]
        prefix = np.where(q_lens > 0, start, 0).astype(np.int32)
        lane_rows = np.where(q_lens > 0, rows, 0)
        ledger, pool, got, logits, ok = extend(weights, ledger, pool, lane_rows, prefix, tokens, q_lens)
        assert ok
        if spoil:
            pool = spoiled(pool, ledger)
        rows = np.where(q_lens > 0, np.asarray(got), rows)
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        for i, n in enumerate(q_lens[:-1]):
            if n:
                pieces[i].append(logits[i, : n if every_logit else 1])
    prompt_logits = [np.concatenate(p) if every_logit else p[-1] for p in pieces]

    steps_logits = [np.stack([p[-1] for p in prompt_logits])]
    for _ in range(steps - 1):
        tokens = np.append(steps_logits[-1].argmax(-1), 0).astype(np.int32)
        ledger, pool, logits, ok = decode(weights, ledger, pool, rows, tokens)
        assert ok
        if spoil:
            pool = spoiled(pool, ledger)
        assert np.isfinite(logits).all()
        steps_logits.append(np.asarray(logits)[:-1])

    ledger = jax.jit(release_rows, compiler_options=FAST_COMPILE)(ledger, rows)
    allocator = ledger.allocator
    assert int(ledger.faults) == 0
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        assert int(allocator.swa_available_size()) == allocator.size_swa
        assert int(allocator.full_available_size()) == size
    else:
        assert int(allocator.available_size()) == size
    by_prompt = np.stack(steps_logits, axis=1)
    return [Greedy(prompt, logits.argmax(-1), logits) for prompt, logits in zip(prompt_logits, by_prompt, strict=True)]


def window_pool_for(config: ModelConfig, sizes: tuple[int, int], page_size: int) -> SWAKVPool:
    """A float32 pool with a side for each kind of layer."""
    return SWAKVPool.create(
        *sizes,
        page_size,
        config.full_layers,
        config.window_layers,
        config.num_kv_heads,
        config.head_dim,
        config.v_head_dim,
        dtype=jnp.float32,
    )


def pool_for(config: ModelConfig, size: int, page_size: int):
    """A float32 pool that fits the config."""
    if config.kv_lora_rank is not None:
        return MLATokenToKVPool.create(
            size, page_size, config.num_layers, config.kv_lora_rank, config.head_dim, dtype=jnp.float32
        )
    return MHATokenToKVPool.create(
        size,
        page_size,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.v_head_dim,
        dtype=jnp.float32,
    )
