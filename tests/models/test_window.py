"""Sliding windows in the decoder: what a window layer sees, where it reads, and that released pages reach nobody."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Ledger, ReqToTokenPool, SWARingTokenToKVPoolAllocator, alloc_for_extend
from kvjax.pools import MHATokenToKVPool
from models.attention import paged_attention
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Decoder
from models.engine import Engine, EngineSettings, Request
from models.programs import Shapes, create_state
from tests.models.tiny import random_weights, scattered_table
from tests.parity.harness import run_greedy

WINDOW = 8
MIXED = ModelConfig(
    family="gpt_oss",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    attention_bias=True,
    attention_sinks=True,
    activation="clamped_swiglu",
    num_experts=4,
    experts_per_token=2,
    window=WINDOW,
    window_layers=(0, 2),
)
SLIDING = dataclasses.replace(
    MIXED,
    family="mistral",
    attention_bias=False,
    attention_sinks=False,
    activation="silu",
    num_experts=None,
    experts_per_token=None,
    num_layers=2,
    window_layers=(0, 1),
)


def windowed(q, k, v, positions, scale, window, sinks=None, softcap=None):
    """float64 [t, Hq, Dv] of one sequence, see tiny.dense_attention."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, out = q.shape[1] // k.shape[1], np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for i, position in enumerate(positions):
        seen = slice(max(0, position - window + 1), position + 1)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[i, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            probs, total = np.exp(scores), 0.0 if sinks is None else np.exp(float(sinks[head]))
            out[i, head] = probs @ v[seen, head // group] / (probs.sum() + total)
    return out


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (False, 2.0), (True, 2.0)])
def test_a_query_sees_its_window_and_nothing_else_is_read(t, block, sinks, softcap):
    """Rows shorter than the window, longer, of one token, and a lane not in use; all other slots hold NaN."""
    rng, context, window = np.random.default_rng(3), 40, 6
    table, size = scattered_table(4, context, 4)
    lens = np.array([t, 4 + t, 23 + t, 0], np.int32)
    pool = MHATokenToKVPool.create(size, 4, 1, 2, 8, 8, dtype=jnp.float32)
    k, v = rng.normal(size=(2, 4, context, 2, 8)).astype(np.float32)
    needed = [np.arange(max(0, n - t - window + 1), n) for n in lens]
    leaf_k, leaf_v = (np.full(pool.k[0].shape, np.nan, np.float32) for _ in range(2))
    for row, columns in enumerate(needed):
        leaf_k[table[row + 1, columns]], leaf_v[table[row + 1, columns]] = k[row, columns], v[row, columns]
    pool = dataclasses.replace(pool, k=(jnp.asarray(leaf_k),), v=(jnp.asarray(leaf_v),))
    q = rng.normal(size=(4, t, 4, 8)).astype(np.float32)
    sink = jnp.asarray(rng.normal(size=4), jnp.float32) if sinks else None

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(q, pool, table, lens):
        rows = jnp.where(lens > 0, jnp.arange(1, 5), 0)
        q_lens = jnp.where(lens > 0, t, 0)
        batch, positions = Batch.create(table, rows, jnp.maximum(lens - t, 0), q_lens, t, window=window)
        return paged_attention(
            q, pool, 0, batch, positions, 0.3, window=window, sinks=sink, softcap=softcap, block=block
        )

    out = np.asarray(run(q, pool, jnp.asarray(table), jnp.asarray(lens)))
    assert not out[3].any()
    for row, n in enumerate(lens[:3]):
        expected = windowed(q[row], k[row], v[row], np.arange(n - t, n), 0.3, window, sink, softcap)
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=2e-6)


def test_a_batch_without_a_window_is_refused_by_a_window_layer():
    pool = MHATokenToKVPool.create(8, 4, 1, 2, 8, dtype=jnp.float32)
    batch, positions = Batch.create(jnp.zeros((2, 8), jnp.int32), jnp.array([1]), jnp.array([0]), jnp.array([1]), 1)
    with pytest.raises(ValueError, match=r"Batch.create\(\.\.\., window=\)"):
        paged_attention(jnp.zeros((1, 1, 4, 8)), pool, 0, batch, positions, 1.0, window=4)


