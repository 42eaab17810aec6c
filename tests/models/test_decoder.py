"""The decoder as a program: one trace, pools in place, padding without effect; and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.compiled import compile_for, h200_available, inspect
from models.batch import Batch
from models.decoder import Decoder
from tests.models.tiny import GQA, MLA, pool_for, random_weights, scattered_table

CONFIGS = [pytest.param(GQA, id="gqa"), pytest.param(MLA, id="mla")]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn]
NAN_BYTES = {jnp.float32: np.nan, jnp.bfloat16: 0x7FC0, jnp.float8_e4m3fn: 0x7F}
CONTEXT = 40


@functools.cache
def model(config, **kwargs):
    """(graph, weights, step), step jitted: (weights, tokens, table, rows, prefix, q_lens, pool) -> (logits, pool)."""
    graph, weights = nnx.split(Decoder.from_weights(config, random_weights(config), **kwargs))

    @functools.partial(jax.jit, static_argnames="logits")
    def step(weights, tokens, table, rows, prefix, q_lens, pool, logits="last"):
        batch, positions = Batch.create(table, rows, prefix, q_lens, tokens.shape[1])
        return nnx.merge(graph, weights)(tokens, positions, pool, batch, logits=logits)

    return graph, weights, step


def tokens_for(lanes, width, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, GQA.vocab_size, (lanes, width)), jnp.int32)


def i32(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_and_single_tokens_give_what_one_pass_gives(config):
    _, weights, step = model(config)
    table, size = scattered_table(1, CONTEXT, 4)
    tokens, row = tokens_for(1, 12), i32(1)
    whole, pool = step(weights, tokens, table, row, i32(0), i32(12), pool_for(config, size, 4), logits="all")

    pieces, chunked = [], pool_for(config, size, 4)
    for start, end in ((0, 5), (5, 10), (10, 11), (11, 12)):
        piece = jnp.zeros((1, 5 if end - start > 1 else 1), jnp.int32).at[:, : end - start].set(tokens[:, start:end])
        logits, chunked = step(weights, piece, table, row, i32(start), i32(end - start), chunked, logits="all")
        pieces.append(logits[:, : end - start])

    assert whole.dtype == jnp.float32
    assert whole.shape == (1, 12, config.vocab_size)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)
    for a, b in zip(jax.tree.leaves(pool), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_last_logits_are_those_of_the_last_real_token():
    _, weights, step = model(GQA)
    table, size = scattered_table(3, CONTEXT, 4)
    arguments = tokens_for(3, 6), table, i32(1, 2, 3), i32(0, 0, 0), i32(6, 1, 4), pool_for(GQA, size, 4)
    every, _ = step(weights, *arguments, logits="all")
    last, _ = step(weights, *arguments)
    np.testing.assert_allclose(last, every[jnp.arange(3), i32(5, 0, 3)], atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_padding_holds_changes_no_bit(config):
    """Other tokens on padding, other rows behind unused lanes; nothing is written for them either."""
    _, weights, step = model(config)
    table, size = scattered_table(3, CONTEXT, 4)
    q_lens, tokens = i32(4, 0, 2), tokens_for(3, 6)
    padding = jnp.arange(6) >= q_lens[:, None]
    other = jnp.where(padding, -5, tokens)
    pool = pool_for(config, size, 4)

    logits, written = step(weights, tokens, table, i32(1, 0, 3), i32(0, 0, 0), q_lens, pool, logits="all")
    again, rewritten = step(weights, other, table, i32(1, 2, 3), i32(0, 9, 0), q_lens, pool, logits="all")

    assert np.isfinite(logits).all()
    assert np.isfinite(again).all()
    assert np.array_equal(logits[~padding], again[~padding])
    held = np.concatenate([table[1, :4], table[3, :2]])
    for before, after in zip(jax.tree.leaves(written), jax.tree.leaves(rewritten), strict=True):
        assert np.array_equal(before, after)
        touched = np.flatnonzero(np.any(np.asarray(before) != 0, axis=(1, 2)))
        assert np.array_equal(touched, np.sort(held))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_nan_outside_the_sequences_changes_no_bit_of_the_logits(config, dtype):
    """B41 through the whole model: page 0 and every slot past each sequence hold NaN, before an extend and a decode."""
    _, weights, step = model(config)
    table, size = scattered_table(3, CONTEXT, 4)
    rows, start = i32(1, 2, 0), i32(6, 3, 0)
    _, clean = step(weights, tokens_for(3, 6), table, rows, i32(0, 0, 0), start, pool_for(config, size, 4, dtype))
    held = np.concatenate([table[1, :6], table[2, :3]])
    others = np.setdiff1d(np.arange(size + 4), held)
    poisoned = jax.tree.map(lambda leaf: leaf.at[others].set(NAN_BYTES[dtype]), clean)
    assert np.isnan(np.asarray(poisoned.read(0, others)[0], np.float32)).all()

    for q_lens in (i32(6, 2, 0), i32(1, 1, 0)):
        width = int(q_lens.max())
        arguments = tokens_for(3, width, seed=1), table, rows, start, q_lens
        (a, clean), (b, poisoned) = step(weights, *arguments, clean), step(weights, *arguments, poisoned)
        assert np.array_equal(a, b)
        assert np.isfinite(b).all()
        start = start + q_lens


@pytest.mark.parametrize("config", CONFIGS)
def test_one_trace_serves_every_length(config):
    graph, weights, _ = model(config)
    traces = []

    @jax.jit
    def step(weights, tokens, table, rows, prefix, q_lens, pool):
        traces.append(tokens.shape)
        batch, positions = Batch.create(table, rows, prefix, q_lens, tokens.shape[1])
        return nnx.merge(graph, weights)(tokens, positions, pool, batch)

    table, size = scattered_table(2, CONTEXT, 4)
    pool = pool_for(config, size, 4)
    for lengths in ((5, 3), (2, 5), (1, 0)):
        _, pool = step(weights, tokens_for(2, 5), table, i32(1, 2), i32(0, 0), i32(*lengths), pool)
    for position in range(5, 12):
        _, pool = step(weights, tokens_for(2, 1), table, i32(1, 2), i32(position, 3), i32(1, 1), pool)
    assert traces == [(2, 5), (2, 1)]


def decode_loop(graph, weights, tokens, table, rows, prefix, pool, *, steps=4):
    """Greedy decode in one program: what a generation loop is made of."""

    def turn(carry):
        i, tokens, pool = carry
        batch, positions = Batch.create(table, rows, prefix + i, jnp.ones_like(rows), 1)
        logits, pool = nnx.merge(graph, weights)(tokens[:, None], positions, pool, batch)
        return i + 1, jnp.argmax(logits, axis=-1).astype(jnp.int32), pool

    return jax.lax.while_loop(lambda c: c[0] < steps, turn, (jnp.int32(0), tokens, pool))


def extend_chunk(graph, weights, tokens, table, rows, prefix, pool):
    batch, positions = Batch.create(table, rows, prefix, jnp.full_like(rows, tokens.shape[1]), tokens.shape[1])
    return nnx.merge(graph, weights)(tokens, positions, pool, batch)


def compiled_report(program, config, dtype, platform):
    """(report, pool) of a donating program over an abstract model and a pool of 32,768 tokens."""
    graph, weights = nnx.split(Decoder.abstract(config))
    pool = jax.eval_shape(lambda: pool_for(config, 1 << 15, 16, dtype))
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = ints((2,)) if program is decode_loop else ints((2, 8))
    arguments = weights, tokens, ints((3, 512)), ints((2,)), ints((2,)), pool
    compiled = compile_for(functools.partial(program, graph), arguments, platform, donate_argnums=5)
    return inspect(compiled), pool


@pytest.mark.compiled
@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", id="cpu"), pytest.param("h200", id="h200", marks=pytest.mark.aot)]
)
@pytest.mark.parametrize("program", [extend_chunk, decode_loop])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_donated_pools_are_updated_in_place(config, dtype, program, platform):
    """No temporary and no operation of a pool's size: a step costs the same however large the pool is."""
    if platform == "h200" and not (available := h200_available())[0]:
        pytest.skip(available[1])
    report, pool = compiled_report(program, config, dtype, platform)
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert report.temp_bytes < smallest
    assert report.alias_bytes >= pool.nbytes
    assert not report.large_ops(smallest)


