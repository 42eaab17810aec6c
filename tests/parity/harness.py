"""Runs prompts through the real thing: ledger, pool, chunked prefill of a padded batch, batched decode."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, alloc_for_decode, alloc_for_extend, release_rows
from kvjax.layout import NEW_ROW, round_up
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Decoder


@dataclass
class Greedy:
    """What one prompt gave."""

    prompt_logits: np.ndarray  # f32[L, vocab], or [1, vocab]: the last row alone
    tokens: np.ndarray  # i32[steps]
    logits: np.ndarray  # f32[steps, vocab], row t is the one whose argmax is tokens[t]


def run_greedy(
    decoder: Decoder, prompts: Sequence[np.ndarray], steps: int, *, page_size: int, chunk: int, every_logit: bool
) -> list[Greedy]:
    """All prompts in one batch, beside one lane that is never in use; `chunk` prompt tokens of each at a time.

    Fails when the ledger refuses anything, when a value is not finite, or when pages are left over at the end.
    """
    graph, weights = nnx.split(decoder)
    lanes, lengths = len(prompts) + 1, np.array([*map(len, prompts), 0], np.int32)
    context = round_up(int(lengths.max()) + steps, 64) + 1  # no multiple of a page or of a block
    size = int(sum(round_up(int(n) + steps, page_size) for n in lengths[:-1]))
    ledger = Ledger.create(ReqToTokenPool.create(lanes, context), PagedTokenToKVPoolAllocator.create(size, page_size))
    pool = pool_for(decoder.config, size, page_size)
    ledger.check_pool(pool)

    @functools.partial(jax.jit, donate_argnames=("ledger", "pool"))
    def extend(weights, ledger, pool, rows, prefix, tokens, q_lens):
        ledger, rows, _, ok = alloc_for_extend(ledger, rows, prefix, prefix + q_lens, capacity=tokens.size)
        batch, positions = Batch.create(ledger.table.req_to_token, rows, prefix, q_lens, tokens.shape[1])
        which = "all" if every_logit else "last"
        logits, pool = nnx.merge(graph, weights)(tokens, positions, pool, batch, logits=which)
        return ledger, pool, rows, logits if every_logit else logits[:, None], ok

    @functools.partial(jax.jit, donate_argnames=("ledger", "pool"))
    def decode(weights, ledger, pool, rows, tokens):
        ledger, _, positions, ok = alloc_for_decode(ledger, rows)
        active = (rows > 0).astype(jnp.int32)
        batch, positions = Batch.create(ledger.table.req_to_token, rows, positions, active, 1)
        logits, pool = nnx.merge(graph, weights)(tokens[:, None], positions, pool, batch)
        return ledger, pool, logits, ok

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
        assert np.isfinite(logits).all()
        steps_logits.append(np.asarray(logits)[:-1])

    ledger = release_rows(ledger, jnp.asarray(rows))
    assert (int(ledger.allocator.available_size()), int(ledger.faults)) == (size, 0)
    by_prompt = np.stack(steps_logits, axis=1)
    return [Greedy(prompt, logits.argmax(-1), logits) for prompt, logits in zip(prompt_logits, by_prompt, strict=True)]


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