@pytest.mark.parametrize(("config", "seed"), [(MIXED, 4), (SLIDING, 0)], ids=["mixed", "sliding"])
def test_a_long_generation_with_eviction_gives_the_tokens_of_one_without(config, seed):
    """More than 8 windows; after every program NaN in every window page that nobody holds, released ones first."""
    decoder = Decoder.from_weights(config, random_weights(config, seed))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, config.vocab_size, n) for n in (30, 5)]
    run = functools.partial(run_greedy, decoder, prompts, 8 * WINDOW, page_size=4, chunk=11, every_logit=False)
    kept = run(mode="one")
    for mode, spoil in (("dual", True), ("ring", False)):
        for one, other in zip(kept, run(mode=mode, spoil=spoil), strict=True):
            np.testing.assert_array_equal(other.tokens, one.tokens)
            np.testing.assert_allclose(other.logits, one.logits, rtol=0, atol=1e-4)
    assert len(set(kept[0].tokens.tolist())) > 8, "a model that repeats itself shows little"


@pytest.mark.parametrize("mode", ["dual", "ring"])
def test_the_engine_serves_window_models_and_gives_every_page_back(mode):
    """Answers of a crowded engine, retractions included, are those of each prompt alone."""
    decoder = Decoder.from_weights(MIXED, random_weights(MIXED))
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, MIXED.vocab_size, n) for n in (21, 3, 9, 14)]
    steps = 2 * WINDOW
    alone = run_greedy(decoder, prompts, steps, page_size=4, chunk=40, every_logit=False)
    settings = EngineSettings(
        batch=3, page_size=4, max_context_len=48, pages=18, steps=5, buckets=((1, 8), (3, 4)), window_mode=mode
    )
    engine = Engine(decoder, settings, eos_ids=())
    answers = engine.generate([Request(tuple(map(int, p)), max_new_tokens=steps) for p in prompts])
    assert [list(a.tokens) for a in answers] == [r.tokens.tolist() for r in alone]
    assert engine.stats.retractions > 0
    allocator, table = engine.ledger.allocator, engine.ledger.table
    assert int(engine.ledger.faults) == 0
    assert int(allocator.available_size()) == min(allocator.size_full, allocator.size_swa if mode == "dual" else 72)
    assert int(table.available_size()) == 3
    assert engine.traces == len(engine.programs)


def test_the_window_side_is_as_large_as_all_rows_may_need():
    shapes = Shapes(batch=2, rows=3, max_context_len=1024, size=4096, page_size=4, steps=1, chunk=30)
    pool, ledger = jax.eval_shape(lambda: create_state(MIXED, shapes))
    assert ledger.allocator.size_swa == pool.size_swa == 3 * (40 + 8)
    assert (pool.full_layers, pool.swa_layers) == ((1,), (0, 2))
    short = dataclasses.replace(shapes, max_context_len=16)
    assert short.window_size(WINDOW) == 3 * 16
    with pytest.raises(ValueError, match="dual, ring, got 'one'"):
        dataclasses.replace(shapes, window_mode="one")


def test_a_ring_is_not_read_where_it_holds_nothing_of_a_found_prefix():
    allocator = SWARingTokenToKVPoolAllocator.create(64, 4, 2, 6, 4)
    ledger = Ledger.create(ReqToTokenPool.create(2, 32), allocator, 6)
    prefix = jnp.arange(4, 12, dtype=jnp.int32)[None]  # eight tokens that a tree would own
    zero, lane = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    ledger, rows, _, ok = alloc_for_extend(ledger, zero - 1, 8 * lane, 11 * lane, capacity=4, prefix_loc=prefix)
    assert ok
    batch, _ = Batch.create(ledger.table.req_to_token, rows, 8 * lane, 3 * lane, 4, window=6, ledger=ledger)
    assert batch.window_start is not None
    assert batch.window_table is not None
    assert batch.window_start.tolist() == [8]
    assert (np.asarray(batch.window_table)[1] > 0).all()
