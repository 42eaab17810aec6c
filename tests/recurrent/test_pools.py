"""MambaPool, ShortConvPool, NGramPool and HybridLinearKVPool: storage, bytes, siblings, bad input."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from kvjax.recurrent import HybridLinearKVPool, MambaPool, NGramPool, ShortConvPool

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]


def pool_of(siblings=True, **kwargs):
    pool = MambaPool.create(4, [1, 5], [(3, 2), (4,)], (2, 3), **kwargs)
    if siblings:
        pool = pool.register_slot_state(ShortConvPool.create(4, 2, (3,)))
        pool = pool.register_slot_state(NGramPool.create(4, 3, 9))
    return pool


def filled(pool, value):
    """Every leaf of every slot but the sink holds `value`."""
    slots = jnp.arange(1, 5)

    def values(*shape):
        return jnp.full((4, *shape), value, jnp.float32)

    for layer in pool.layer_ids:
        pool = pool.write(layer, slots, [values(3, 2), values(4)], values(2, 3))
    members = list(pool.members())
    for i, member in enumerate(members):
        if isinstance(member, ShortConvPool):
            members[i] = member.write(0, slots, values(3)).write(1, slots, values(3))
        if isinstance(member, NGramPool):
            members[i] = member.set_context(slots, jnp.full((4, 3), int(value), jnp.int32))
    return pool.with_members(members)


def rows(pool):
    """f32[leaves of all members, slots]: the sum of each slot's row, in the logical dtype."""
    out = []
    slots = jnp.arange(5)
    for layer in pool.layer_ids:
        conv, temporal = pool.read(layer, slots)
        out += [*conv, temporal]
    for member in pool.siblings:
        if isinstance(member, ShortConvPool):
            out += [member.read(0, slots), member.read(1, slots)]
        else:
            out.append(member.get_context(slots))
    return np.stack([np.asarray(x, np.float32).reshape(5, -1).mean(1) for x in out])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_back_bit_for_bit(dtype):
    pool = pool_of(siblings=False, conv_dtype=dtype, temporal_dtype=dtype)
    conv = [jnp.arange(12.0).reshape(2, 3, 2) / 3, jnp.arange(8.0).reshape(2, 4) / 7]
    temporal = jnp.arange(12.0).reshape(2, 2, 3) / 5
    pool = pool.write(5, [3, 1], conv, temporal)
    got, state = pool.read(5, [1, 3, 2, 0])
    for wrote, read in zip([*conv, temporal], [*got, state], strict=True):
        assert read.dtype == dtype
        np.testing.assert_array_equal(read[:2], wrote[::-1].astype(dtype))
        assert not np.asarray(read[2:], np.float32).any()
    assert not np.asarray(pool.read(1, [1, 2, 3, 4])[1], np.float32).any(), "the other layer"
    assert np.dtype(pool.conv[0][0].dtype).kind == ("u" if dtype in (jnp.bfloat16, jnp.float8_e4m3fn) else "f")


def test_the_sink_and_slots_outside_are_never_written():
    pool = filled(pool_of(), 2.0)
    spoil = [jnp.full((4, 3, 2), 7.0), jnp.full((4, 4), 7.0)], jnp.full((4, 2, 3), 7.0)
    after = pool.write(1, [0, 5, -1, 2**31 - 1], *spoil)
    for before, now in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)
    assert rows(after.clear_slots([0, 5, -1]))[:, 1:].min() == 2.0
    after = after.copy_from([0, 1, 9, 2], [3, 0, 4, -1])
    for before, now in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)


def test_siblings_ride_along_on_clear_copy_and_hand_over():
    pool = filled(pool_of(), 2.0).clear_slots([2])
    seen = rows(pool)
    assert (seen[:, [1, 3, 4]] == 2).all()
    assert (seen[:-1, 2] == 0).all()
    assert seen[-1, 2] == 9, "a token context is reset to the eos id"
    pool = pool.copy_from([2, 1], [3, 2])  # every source is read before any target is written
    assert rows(pool)[:, 3].tolist() == [0.0] * 8 + [9.0]
    assert (rows(pool)[:, 2] == 2).all()
    pool = pool.hand_over(jnp.array([1, 4, 0]), jnp.array([3, 0, 2]))
    assert rows(pool)[:, 1].tolist() == rows(pool)[:, 4].tolist() == [0.0] * 8 + [9.0]


def test_a_host_round_trip_carries_every_state_into_other_slots():
    pool = filled(pool_of(), 2.0).clear_slots([2])
    copy = pool.get_cpu_copy([2, 3])
    assert [len(part) for part in copy] == [6, 2, 1]
    assert all(isinstance(array, np.ndarray) for part in copy for array in part)
    back = filled(pool_of(), 5.0).load_cpu_copy(copy, [4, 1])
    assert rows(back)[:, 4].tolist() == [0.0] * 8 + [9.0]
    assert (rows(back)[:, 1] == 2).all()
    assert (rows(back)[:, [2, 3]] == 5).all()
    with pytest.raises(ValueError, match="the copy holds 3 states but this pool has 1"):
        pool_of(siblings=False).load_cpu_copy(copy, [4, 1])
    with pytest.raises(ValueError, match=r"2 slots.*1 slots|1 slots of this state"):
        pool.load_cpu_copy(copy, [4])