def test_an_abstract_decoder_has_the_same_graph_and_no_arrays():
    for config in (GQA, MLA):
        graph, weights = nnx.split(Decoder.abstract(config))
        real_graph, real_weights, _ = model(config)
        assert graph == real_graph
        abstract = jax.tree.leaves(weights)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in abstract)
        assert [leaf.shape for leaf in abstract] == [leaf.shape for leaf in jax.tree.leaves(real_weights)]


@pytest.mark.parametrize("config", CONFIGS)
def test_bfloat16_weights_stay_near_float32(config):
    table, size = scattered_table(2, CONTEXT, 4)
    results = []
    for dtype in (jnp.float32, jnp.bfloat16):
        _, weights, step = model(config, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(dtype)}
        pool = pool_for(config, size, 4, dtype)
        logits, _ = step(weights, tokens_for(2, 6), table, i32(1, 2), i32(0, 0), i32(6, 3), pool)
        assert logits.dtype == jnp.float32
        results.append(np.asarray(logits))
    # Eight bits of mantissa (2**-8) through two layers; the logits have a standard deviation near 5.
    assert np.abs(results[0] - results[1]).max() < 0.06 * results[0].std()
    assert np.abs(results[0] - results[1]).max() > 0


def test_kv_scales_make_an_fp8_pool_hold_keys_beyond_its_range():
    """Keys 1,000 times larger leave e4m3fn's range (448); scaled down by 64 they do not, and come back."""
    config, weights = GQA, random_weights(GQA)
    for layer in range(config.num_layers):
        weights[f"layers.{layer}.k_norm"] = weights[f"layers.{layer}.k_norm"] * 1000
        weights[f"layers.{layer}.q_norm"] = weights[f"layers.{layer}.q_norm"] / 1000
    table, size = scattered_table(1, CONTEXT, 4)

    def run(dtype, scales):
        decoder = Decoder.from_weights(config, weights, kv_scales=scales)
        batch, positions = Batch.create(jnp.asarray(table), i32(1), i32(0), i32(12), 12)
        pool = pool_for(config, size, 4, dtype)
        return np.asarray(decoder(tokens_for(1, 12), positions, pool, batch, logits="all")[0])

    exact = run(jnp.float32, None)
    assert np.array_equal(run(jnp.float32, [(64.0, 1.0)] * 2), exact)  # a pool of the keys' own dtype takes no scales
    scaled, clipped = (np.abs(run(jnp.float8_e4m3fn, s) - exact).max() for s in ([(64.0, 0.25)] * 2, None))
    assert scaled < 0.5 * clipped


