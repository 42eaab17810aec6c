"""KVWriteLoc: cutting, the physical door, and its life as a pytree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import (
    KVWriteLoc,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    unwrap_loc,
    write_loc_is_physical,
)


def test_longer_translations_are_cut_to_the_length_of_loc():
    target = KVWriteLoc([4, 5, 6], swa_loc=[1, 2, 3, 0, 0], full_loc=np.arange(7))
    assert target.loc.tolist() == [4, 5, 6]
    assert target.swa_loc.tolist() == [1, 2, 3]
    assert target.full_loc.tolist() == [0, 1, 2]
    assert {a.dtype for a in (target.loc, target.swa_loc, target.full_loc)} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize("name", ["swa_loc", "full_loc"])
def test_a_shorter_translation_is_refused_with_both_lengths(name):
    with pytest.raises(ValueError, match=rf"{name} has 2 entries but loc has 3"):
        KVWriteLoc([4, 5, 6], **{name: [1, 2]})  # type: ignore[arg-type]


def test_cutting_works_inside_jit():
    cut = jax.jit(lambda loc, swa: KVWriteLoc(loc, swa_loc=swa))(jnp.arange(3), jnp.arange(5))
    assert cut.swa_loc.tolist() == [0, 1, 2]


def test_locations_past_int32_are_refused_not_cut():
    """B47"""
    with pytest.raises(ValueError, match="4294967301"):
        KVWriteLoc(np.asarray([2**32 + 5], np.int64))
    with pytest.raises(ValueError, match="4294967301"):
        KVWriteLoc([1], swa_loc=[2**32 + 5])


@pytest.mark.parametrize(("loc", "message"), [([[1]], "rank 1"), ([1.0], "int32")])
def test_locations_of_another_rank_or_dtype_are_refused(loc, message):
    with pytest.raises(ValueError, match=message):
        KVWriteLoc(np.asarray(loc))


def test_it_is_a_pytree_whose_physical_flag_is_static():
    target = KVWriteLoc([1, 2], swa_loc=[3, 4], physical=True)
    leaves, treedef = jax.tree.flatten(target)
    assert len(leaves) == 2
    again = jax.tree.unflatten(treedef, leaves)
    assert again.physical
    assert again.full_loc is None
    assert jax.tree.structure(KVWriteLoc([1, 2], swa_loc=[3, 4])) != treedef
    out = jax.jit(lambda t: t)(target)
    assert out.physical
    assert out.swa_loc.tolist() == [3, 4]
    doubled = jax.vmap(lambda t: jax.tree.map(lambda x: 2 * x, t))(jax.tree.map(lambda x: jnp.stack([x, x]), target))
    assert doubled.loc.tolist() == [[2, 4], [2, 4]]


def test_placeholders_pass_through_tree_operations():
    axes = jax.tree.map(lambda _: 0, KVWriteLoc([1, 2], swa_loc=[3, 4]))
    batched = jax.tree.map(lambda x: jnp.stack([x, x + 1]), KVWriteLoc([1, 2], swa_loc=[3, 4]))
    total = jax.vmap(lambda t: t.loc.sum() + t.swa_loc.sum(), in_axes=(axes,))(batched)
    assert total.tolist() == [10, 14]
    shapes = jax.eval_shape(lambda: KVWriteLoc(jnp.arange(3), swa_loc=jnp.arange(4)))
    assert shapes.swa_loc.shape == (3,)


def test_unwrap_gives_the_parts_and_none_for_a_bare_array():
    loc = jnp.arange(3)
    assert unwrap_loc(loc) == (loc, None, None)
    parts = unwrap_loc(KVWriteLoc(loc, swa_loc=[7, 8, 9]))
    assert parts[1].tolist() == [7, 8, 9]
    assert parts[2] is None


def test_only_a_flagged_write_loc_is_physical():
    assert write_loc_is_physical(KVWriteLoc([1], physical=True))
    assert not write_loc_is_physical(KVWriteLoc([1]))
    assert not write_loc_is_physical(jnp.arange(3))


def writes():
    kv, latent = np.ones((2, 1, 4), np.float32), np.ones((2, 1, 6), np.float32)
    mha = MHATokenToKVPool.create(8, 4, 1, 1, 4, dtype=jnp.float32)
    mla = MLATokenToKVPool.create(8, 4, 1, 4, 2, dtype=jnp.float32)
    k_only = MHATokenToKOnlyPool.create(8, 4, 1, 1, 4, dtype=jnp.float32)
    return {
        "set_kv_buffer": (mha, lambda p, loc: p.set_kv_buffer(0, loc, kv, kv)),
        "set_kv_buffer latent": (mla, lambda p, loc: p.set_kv_buffer(0, loc, latent)),
        "set_mla_kv_buffer": (mla, lambda p, loc: p.set_mla_kv_buffer(0, loc, latent[..., :4], latent[..., 4:])),
        "set_k_buffer": (k_only, lambda p, loc: p.set_k_buffer(0, loc, kv)),
    }


@pytest.mark.parametrize("call", writes())
def test_a_pool_that_requires_physical_locations_refuses_others_by_the_calls_name(call):
    pool, write = writes()[call]
    loc = jnp.asarray([4, 5])
    want = write(pool, KVWriteLoc(loc))  # no door by default
    guarded = dataclasses.replace(pool, requires_physical_write_loc=True)
    for refused, said in ((loc, "a bare"), (KVWriteLoc(loc), r"physical=False")):
        with pytest.raises(ValueError, match=rf"^{call.split()[0]} writes .*{said}"):
            write(guarded, refused)
    stored = jax.jit(write)(guarded, KVWriteLoc(loc, physical=True))
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(want), strict=True):
        assert (a == b).all()
