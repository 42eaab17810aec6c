"""SWAKVPool: each layer writes and reads where its kind lives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import KVWriteLoc, SWAKVPool

FULL, SLIDING = (1, 4), (0, 2, 3)


def make(**kwargs):
    return SWAKVPool.create(16, 8, 4, FULL, SLIDING, 2, 8, dtype=jnp.float32, **kwargs)


def rows(n, heads=2, dim=8, start=1.0):
    return jnp.arange(n * heads * dim, dtype=jnp.float32).reshape(n, heads, dim) + start


@pytest.mark.parametrize("layer", range(5))
def test_a_write_goes_to_the_layers_own_pool_at_its_own_slots(layer):
    pool, k = make(), rows(2)
    where = KVWriteLoc([12, 13], swa_loc=[4, 5, 0], full_loc=[8, 9, 0])
    out = jax.jit(lambda p, w, k: p.set_kv_buffer(layer, w, k, -k))(pool, where, k)
    slots = [4, 5] if layer in SLIDING else [8, 9]
    got_k, got_v = out.read(layer, jnp.array(slots))
    assert (got_k == k).all()
    assert (got_v == -k).all()
    for other in range(5):
        leaf = out.get_key_buffer(other)
        assert leaf.shape == ((12, 2, 8) if other in SLIDING else (20, 2, 8))
        assert int(jnp.count_nonzero(leaf)) == (k.size if other == layer else 0)
    plain = pool.set_kv_buffer(layer, KVWriteLoc([12, 13], swa_loc=[4, 5]), k, k)
    assert (plain.read(layer, jnp.array([4, 5] if layer in SLIDING else [12, 13]))[0] == k).all()


def test_a_window_layer_refuses_a_write_without_window_slots():
    for where in (jnp.array([4, 5]), KVWriteLoc([4, 5]), KVWriteLoc([4, 5], full_loc=[4, 5])):
        with pytest.raises(ValueError, match="layer 2 slides, but the write has no swa_loc"):
            make().set_kv_buffer(2, where, rows(2), rows(2))
    make().set_kv_buffer(4, jnp.array([4, 5]), rows(2), rows(2))


@pytest.mark.parametrize("layer", [5, -1])
def test_an_unknown_layer_is_refused(layer):
    with pytest.raises(ValueError, match=r"neither pool|must be 0 or more"):
        make().read(layer, jnp.array([4]))


@pytest.mark.parametrize(("full", "sliding"), [((), ()), ((1, 1), ()), ((0, 1), (1,)), ((-1,), ())])
def test_layer_lists_must_name_each_layer_once(full, sliding):
    with pytest.raises(ValueError, match="every layer of the model once"):
        SWAKVPool.create(16, 8, 4, full, sliding, 2, 8)


def test_window_layers_may_have_other_heads():
    pool = make(swa_num_kv_heads=1, swa_head_dim=4, v_head_dim=6)
    assert pool.get_key_buffer(0).shape == (12, 1, 4)
    assert pool.get_value_buffer(0).shape == (12, 1, 4)
    assert pool.get_key_buffer(1).shape == (20, 2, 8)
    assert pool.get_value_buffer(1).shape == (20, 2, 6)
    assert pool.bytes_per_token == (2 * 2 * (8 + 6) * 4, 3 * 1 * (4 + 4) * 4)
    assert pool.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pool))


def test_a_model_whose_layers_all_slide_has_one_inner_pool():
    pool = SWAKVPool.create(0, 8, 4, (), (0, 1), 2, 8, dtype=jnp.float32)
    assert pool.sizes == (0, 8)
    assert pool.size == 8
    assert len(jax.tree.leaves(pool)) == 4


def test_moves_take_each_side_through_its_own_slots():
    pool, k = make(), rows(2)
    for layer in range(5):
        pool = pool.set_kv_buffer(layer, KVWriteLoc([4, 5], swa_loc=[8, 9]), k, k)
    moved = pool.move_kv_cache([16, 17], [4, 5], [4, 0], [8, 0])
    assert (moved.read(1, jnp.array([16, 17]))[0] == k).all()
    assert (moved.read(0, jnp.array([4]))[0] == k[:1]).all()
    np.testing.assert_array_equal(moved.read(0, jnp.array([5]))[0], 0)
    with pytest.raises(ValueError, match="swa_dst and swa_src"):
        pool.move_kv_cache([16], [4])


@pytest.mark.compiled
def test_a_donated_pool_is_written_in_place():
    pool = jax.eval_shape(lambda: SWAKVPool.create(4000, 2000, 4, FULL, SLIDING, 2, 64))
    where = KVWriteLoc(jax.ShapeDtypeStruct((4,), jnp.int32), swa_loc=jax.ShapeDtypeStruct((4,), jnp.int32))
    kv = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)

    def write(pool, where, k):
        for layer in range(5):
            pool = pool.set_kv_buffer(layer, where, k, k)
        return pool

    memory = jax.jit(write, donate_argnums=0).lower(pool, where, kv).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < min(leaf.size for leaf in jax.tree.leaves(pool))