def test_interleaved_rotation_is_half_split_rotation_of_reordered_rows():
    """A checkpoint whose q and k rows stand in pair order gives the same logits with rope_interleaved."""
    config = dataclasses.replace(GQA, family="llama", qk_norm=False)
    weights = random_weights(config)
    half = config.head_dim // 2
    order = np.arange(config.head_dim).reshape(2, half).T.ravel()  # 0, half, 1, half + 1, ...
    paired = dict(weights)
    for layer in range(config.num_layers):
        for name in ("q", "k"):
            matrix = weights[f"layers.{layer}.{name}"]
            heads = matrix.reshape(-1, config.head_dim, config.hidden_size)
            paired[f"layers.{layer}.{name}"] = heads[:, order].reshape(matrix.shape)
    table, size = scattered_table(1, CONTEXT, 4)
    batch, positions = Batch.create(jnp.asarray(table), i32(1), i32(0), i32(12), 12)
    results = [
        Decoder.from_weights(c, w)(tokens_for(1, 12), positions, pool_for(c, size, 4), batch, logits="all")[0]
        for c, w in ((config, weights), (dataclasses.replace(config, rope_interleaved=True), paired))
    ]
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


def test_a_batch_ends_where_the_table_ends():
    table, _ = scattered_table(2, 8, 4)
    batch, positions = Batch.create(jnp.asarray(table), i32(1, 2, -1), i32(6, 9, 0), i32(4, 1, 3), 4)
    assert batch.q_lens.tolist() == [2, 0, 0]
    assert batch.kv_lens.tolist() == [8, 0, 0]
    assert batch.rows.tolist() == [1, 0, 0]
    assert positions[0].tolist() == [6, 7, 0, 0]
    assert batch.write_loc.tolist() == [*table[1, 6:8].tolist(), *[0] * 10]


def test_weights_that_do_not_fit_are_refused_with_a_reason():
    weights = random_weights(GQA)
    with pytest.raises(ValueError, match=r"1 missing \(layers.1.q\), 1 unknown \(layers.1.Q\)"):
        Decoder.from_weights(GQA, {("layers.1.Q" if n == "layers.1.q" else n): w for n, w in weights.items()})
    with pytest.raises(ValueError, match=r"weight embed has shape \(32, 61\), the config needs \(61, 32\)"):
        Decoder.from_weights(GQA, {**weights, "embed": weights["embed"].T})
    with pytest.raises(ValueError, match="kv_scales has 1 pairs for 2 layers"):
        Decoder.from_weights(GQA, weights, kv_scales=[(1.0, 1.0)])
    with pytest.raises(ValueError, match="without scales"):
        Decoder.from_weights(MLA, random_weights(MLA), kv_scales=[(1.0, 1.0)] * 2)
    table, size = scattered_table(1, 8, 4)
    batch, positions = Batch.create(jnp.asarray(table), i32(1), i32(0), i32(1), 1)
    with pytest.raises(ValueError, match="'first'"):
        Decoder.from_weights(GQA, weights)(tokens_for(1, 1), positions, pool_for(GQA, size, 4), batch, logits="first")
