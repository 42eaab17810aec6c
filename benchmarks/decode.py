"""Paged decode against a contiguous cache: one decoder, one process, interleaved steps.

The paged step includes what the contiguous one does not need: allocation, the table write, and the read through the
page table. The pages of every row are scattered over the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import contiguous
from benchmarks.measure import Measurement, interleaved, ratio
from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, alloc_for_decode, alloc_for_extend
from kvjax.pools import MHATokenToKVPool
from models.batch import Batch
from models.config import ModelConfig, from_hf
from models.decoder import Decoder
from models.weights import expected_tensors

BATCH, CONTEXT, STEPS, PAGE = 16, 512, 16, 16


def config() -> ModelConfig:
    """A Llama of SmolLM2's layer shape, with 8 layers and a small vocabulary."""
    return from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 8192,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e5,
            "tie_word_embeddings": True,
        }
    )


def random_decoder(c: ModelConfig, seed: int = 0) -> Decoder:
    """The decoder with small random weights."""
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(c)
    weights = {n: jnp.asarray(rng.normal(0, 0.02, s), jnp.float32) for n, s in shapes.items()}
    return Decoder.from_weights(c, weights)


def filled_ledger(context: int, steps: int, table: int) -> tuple[Ledger, jax.Array]:
    """A ledger whose BATCH rows hold `context` tokens each, page by page in turn, with room for `steps` more."""
    size = BATCH * (context + steps + PAGE)
    ledger = Ledger.create(ReqToTokenPool.create(BATCH, table), PagedTokenToKVPoolAllocator.create(size, PAGE))
    rows = jnp.full(BATCH, -1, jnp.int32)
    for start in range(0, context, PAGE):
        prefix, seq = jnp.full(BATCH, start), jnp.full(BATCH, min(start + PAGE, context))
        ledger, rows, _, ok = alloc_for_extend(ledger, rows, prefix, seq, capacity=BATCH * PAGE)
        assert bool(ok)
    return ledger, rows


def paged_steps(graph, steps: int) -> Callable:
    """run(weights, pool, ledger, rows, tokens) -> tokens after `steps` decode steps, pool and ledger."""

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def run(weights, pool, ledger, rows, tokens):
        decoder = nnx.merge(graph, weights)

        def body(_, carry):
            pool, ledger, tokens = carry
            ledger, _, positions, _ = alloc_for_decode(ledger, rows)
            one = jnp.ones_like(rows)
            batch, at = Batch.create(ledger.table.req_to_token, rows, positions, one, 1)
            logits, pool = decoder(tokens[:, None], at, pool, batch)
            return pool, ledger, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, body, (pool, ledger, tokens))

    return run


def contiguous_steps(graph, layout: contiguous.Layout, context: int, steps: int) -> Callable:
    """run(weights, cache, tokens) -> the same on a contiguous cache."""

    @functools.partial(jax.jit, donate_argnums=(1,))
    def run(weights, cache, tokens):
        decoder = nnx.merge(graph, weights)

        def body(i, carry):
            cache, tokens = carry
            logits, cache = contiguous.decode_step(decoder, layout, tokens, jnp.full(BATCH, context + i), cache)
            return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, body, (cache, tokens))

    return run


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Milliseconds per step of the three forms and the ratios of the paged one to both contiguous ones."""
    c = config()
    graph, weights = nnx.split(random_decoder(c))
    tokens = jnp.arange(BATCH, dtype=jnp.int32)
    ledger, rows = filled_ledger(CONTEXT, STEPS, 2 * CONTEXT)
    size = ledger.allocator.size
    pool = MHATokenToKVPool.create(size, PAGE, c.num_layers, c.num_kv_heads, c.head_dim, dtype=jnp.float32)

    paged = paged_steps(graph, STEPS)
    calls = {"paged": lambda s: paged(weights, *s, rows, tokens)}
    states: dict[str, Any] = {"paged": (pool, ledger)}
    for layout in ("plain", "best"):
        steps = contiguous_steps(graph, layout, CONTEXT, STEPS)
        calls[layout] = lambda s, steps=steps: steps(weights, s, tokens)
        states[layout] = contiguous.create(layout, c.num_layers, BATCH, CONTEXT + STEPS, c.num_kv_heads, c.head_dim)

    progress(f"decode: batch {BATCH}, context {CONTEXT}, {STEPS} steps a call")
    make = {name: functools.partial(jax.tree.map, jnp.copy, state) for name, state in states.items()}
    times = interleaved(calls, 5 if quick else 15, make=make)
    shape = {
        "batch": BATCH,
        "context": CONTEXT,
        "layers": c.num_layers,
        "kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
    }
    for name, seconds in times.items():
        yield Measurement(f"decode/{name}", median(seconds) / STEPS * 1e3, "ms per step", {**shape, "page_size": PAGE})
    for layout in ("plain", "best"):
        yield Measurement(f"decode/paged_to_{layout}", ratio(times, "paged", layout), "x", shape)
