"""Paged attention against a dense reference, and what must never reach a real lane."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compiled import inspect
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from models.attention import paged_attention
from models.batch import Batch
from tests.models.tiny import dense_attention, scattered_table

ATOL = 2e-6  # float32 sums of up to 300 values near 1, against float64


def filled(table, size, page_size, kv_lens, heads, dim, v_dim, dtype=jnp.float32, seed=0, scales=(None, None)):
    """A pool of one layer with random k and v for the first kv_lens[i] tokens of row i + 1; and both as arrays."""
    rng = np.random.default_rng(seed)
    pool = MHATokenToKVPool.create(size, page_size, 1, heads, dim, v_dim, dtype=dtype)
    keys = [rng.normal(size=(length, heads, dim)).astype(np.float32) for length in kv_lens]
    values = [rng.normal(size=(length, heads, v_dim)).astype(np.float32) for length in kv_lens]
    loc = np.concatenate([table[row, :length] for row, length in enumerate(kv_lens, start=1)])
    pool = pool.set_kv_buffer(0, loc, np.concatenate(keys), np.concatenate(values), *scales)
    return pool, keys, values


def chunk(table, kv_lens, q_lens):
    """(batch, positions) of lanes whose last q_lens tokens are the queries; lane i is row i + 1."""
    kv_lens, q_lens = np.asarray(kv_lens, np.int32), np.asarray(q_lens, np.int32)
    rows = np.where(kv_lens > 0, np.arange(1, len(kv_lens) + 1), 0).astype(np.int32)
    width = int(q_lens.max())
    return Batch.create(
        jnp.asarray(table), jnp.asarray(rows), jnp.asarray(kv_lens - q_lens), jnp.asarray(q_lens), width
    )


def queries(batch, positions, heads, dim, seed=1):
    shape = (*positions.shape, heads, dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


attend = jax.jit(
    paged_attention,
    static_argnames=("layer_id", "scale", "latent_rank", "precision", "block", "implementation"),
)


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "dim", "v_dim"),
    [(1, 6, 2, 8, 8), (4, 6, 2, 8, 8), (16, 6, 2, 8, 8), (4, 4, 4, 8, 8), (4, 6, 2, 16, 8), (4, 8, 1, 8, 24)],
)
@pytest.mark.parametrize("width", [1, 5])
def test_agrees_with_dense_attention(page_size, q_heads, kv_heads, dim, v_dim, width):
    kv_lens = [40, 7, 141, 16]
    q_lens = [min(width, n) for n in (5, 3, 4, 1)]
    table, size = scattered_table(4, 144, page_size)
    pool, keys, values = filled(table, size, page_size, kv_lens, kv_heads, dim, v_dim)
    batch, positions = chunk(table, kv_lens, q_lens)
    q = queries(batch, positions, q_heads, dim)

    out = np.asarray(attend(q, pool, 0, batch, positions, dim**-0.5, precision="highest"))

    assert out.shape == (4, width, q_heads, v_dim)
    assert np.isfinite(out).all()
    for lane, (k, v, n) in enumerate(zip(keys, values, q_lens, strict=True)):
        want = dense_attention(q[lane, :n], k, v, np.asarray(positions)[lane, :n], dim**-0.5)
        np.testing.assert_allclose(out[lane, :n], want, atol=ATOL)


@pytest.mark.parametrize("block", [1, 3, 64, 200])
def test_the_block_size_does_not_change_the_result(block):
    kv_lens, q_lens = [70, 3], [4, 2]
    table, size = scattered_table(2, 96, 4)
    pool, _, _ = filled(table, size, 4, kv_lens, 2, 8, 8)
    batch, positions = chunk(table, kv_lens, q_lens)
    q = queries(batch, positions, 4, 8)

    whole = attend(q, pool, 0, batch, positions, 0.3, block=96)

    np.testing.assert_allclose(attend(q, pool, 0, batch, positions, 0.3, block=block), whole, atol=ATOL)


def test_later_tokens_of_a_chunk_are_not_seen():
    """Changing the key and value of position 6 changes the queries at 6 and 7 and not those before."""
    table, size = scattered_table(1, 8, 4)
    pool, keys, values = filled(table, size, 4, [8], 2, 8, 8)
    changed = pool.set_kv_buffer(0, table[1, 6:7], -keys[0][6:7], -values[0][6:7])
    batch, positions = chunk(table, [8], [5])
    q = queries(batch, positions, 4, 8)

    before, after = attend(q, pool, 0, batch, positions, 0.3), attend(q, changed, 0, batch, positions, 0.3)

    assert np.array_equal(before[0, :3], after[0, :3])
    assert (np.abs(before[0, 3:] - after[0, 3:]).max(axis=(1, 2)) > 1e-3).all()


def test_rows_of_uneven_length_read_their_own_pages():
    """B13: row A of length 5 on pages 3 and 7, row B of length 2 on page 5; B alone equals B beside A, bit for bit."""
    table = np.zeros((3, 8), np.int32)
    table[1, :5] = [12, 13, 14, 15, 28]
    table[2, :2] = [20, 21]
    pool, keys, values = filled(table, 32, 4, [5, 2], 2, 8, 8)
    batch, positions = chunk(table, [5, 2], [1, 1])
    q = queries(batch, positions, 4, 8)
    alone = jax.tree.map(lambda x: x[1:], batch)
    alone = dataclasses.replace(alone, req_to_token=batch.req_to_token)

    together = attend(q, pool, 0, batch, positions, 0.3)

    assert np.array_equal(together[1:], attend(q[1:], pool, 0, alone, positions[1:], 0.3))
    for lane, last in ((0, 4), (1, 1)):
        want = dense_attention(q[lane], keys[lane], values[lane], [last], 0.3)
        np.testing.assert_allclose(together[lane], want, atol=ATOL)


@pytest.mark.parametrize("width", [1, 3])
def test_lanes_not_in_use_give_zero(width):
    """B43: kv_lens [3, 0, 0]."""
    table, size = scattered_table(3, 8, 4)
    pool, keys, values = filled(table, size, 4, [3, 0, 0], 2, 8, 8)
    batch, positions = chunk(table, [3, 0, 0], [width, 0, 0])
    q = queries(batch, positions, 4, 8)

    out = np.asarray(attend(q, pool, 0, batch, positions, 0.3))

    want = dense_attention(q[0], keys[0], values[0], np.asarray(positions)[0], 0.3)
    np.testing.assert_allclose(out[0], want, atol=ATOL)
    assert np.array_equal(out[1:], np.zeros_like(out[1:]))
    only = attend(q, pool, 0, *chunk(table, [3, 0, 0], [width, 0, 0]), 0.3)
    assert np.array_equal(out[0], only[0])


def test_rows_outside_the_table_are_lanes_not_in_use():
    table, size = scattered_table(2, 8, 4)
    pool, _, _ = filled(table, size, 4, [8, 8], 2, 8, 8)
    batch, positions = chunk(table, [8, 8], [1, 1])
    q = queries(batch, positions, 4, 8)
    for bad in (-1, 3, 2**31 - 1):
        astray = Batch(jnp.array([1, bad]), batch.q_lens, batch.kv_lens, batch.req_to_token, batch.write_loc)
        out = attend(q, pool, 0, astray, positions, 0.3)
        assert np.array_equal(out[0], attend(q, pool, 0, batch, positions, 0.3)[0])
        assert not np.any(out[1])


NAN_BYTES = {jnp.float32: np.nan, jnp.bfloat16: 0x7FC0, jnp.float8_e4m3fn: 0x7F}


@pytest.mark.parametrize("dtype", list(NAN_BYTES), ids=lambda d: d.__name__)
@pytest.mark.parametrize("width", [1, 3])
def test_nan_outside_the_sequences_changes_no_bit(dtype, width):
    """B41: NaN in page 0 and in every slot past each sequence."""
    kv_lens, q_lens = [5, 3, 0, 130], [width, width, 0, width]
    table, size = scattered_table(4, 132, 4)
    pool, _, _ = filled(table, size, 4, kv_lens, 2, 8, 8, dtype)
    held = np.concatenate([table[row, :length] for row, length in enumerate(kv_lens, start=1)])
    others = np.setdiff1d(np.arange(size + 4), held)
    poisoned = jax.tree.map(lambda leaf: leaf.at[others].set(NAN_BYTES[dtype]), pool)
    assert np.isnan(np.asarray(poisoned.read(0, others)[0], np.float32)).all()
    batch, positions = chunk(table, kv_lens, q_lens)
    q = queries(batch, positions, 4, 8)

    assert np.array_equal(attend(q, pool, 0, batch, positions, 0.3), attend(q, poisoned, 0, batch, positions, 0.3))


def test_a_wider_table_changes_no_bit():
    kv_lens, q_lens = [140, 9], [1, 1]
    results = []
    for width in (256, 300, 2048):
        table, size = scattered_table(2, 144, 4, width=width)
        pool, _, _ = filled(table, size, 4, kv_lens, 2, 8, 8)
        batch, positions = chunk(table, kv_lens, q_lens)
        results.append(attend(queries(batch, positions, 4, 8), pool, 0, batch, positions, 0.3))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.compiled
def test_memory_does_not_follow_the_table_width():
    temporary = []
    for width in (512, 2048):
        table, size = scattered_table(4, 512, 16, width=width)
        pool, _, _ = filled(table, size, 16, [512] * 4, 2, 8, 8)
        batch, positions = chunk(table, [512] * 4, [1] * 4)
        compiled = attend.lower(queries(batch, positions, 4, 8), pool, 0, batch, positions, 0.3).compile()
        temporary.append(inspect(compiled).temp_bytes)
    assert temporary[0] == temporary[1]


def test_scales_multiply_what_an_fp8_pool_holds():
    table, size = scattered_table(1, 24, 4)
    k_scale, v_scale = 0.05, 0.01
    pool, keys, values = filled(table, size, 4, [20], 2, 8, 8, jnp.float8_e4m3fn, scales=(k_scale, v_scale))
    batch, positions = chunk(table, [20], [1])
    q = queries(batch, positions, 4, 8)

    out = attend(q, pool, 0, batch, positions, 0.3, k_scale=k_scale, v_scale=v_scale)

    k, v = (np.asarray(x, np.float64) for x in pool.read(0, table[1, :20]))
    np.testing.assert_allclose(out[0], dense_attention(q[0], k * k_scale, v * v_scale, [19], 0.3), atol=ATOL)
    # Three mantissa bits: the dequantised keys are within 1/16 of the ones that were written.
    np.testing.assert_allclose(k * k_scale, keys[0], rtol=1 / 16, atol=k_scale * 2**-9)
    np.testing.assert_allclose(out[0], dense_attention(q[0], keys[0], values[0], [19], 0.3), atol=0.1)


@pytest.mark.parametrize("width", [1, 4])
def test_latent_values_are_columns_of_the_keys(width):
    rank, rope, heads = 12, 4, 3
    table, size = scattered_table(2, 24, 4)
    pool = MLATokenToKVPool.create(size, 4, 1, rank, rope, dtype=jnp.float32)
    latents = np.random.default_rng(0).normal(size=(2, 20, 1, rank + rope)).astype(np.float32)
    for row in (1, 2):
        pool = pool.set_kv_buffer(0, table[row, :20], latents[row - 1])
    batch, positions = chunk(table, [20, 20], [width, width])
    q = queries(batch, positions, heads, rank + rope)

    out = attend(q, pool, 0, batch, positions, 0.3, latent_rank=rank)

    assert out.shape == (2, width, heads, rank)
    for lane in range(2):
        want = dense_attention(q[lane], latents[lane], latents[lane][..., :rank], positions[lane], 0.3)
        np.testing.assert_allclose(out[lane], want, atol=ATOL)


@pytest.mark.parametrize(("width", "window", "latent"), [(1, None, False), (3, 6, False), (1, None, True)])
def test_kernels_read_what_the_decoder_gives_them(width, window, latent):
    """The arrays and pools of a decoder, through a kernel in the interpreter."""
    kv_lens, q_lens = np.array([23, 5, 0], np.int32), np.array([width, width, 0], np.int32)
    table, size = scattered_table(3, 24, 4)
    if latent:
        pool = MLATokenToKVPool.create(size, 4, 1, 12, 4, dtype=jnp.bfloat16, width=32)
        loc = np.concatenate([table[row + 1, :n] for row, n in enumerate(kv_lens)])
        values = np.random.default_rng(0).normal(size=(len(loc), 1, 16)).astype(np.float32)
        pool = pool.set_kv_buffer(0, loc, values)
    else:
        pool, _, _ = filled(table, size, 4, kv_lens, 2, 16, 8)
    rows = jnp.array([1, 2, 0], jnp.int32)
    prefix, new = jnp.asarray(kv_lens - q_lens), jnp.asarray(q_lens)
    batch, positions = Batch.create(jnp.asarray(table), rows, prefix, new, width, window=window)
    q = queries(batch, positions, 4, 16)

    def run(**how):
        def attend(q, pool, batch, positions):
            rank = 12 if latent else None
            return paged_attention(q, pool, 0, batch, positions, 0.3, latent_rank=rank, window=window, **how)

        return jax.jit(attend)(q, pool, batch, positions)

    want = run(implementation="xla")
    assert np.abs(want[:2]).min(axis=(1, 2)).max() > 1e-3
    np.testing.assert_allclose(run(implementation="pallas_triton", interpret=True), want, rtol=0, atol=ATOL)


def test_bfloat16_is_accumulated_in_float32():
    """300 equal values of 1 + 2**-7: a bfloat16 sum would stop growing at 256."""
    table, size = scattered_table(1, 304, 16)
    pool = MHATokenToKVPool.create(size, 16, 1, 1, 8, dtype=jnp.bfloat16)
    value = jnp.full((300, 1, 8), 1 + 2**-7, jnp.bfloat16)
    pool = pool.set_kv_buffer(0, table[1, :300], jnp.zeros_like(value), value)
    batch, positions = chunk(table, [300], [1])
    out = attend(jnp.ones((1, 1, 2, 8), jnp.bfloat16), pool, 0, batch, positions, 0.3)
    assert out.dtype == jnp.bfloat16
    assert np.array_equal(out, np.full(out.shape, 1 + 2**-7, out.dtype))


def test_mistakes_are_refused_with_a_reason():
    table, size = scattered_table(1, 8, 4)
    pool, _, _ = filled(table, size, 4, [8], 2, 8, 8)
    batch, positions = chunk(table, [8], [1])
    call = functools.partial(paged_attention, pool=pool, layer_id=0, batch=batch, positions=positions, scale=0.3)
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of xla"):
        call(q=queries(batch, positions, 4, 8), implementation="cudnn")
    with pytest.raises(ValueError, match="3 query heads do not divide into 2 KV heads"):
        call(q=queries(batch, positions, 3, 8))
    with pytest.raises(ValueError, match="head size 16, keys 8"):
        call(q=queries(batch, positions, 4, 16))
    with pytest.raises(ValueError, match="block must be at least 1"):
        call(q=queries(batch, positions, 4, 8), block=0)