def test_disabled_siblings_cost_nothing():
    pool, conv, context = pool_of(siblings=False), ShortConvPool.create(4, 0, (3,)), NGramPool.create(4, 0, 9)
    assert [conv.enabled, context.enabled, ShortConvPool.create(4, 2, None).enabled] == [False] * 3
    assert (conv.nbytes, context.nbytes) == (0, 0)
    assert jax.tree.leaves((conv, context)) == []
    same = pool.register_slot_state(conv).register_slot_state(context)
    assert jax.tree.structure(same) == jax.tree.structure(pool)
    with pytest.raises(ValueError, match="is disabled"):
        conv.layer_cache(0)
    with pytest.raises(ValueError, match="is disabled"):
        context.get_context([1])


def test_bytes_are_those_of_the_leaves():
    pool = pool_of(draft_rows=2, draft_tokens=3, conv_dtype=jnp.bfloat16)
    assert pool.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    per_slot = 2 * ((6 + 4) * 2 + 6 * 4) + 2 * 3 * 2 + 3 * 4
    assert pool.bytes_per_slot == per_slot
    drafts = sum(leaf.nbytes for leaf in jax.tree.leaves(pool.drafts))
    assert pool.nbytes == 5 * per_slot + drafts
    assert pool.drafts.conv[0][0].shape == (3, 3, 3 + 2 - 1)
    assert pool.drafts.temporal[0].shape == (3, 3, 2, 3)


def test_the_state_after_the_accepted_draft_tokens_is_committed():
    pool = filled(MambaPool.create(4, [1, 5], [(3, 2), (4,)], (2, 3), draft_rows=2, draft_tokens=3), 2.0)
    wide = [jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(12.0).reshape(2, 6)]
    states = jnp.arange(36.0).reshape(2, 3, 2, 3)
    pool = pool.write_drafts(5, [1, 2], wide, states).commit_drafts([3, 4, 1, 0], [1, 2, 2, 1], [2, 3, 0, 1])
    conv, temporal = pool.read(5, [3, 4, 1, 0])
    np.testing.assert_array_equal(conv[0][:2], jnp.stack([wide[0][0, :, 1:3], wide[0][1, :, 2:4]]))
    np.testing.assert_array_equal(conv[1][:2], jnp.stack([wide[1][0, 1:5], wide[1][1, 2:6]]))
    np.testing.assert_array_equal(temporal[:2], jnp.stack([states[0, 1], states[1, 2]]))
    assert (np.asarray(temporal[2]) == 2).all(), "none accepted: the slot stays"
    assert not np.asarray(temporal[3]).any()
    after = pool.commit_drafts([3, 4, 2], [3, 1, -1], [1, 4, 1])  # no such row, more than the drafts, no such row
    np.testing.assert_array_equal(after.read(5, [3, 4, 2])[1], pool.read(5, [3, 4, 2])[1])


