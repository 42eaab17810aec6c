"""MHATokenToKOnlyPool: keys without values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import MHATokenToKOnlyPool
from kvjax.pools.dtypes import SUPPORTED


def make(dtype=jnp.float32, **kwargs):
    return MHATokenToKOnlyPool.create(8, 4, 2, 1, 4, dtype=dtype, **kwargs)


def keys(n, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(n, 1, 4)).astype(dtype)


def test_bytes_are_sglangs():
    pool = make(jnp.float8_e4m3fn)
    assert pool.get_kv_size_bytes() == (96, 0)
    assert pool.nbytes == 96
    assert pool.bytes_per_token == 8


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_written_keys_read_back_in_their_layer_alone(dtype):
    k = keys(2, dtype=dtype)
    pool = make(dtype).set_k_buffer(1, [4, 11], k)
    read = pool.read(1, [[4], [11]])
    assert read.dtype == dtype
    assert read.shape == (2, 1, 1, 4)
    assert np.asarray(read).tobytes() == k.tobytes()
    assert pool.get_key_buffer(1) is pool.k[1]
    assert not pool.k[0].any()


def test_layer_ids_are_global():
    pool = make(start_layer=5)
    assert pool.set_k_buffer(6, [4], keys(1)).k[1].any()
    for wrong in (0, 1, 4, 7, -1):
        with pytest.raises(ValueError, match=rf"layer {wrong} .* 5 \.\. 6"):
            pool.set_k_buffer(wrong, [4], keys(1))


def test_padding_and_locations_outside_write_nothing():
    """B34, B36, B40"""
    pool = make().set_k_buffer(0, [11], keys(1))
    after = pool.set_k_buffer(0, [0, 12, -1, 0], np.full((4, 1, 4), np.nan, np.float32))
    assert (after.k[0] == pool.k[0]).all()


def test_fp8_keys_saturate():
    """B49"""
    k = np.asarray([500, -1e4, 465, 1e30], np.float32).reshape(1, 1, 4)
    read = make(jnp.float8_e4m3fn).set_k_buffer(0, [4], k).read(0, [4])
    assert read.astype(jnp.float32).ravel().tolist() == [448, -448, 448, 448]


def test_move_copies_slots_in_every_layer():
    pool = make(jnp.bfloat16).set_k_buffer(0, [4, 5], keys(2)).set_k_buffer(1, [4, 5], keys(2, seed=1))
    after = pool.move_kv_cache([5, 4, 6], [4, 5, 4])
    for layer in range(2):
        assert (np.asarray(after.k[layer])[[5, 4, 6]] == np.asarray(pool.k[layer])[[4, 5, 4]]).all()


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"k has shape \(1, 1, 4\).*\(2, 1, 4\)"):
        make().set_k_buffer(0, [4, 5], keys(1))
    with pytest.raises(ValueError, match="head_dim"):
        MHATokenToKOnlyPool.create(8, 4, 2, 1, 0)


def test_scan_writes_what_eager_writes():
    locs, ks = np.asarray([[4, 0], [5, 4]], np.int32), np.stack([keys(2), keys(2, seed=1)])
    scanned, _ = jax.lax.scan(lambda p, x: (p.set_k_buffer(0, *x), None), make(jnp.bfloat16), (locs, ks))
    eager = make(jnp.bfloat16).set_k_buffer(0, locs[0], ks[0]).set_k_buffer(0, locs[1], ks[1])
    assert (scanned.k[0] == eager.k[0]).all()
