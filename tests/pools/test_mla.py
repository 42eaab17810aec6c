"""MLATokenToKVPool: the latent, its parts, and widths that are wider than it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import MLATokenToKVPool
from kvjax.pools.dtypes import SUPPORTED

SIZE, PAGE, RANK, ROPE = 8, 4, 8, 4
SLOTS = SIZE + PAGE


def make(dtype=jnp.float32, **kwargs):
    return MLATokenToKVPool.create(SIZE, PAGE, 2, RANK, ROPE, dtype=dtype, **kwargs)


def latents(n, seed=0, rank=RANK, rope=ROPE, dtype: Any = np.float32):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 1, rank)).astype(dtype), rng.normal(size=(n, 1, rope)).astype(dtype)


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_the_latent_is_nope_beside_rope_and_the_value_its_first_columns(dtype):
    nope, rope = latents(2, dtype=dtype)
    pool = make(dtype).set_mla_kv_buffer(1, [4, 11], nope, rope)
    k, v = pool.read(1, [4, 11])
    assert k.dtype == v.dtype == dtype
    assert np.asarray(k).tobytes() == np.concatenate([nope, rope], axis=-1).tobytes()
    assert np.asarray(v).tobytes() == nope.tobytes()
    got_nope, got_rope = pool.get_mla_kv_buffer(1, [4, 11])
    assert np.asarray(got_nope).tobytes() == nope.tobytes()
    assert np.asarray(got_rope).tobytes() == rope.tobytes()
    assert not pool.kv[0].any()
    assert (np.asarray(pool.kv[1]) != 0).any(axis=(1, 2)).nonzero()[0].tolist() == [4, 11]


def test_set_kv_buffer_stores_whole_latents_and_ignores_v():
    nope, rope = latents(2)
    whole = np.concatenate([nope, rope], axis=-1)
    want = make().set_mla_kv_buffer(0, [4, 5], nope, rope)
    for v in (None, np.full((7, 3), np.nan)):
        got = make().set_kv_buffer(0, [4, 5], whole, v)
        assert (got.kv[0] == want.kv[0]).all()
    with pytest.raises(TypeError, match="k_scale"):
        make().set_kv_buffer(0, [4, 5], whole, whole, k_scale=0.5)  # type: ignore[call-arg]


def test_parts_of_another_dtype_are_cast_and_fp8_saturates():
    nope, rope = latents(1)
    nope[0, 0, :3] = [500, -1e30, np.nan]
    pool = make(jnp.float8_e4m3fn).set_mla_kv_buffer(0, [4], nope, rope.astype(jnp.bfloat16))
    got_nope, got_rope = pool.get_mla_kv_buffer(0, [4], dst_dtype=jnp.float32)
    assert got_nope[0, 0, :2].tolist() == [448, -448]
    assert np.isnan(got_nope[0, 0, 2])
    assert got_rope is not None
    assert got_rope.dtype == jnp.float32
    assert (np.asarray(got_rope) == rope.astype(jnp.bfloat16).astype(jnp.float8_e4m3fn).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize(("rank", "rope", "width"), [(512, 64, 640), (512, 64, None), (40, 8, 128), (40, 8, None)])
def test_a_wider_row_keeps_its_pad_columns_zero_and_reads_narrow(dtype, rank, rope, width):
    """B79"""
    pool = MLATokenToKVPool.create(SIZE, PAGE, 1, rank, rope, dtype=dtype, width=width)
    stored = width or rank + rope
    assert pool.width == stored
    assert pool.kv_cache_dim == rank + rope
    item = jnp.dtype(dtype).itemsize
    assert pool.bytes_per_token == stored * item
    assert pool.get_kv_size_bytes() == (SLOTS * stored * item,)
    # Pad columns hold nothing but zeros, even where the row held something else before the write.
    dirty = jax.tree.map(lambda leaf: leaf.at[5].set(1), pool)
    nope, rest = latents(2, rank=rank, rope=rope, dtype=jnp.dtype(dtype))
    whole = np.concatenate([nope, rest], axis=-1)
    for after in (dirty.set_mla_kv_buffer(0, [4, 5], nope, rest), dirty.set_kv_buffer(0, [4, 5], whole)):
        assert not after.kv[0][:, :, rank + rope :].any()
        k, v = after.read(0, [[4], [5]])
        assert k.shape == (2, 1, 1, rank + rope)
        assert np.asarray(k).tobytes() == whole.tobytes()
        assert np.asarray(v).tobytes() == nope.tobytes()
        moved = after.move_kv_cache([9], [5])
        assert np.asarray(moved.read(0, [9])[0]).tobytes() == whole[1:].tobytes()
        assert not moved.kv[0][:, :, rank + rope :].any()


def test_pad_columns_add_nothing_to_scores_of_a_padded_query():
    """B79"""
    nope, rope = latents(3)
    query = np.random.default_rng(1).normal(size=(RANK + ROPE,)).astype(np.float32)
    wide = make(width=128).set_mla_kv_buffer(0, [4, 5, 6], nope, rope)
    padded_query = np.pad(query, (0, 128 - query.size), constant_values=7.0)
    scores = jnp.asarray(wide.get_key_buffer(0))[4:7, 0] @ padded_query
    assert np.allclose(scores, wide.read(0, [4, 5, 6])[0][:, 0] @ query, rtol=1e-6)


def test_a_latent_without_rope_has_one_part():
    pool = MLATokenToKVPool.create(SIZE, PAGE, 1, RANK, 0, dtype=jnp.float32)
    nope, _ = latents(1)
    pool = pool.set_mla_kv_buffer(0, [4], nope)
    got, rope = pool.get_mla_kv_buffer(0, [4])
    assert (got == nope).all()
    assert rope is None


def test_padding_and_locations_outside_write_nothing():
    """B34, B36, B40, B41"""
    nope, rope = latents(6)
    bad = [0, 12, -1, 2**31 - 1, -(2**31), 0]
    pool = make(width=16).set_mla_kv_buffer(0, [11], *latents(1))
    after = pool.set_mla_kv_buffer(0, bad, np.full_like(nope, np.nan), rope)
    assert (after.kv[0] == pool.kv[0]).all()
    assert not after.read(0, bad)[0].any()


def test_move_reads_every_source_before_it_writes_any_target():
    nope, rope = latents(3)
    pool = make(jnp.bfloat16).set_mla_kv_buffer(1, [4, 5, 6], nope, rope)
    after = pool.move_kv_cache([5, 6, 4, 0, 7], [4, 5, 6, 4, 0])
    assert (np.asarray(after.kv[1])[[5, 6, 4]] == np.asarray(pool.kv[1])[[4, 5, 6]]).all()
    assert not after.kv[1][0].any()
    assert not after.kv[1][7].any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"width": 11}, r"width 11 is too narrow for a latent of 8 \+ 4 = 12"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim must be at least 1, got -1"),
        ({"size": 0}, "size"),
        ({"dtype": "int4"}, "pools hold"),
    ],
)
def test_sizes_that_make_no_pool_are_refused(kwargs, message):
    good = {"size": 8, "page_size": 4, "num_layers": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    with pytest.raises(ValueError, match=message):
        MLATokenToKVPool.create(**(good | kwargs))


def test_parts_that_do_not_fit_are_refused_by_name():
    nope, rope = latents(2)
    pool = make(start_layer=7)
    with pytest.raises(ValueError, match=r"k_rope has shape \(1, 1, 4\)"):
        pool.set_mla_kv_buffer(7, [4, 5], nope, rope[:1])
    with pytest.raises(ValueError, match=r"k_nope has shape \(2, 1, 4\)"):
        pool.set_mla_kv_buffer(7, [4, 5], rope, rope)
    with pytest.raises(ValueError, match=r"k has shape \(2, 1, 8\)"):
        pool.set_kv_buffer(7, [4, 5], nope)
    with pytest.raises(ValueError, match=r"k_rope is missing"):
        pool.set_mla_kv_buffer(7, [4, 5], nope)
    for wrong in (0, 6, 9, -1):
        with pytest.raises(ValueError, match=rf"layer {wrong} .* 7 \.\. 8"):
            pool.set_mla_kv_buffer(wrong, [4, 5], nope, rope)


def test_scan_and_vmap_agree_with_eager_bit_for_bit():
    locs = np.asarray([[4, 5], [5, 6], [0, 11]], np.int32)
    nopes, ropes = (np.stack(x) for x in zip(*(latents(2, seed=i) for i in range(3)), strict=True))

    def step(pool, xs):
        return pool.set_mla_kv_buffer(1, *xs).move_kv_cache(xs[0], xs[0][::-1]), None

    eager = make(jnp.bfloat16, width=16)
    for i in range(3):
        eager, _ = step(eager, (jnp.asarray(locs[i]), nopes[i], ropes[i]))
    scanned, _ = jax.lax.scan(step, make(jnp.bfloat16, width=16), (locs, nopes, ropes))
    assert (scanned.kv[1] == eager.kv[1]).all()
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), make(jnp.bfloat16, width=16))
    both, _ = jax.vmap(step)(pair, (locs[:2], nopes[:2], ropes[:2]))
    one, _ = step(make(jnp.bfloat16, width=16), (jnp.asarray(locs[1]), nopes[1], ropes[1]))
    assert (both.kv[1][1] == one.kv[1]).all()
    assert both.width == 16