def test_layers_are_global_and_sparse():
    pool = pool_of()
    assert pool.mamba_map == {1: 0, 5: 1}
    with pytest.raises(ValueError, match="layer 2 has no recurrent state in this pool, which holds layers 1, 5"):
        pool.read(2, [1])
    with pytest.raises(ValueError, match="layer 0 has no recurrent state"):
        pool.write(0, [1], [], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"layer_ids": []}, "at least one, got"),
        ({"layer_ids": [2, 2]}, r"must ascend and name each layer once, got \(2, 2\)"),
        ({"layer_ids": 3}, "must be a list of layer ids, got 3"),
        ({"conv_shapes": [], "temporal_shape": None}, "needs a state"),
        ({"conv_shapes": [(3, 0)]}, r"conv_shapes\[0\]\[1\] must be at least 1, got 0"),
        ({"temporal_shape": ()}, r"temporal_shape is \(\)"),
        ({"conv_dtype": jnp.int32}, "pools hold float32"),
        ({"temporal_store_dtype": jnp.uint8}, "cannot hold float32"),
        ({"draft_rows": 2}, "draft_tokens must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_named(change, message):
    good = {"size": 4, "layer_ids": [1], "conv_shapes": [(3, 2)], "temporal_shape": (2,)}
    with pytest.raises(ValueError, match=message):
        MambaPool.create(**(good | change))


def test_bad_states_and_siblings_are_named():
    pool = pool_of(siblings=False)
    with pytest.raises(ValueError, match="1 convolution states and no temporal state came, but this pool holds 2"):
        pool.write(1, [1], [jnp.zeros((1, 3, 2))])
    with pytest.raises(ValueError, match=r"shape \(1, 2, 3\), but 1 slots of this state need \(1, 3, 2\)"):
        pool.write(1, [1], [jnp.zeros((1, 2, 3)), jnp.zeros((1, 4))], jnp.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="must be floating, got int32"):
        pool.write(1, [1], [jnp.zeros((1, 3, 2), jnp.int32), jnp.zeros((1, 4))], jnp.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="NGramPool has 3 slots but the pool has 4"):
        pool.register_slot_state(NGramPool.create(3, 2, 1))
    with pytest.raises(ValueError, match="no intermediate states"):
        pool.commit_drafts([1], [1], [1])
    with pytest.raises(ValueError, match="eos_id must be a token id from 0"):
        NGramPool.create(3, 2, -1)
    with pytest.raises(ValueError, match=r"tokens \(1, 3\) must be \[slots, length\] = \(1, 2\)"):
        NGramPool.create(3, 2, 1).set_context([1], jnp.zeros((1, 3), jnp.int32))


# HybridLinearKVPool


def hybrid(ids=(3, 7), **kwargs):
    kv = MHATokenToKVPool.create(8, 4, len(ids), 2, 4, dtype=jnp.float32, **kwargs)
    return HybridLinearKVPool.create(kv, pool_of(siblings=False), ids)


def test_attention_layers_are_mapped_to_a_dense_pool():
    pool = hybrid()
    assert pool.full_attention_layer_id_mapping == {3: 0, 7: 1}
    k = jnp.ones((2, 2, 4))
    pool = pool.set_kv_buffer(7, jnp.array([4, 5]), k, 2 * k).move_kv_cache([6], [5])
    np.testing.assert_array_equal(pool.full_kv_pool.k[1][jnp.array([4, 5, 6])], jnp.ones((3, 2, 4)))
    np.testing.assert_array_equal(pool.read(7, jnp.array([6]))[1], 2 * k[:1])
    assert not np.asarray(pool.read(3, jnp.array([4]))[0]).any()
    assert pool.get_kv_buffer(3)[1] is pool.full_kv_pool.v[0]
    assert pool.bytes_per_token == 2 * 2 * 2 * 4 * 4, "recurrent layers cost nothing per token"
    assert pool.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pool))


def test_a_layer_may_attend_and_have_a_state():
    pool = hybrid(ids=(1, 5))
    pool = pool.set_kv_buffer(5, jnp.array([4]), jnp.ones((1, 2, 4)), jnp.ones((1, 2, 4)))
    pool = pool.write_state(5, jnp.array([2]), [jnp.ones((1, 3, 2)), jnp.ones((1, 4))], jnp.ones((1, 2, 3)))
    assert np.asarray(pool.read(5, jnp.array([4]))[0]).all()
    assert np.asarray(pool.read_state(5, jnp.array([2]))[1]).all()


@pytest.mark.parametrize("layer", [0, 1, 4, -1, 8])
def test_unknown_layers_are_errors(layer):
    pool, loc, k = hybrid(), jnp.array([4]), jnp.zeros((1, 2, 4))
    for call in (
        lambda: pool.read(layer, loc),
        lambda: pool.set_kv_buffer(layer, loc, k, k),
        lambda: pool.get_key_buffer(layer),
    ):
        with pytest.raises(ValueError, match=f"layer {layer} is no full-attention layer .* holds layers 3, 7"):
            call()


def test_the_parts_of_a_hybrid_pool_have_to_fit():
    kv, mamba = MHATokenToKVPool.create(8, 4, 2, 2, 4), pool_of(siblings=False)
    with pytest.raises(ValueError, match=r"3 attention layers \(1, 2, 3\) need a KV pool of 3 layers"):
        HybridLinearKVPool.create(kv, mamba, [1, 2, 3])
    with pytest.raises(ValueError, match="ascending layer ids"):
        HybridLinearKVPool.create(kv, mamba, [3, 1])
    with pytest.raises(ValueError, match="from layer 2"):
        HybridLinearKVPool.create(MHATokenToKVPool.create(8, 4, 2, 2, 4, start_layer=2), mamba, [2, 3])
    with pytest.raises(ValueError, match="MHA or MLA pool and a MambaPool, got MambaPool and MambaPool"):
        HybridLinearKVPool.create(mamba, mamba, [1])
    latent = HybridLinearKVPool.create(MLATokenToKVPool.create(8, 4, 1, 4, 2), mamba, [2])
    with pytest.raises(ValueError, match="holds a MLATokenToKVPool"):
        latent.get_value_buffer(2)
    with pytest.raises(ValueError, match="holds a MHATokenToKVPool"):
        hybrid().set_mla_kv_buffer(3, jnp.array([4]), jnp.zeros((1, 1, 4)))
