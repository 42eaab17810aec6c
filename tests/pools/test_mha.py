"""MHATokenToKVPool: what a write changes, what it leaves, what a read gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import KVWriteLoc, MHATokenToKVPool
from kvjax.pools.dtypes import SUPPORTED
from pallas_kernels.kv_write import reference

SIZE, PAGE, LAYERS, HEADS, DIM, V_DIM = 8, 4, 2, 2, 4, 6
SLOTS = SIZE + PAGE


def make(dtype=jnp.float32, **kwargs):
    return MHATokenToKVPool.create(SIZE, PAGE, LAYERS, HEADS, DIM, V_DIM, dtype=dtype, **kwargs)


def tokens(n, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, HEADS, DIM)).astype(dtype), rng.normal(size=(n, HEADS, V_DIM)).astype(dtype)


def filled(dtype=jnp.float32, **kwargs):
    """A pool whose every writable slot holds something."""
    pool = make(dtype, **kwargs)
    for i in range(LAYERS):
        pool = pool.set_kv_buffer(pool.start_layer + i, np.arange(1, SLOTS), *tokens(SLOTS - 1, seed=i))
    return pool


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Shapes, bytes, construction.


def test_shapes_and_bytes_are_sglangs():
    pool = MHATokenToKVPool.create(8, 4, 1, 2, 4, 6, dtype=jnp.bfloat16)
    assert pool.k[0].shape == (12, 2, 4)
    assert pool.v[0].shape == (12, 2, 6)
    assert pool.get_kv_size_bytes() == (192, 288)
    assert make().v[1].shape == (SLOTS, HEADS, V_DIM)
    assert MHATokenToKVPool.create(9, 4, 1, 1, 2).k[0].shape == (13, 1, 2)


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_byte_counts_are_python_ints_and_equal_the_sum_of_the_leaves(dtype):
    pool = make(dtype)
    assert pool.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == sum(pool.get_kv_size_bytes())
    assert pool.bytes_per_token == pool.nbytes // pool.slots == LAYERS * HEADS * (DIM + V_DIM) * dtype.itemsize
    assert {type(pool.nbytes), type(pool.bytes_per_token), *map(type, pool.get_kv_size_bytes())} == {int}


def test_bytes_of_a_pool_too_large_for_int32_arithmetic_are_exact_without_memory():
    """B47, B45: 80 GiB at 1152 bytes a token, 4.3e10 elements a leaf."""
    pool = jax.eval_shape(lambda: MHATokenToKVPool.create(74_565_404, 4, 1, 1, 288, dtype=jnp.bfloat16))
    assert pool.bytes_per_token == 1152
    assert pool.nbytes == (74_565_404 + 4) * 1152
    assert pool.slots == 74_565_408


def test_every_leaf_is_a_buffer_of_its_own():
    pool = make()
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)}
    assert len(pointers) == 2 * LAYERS


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"page_size": -4}, "page_size must be at least 1, got -4"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"v_head_dim": 0}, "v_head_dim must be at least 1"),
        ({"head_dim": 4.0}, "head_dim must be a whole number"),
        ({"size": 2**31 - 4}, "2147483648 slots"),
        ({"dtype": "int8"}, "int8"),
        ({"store_dtype": "uint8"}, "uint8 .* cannot hold bfloat16"),
        ({"start_layer": -1}, "start_layer must be 0 or more, got -1"),
    ],
)
def test_sizes_and_dtypes_that_make_no_pool_are_refused(kwargs, message):
    good = {"size": 8, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4}
    with pytest.raises(ValueError, match=message):
        MHATokenToKVPool.create(**(good | kwargs))


# Writes.


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_written_rows_read_back_and_everything_else_keeps_its_bytes(dtype):
    pool = filled(dtype)
    loc = np.asarray([7, 4, 11])
    k, v = tokens(3, seed=9, dtype=dtype)
    after = pool.set_kv_buffer(1, loc, k, v)
    read_k, read_v = after.read(1, loc)
    assert read_k.dtype == read_v.dtype == dtype
    assert np.asarray(read_k).tobytes() == k.tobytes()
    assert np.asarray(read_v).tobytes() == v.tobytes()
    others = np.setdiff1d(np.arange(SLOTS), loc)
    for before, now in ((pool.k[1], after.k[1]), (pool.v[1], after.v[1])):
        assert np.asarray(before)[others].tobytes() == np.asarray(now)[others].tobytes()
    assert after.k[0] is pool.k[0]
    assert after.v[0] is pool.v[0]


@pytest.mark.parametrize("wrong", [12, 13, 2**31 - 1, -1, -8, -12, -(2**31)])
def test_a_write_outside_the_pool_changes_nothing(wrong):
    """B34, B36: no clamp to the last slot, no wrap from its end."""
    pool = filled()
    k, v = tokens(3, seed=5)
    assert_same(pool.set_kv_buffer(0, [wrong] * 3, k, v), pool)
    after = pool.set_kv_buffer(0, [4, wrong, wrong], k, v)
    assert_same(after, pool.set_kv_buffer(0, [4], k[:1], v[:1]))
    assert (np.asarray(after.k[0])[11] == np.asarray(pool.k[0])[11]).all()


def test_the_last_slot_of_the_pool_is_written():
    """B34"""
    k, v = tokens(1)
    after = make().set_kv_buffer(0, [SLOTS - 1], k, v)
    assert (np.asarray(after.k[0])[SLOTS - 1] == k[0]).all()


def test_padded_lanes_write_nothing_so_slot_0_stays_zero():
    """B40, B41: NaN in padded lanes reaches no slot, first or last of several."""
    k, v = tokens(4)
    k[[0, 2, 3]] = v[[0, 2, 3]] = np.nan
    after = filled().set_kv_buffer(0, [0, 5, 0, 0], k, v)
    assert not after.k[0][0].any()
    assert not after.v[0][0].any()
    assert not np.isnan(after.k[0]).any()
    assert not np.isnan(after.v[0]).any()


def test_slots_of_page_0_beyond_the_first_are_written_as_sglang_does():
    k, v = tokens(1)
    assert (make().set_kv_buffer(0, [1], k, v).k[0][1] == k[0]).all()


def test_an_empty_write_is_no_change():
    pool = filled()
    assert_same(pool.set_kv_buffer(0, [], *tokens(0)), pool)


def test_a_write_loc_writes_like_its_plain_locations():
    k, v = tokens(2)
    target = KVWriteLoc([4, 5], swa_loc=[1, 1, 1], full_loc=[2, 2])
    assert_same(make().set_kv_buffer(0, target, k, v), make().set_kv_buffer(0, [4, 5], k, v))


def test_layer_ids_are_global_and_never_wrap():
    pool = make(start_layer=3)
    k, v = tokens(1)
    after = pool.set_kv_buffer(np.int64(4), [4], k, v)  # type: ignore[arg-type]
    assert after.k[1].any()
    assert not after.k[0].any()
    for wrong in (2, 5, 0, -1):
        for call in (
            lambda at: pool.set_kv_buffer(at, [4], k, v),
            lambda at: pool.set_kv_buffer_prefix_valid(at, [[4]], [1], k, v),
            lambda at: pool.read(at, [4]),
            pool.get_key_buffer,
            pool.get_value_buffer,
            pool.get_kv_buffer,
        ):
            with pytest.raises(ValueError, match=rf"layer {wrong} .* layers 3 \.\. 4"):
                call(wrong)
    with pytest.raises(ValueError, match="unroll"):
        jax.jit(lambda p, at: p.read(at, [4]))(pool, 3)


@pytest.mark.parametrize(
    ("loc", "k_shape", "v_shape", "message"),
    [
        ([4, 5], (3, 2, 4), (2, 2, 6), r"k has shape \(3, 2, 4\).*\(2, 2, 4\)"),
        ([4, 5], (2, 2, 4), (1, 2, 6), r"v has shape \(1, 2, 6\).*\(2, 2, 6\)"),
        ([4, 5], (2, 2, 6), (2, 2, 6), r"k has shape \(2, 2, 6\)"),
        ([4, 5], (2, 1, 4), (2, 2, 6), r"k has shape \(2, 1, 4\)"),
        ([4, 5], (2, 8), (2, 2, 6), r"k has shape \(2, 8\)"),
        ([[4, 5]], (2, 2, 4), (2, 2, 6), "loc must have rank 1"),
        (4, (1, 2, 4), (1, 2, 6), "loc must have rank 1"),
        ([4.0, 5.0], (2, 2, 4), (2, 2, 6), "loc must be int32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both(loc, k_shape, v_shape, message):
    with pytest.raises(ValueError, match=message):
        make().set_kv_buffer(0, np.asarray(loc), np.zeros(k_shape, np.float32), np.zeros(v_shape, np.float32))


def test_stored_integers_are_not_taken_for_values():
    k, v = tokens(1)
    with pytest.raises(ValueError, match="k must be floating, got uint16"):
        make(jnp.bfloat16).set_kv_buffer(0, [4], jnp.asarray(k, jnp.uint16), v)


def test_ids_past_int32_are_refused_not_cut():
    """B47"""
    k, v = tokens(1)
    for call in (
        lambda loc: make().set_kv_buffer(0, loc, k, v),
        lambda loc: make().read(0, loc),
        lambda loc: make().move_kv_cache(loc, [4]),
    ):
        with pytest.raises(ValueError, match="4294967301"):
            call(np.asarray([2**32 + 5], np.int64))


# Scales.


def test_scales_divide_input_of_another_dtype_and_fp8_saturates():
    """The worked numbers of the behaviour reference."""
    pool = MHATokenToKVPool.create(8, 4, 1, 1, 8, dtype=jnp.float8_e4m3fn)
    row = np.asarray([1, 2, 3, 4, 500, -500, 600, 0.3], np.float32).reshape(1, 1, 8)
    k, v = pool.set_kv_buffer(0, [4], row, row, k_scale=2).read(0, [4])
    assert k.astype(jnp.float32).ravel().tolist() == [0.5, 1, 1.5, 2, 256, -256, 288, 0.15625]
    assert v.astype(jnp.float32).ravel().tolist()[4:7] == [448, -448, 448]
    assert row[0, 0, 0] == 1, "the caller's array is not changed"


@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
def test_a_scale_reaches_the_stored_bytes(source):
    """B51"""
    pool = MHATokenToKVPool.create(8, 4, 1, 1, 8, dtype=jnp.float8_e4m3fn)
    row = jnp.asarray([20, 30, 1.7, -0.3, 5, -22, 0.06, 9], source).reshape(1, 1, 8)
    scaled = pool.set_kv_buffer(0, [4], row, row, k_scale=0.05, v_scale=jnp.float32(0.05))
    plain = pool.set_kv_buffer(0, [4], row, row)
    assert (scaled.k[0][4] != plain.k[0][4]).all()
    k, v = (x.astype(jnp.float32).ravel() * 0.05 for x in scaled.read(0, [4]))
    assert (k == v).all()
    kept = np.asarray([0, 2, 3, 4, 5, 6, 7])
    assert np.allclose(k[kept], row.astype(jnp.float32).ravel()[kept], rtol=0.07)
    assert k[1] == pytest.approx(22.4), "30 clips at 448 * 0.05"


def test_input_of_the_pools_dtype_ignores_both_scales_by_ks_dtype_alone():
    pool = make(jnp.bfloat16)
    k, v = tokens(1, dtype=jnp.bfloat16)
    wide_k, wide_v = k.astype(np.float32), v.astype(np.float32)
    assert_same(pool.set_kv_buffer(0, [4], k, v, 0.37, 3.0), pool.set_kv_buffer(0, [4], k, v))
    assert_same(pool.set_kv_buffer(0, [4], k, wide_v, 0.37, 3.0), pool.set_kv_buffer(0, [4], k, v))
    halved = pool.set_kv_buffer(0, [4], wide_k, v, 1.0, 2.0).read(0, [4])[1]
    assert (np.asarray(halved) == v / jnp.bfloat16(2)).all()


def test_scale_values_do_not_retrace_and_other_shapes_are_refused():
    pool, (k, v) = make(jnp.float8_e4m3fn), tokens(1)
    traces = 0

    @jax.jit
    def write(p, s):
        nonlocal traces
        traces += 1
        return p.set_kv_buffer(0, [4], k, v, s, s)

    for scale in (0.5, 0.37, 3.0):
        assert_same(write(pool, scale), pool.set_kv_buffer(0, [4], k, v, scale, np.float32(scale)))
    assert traces == 1
    with pytest.raises(ValueError, match=r"v_scale must be one scalar .* \(2,\)"):
        pool.set_kv_buffer(0, [4], k, v, 1.0, np.ones(2))
    for scale in ("0.5", 1j):
        with pytest.raises(ValueError, match="k_scale must be a real number, got"):
            pool.set_kv_buffer(0, [4], k, v, scale)


def test_what_is_no_array_is_refused_by_name():
    pool, (k, v) = make(jnp.float32), tokens(1)
    for write, name in (
        (lambda: pool.set_kv_buffer(0, [4], None, v), "k must be an array, got NoneType"),
        (lambda: pool.set_kv_buffer(0, [4], k, None), "v must be an array, got NoneType"),
        (lambda: pool.set_kv_buffer(0, slice(4, 5), k, v), r"slice\(4, 5, None\) is no array"),
        (lambda: pool.read(0, KVWriteLoc(jnp.array([4]))), "loc must be an array, got KVWriteLoc"),
    ):
        with pytest.raises(ValueError, match=name):
            write()


# The other writes.


def test_prefix_valid_writes_only_committed_positions():
    k, v = tokens(6, seed=3)
    loc, commit = np.asarray([[4, 5, 6], [8, 9, 10]]), np.asarray([2, 0])
    pool = filled()
    after = pool.set_kv_buffer_prefix_valid(1, loc, commit, k, v)
    assert_same(after, pool.set_kv_buffer(1, [4, 5], k[:2], v[:2]))
    everything = pool.set_kv_buffer_prefix_valid(1, loc, [3, 9], k, v)
    assert_same(everything, pool.set_kv_buffer(1, loc.ravel(), k, v))
    scaled = make(jnp.float8_e4m3fn).set_kv_buffer_prefix_valid(0, loc, commit, k, v, 0.37, 0.05)
    assert_same(scaled, make(jnp.float8_e4m3fn).set_kv_buffer(0, [4, 5], k[:2], v[:2], 0.37, 0.05))


@pytest.mark.parametrize(
    ("loc", "commit", "rows", "message"),
    [
        ([4, 5], [1, 1], 2, "loc must have rank 2"),
        ([[4], [5]], [1], 2, "loc has 2 lanes but commit_lens has 1"),
        ([[4], [5]], [[1], [1]], 2, "commit_lens must have rank 1"),
        ([[4], [5]], [1, 1], 3, r"k has shape \(3, 2, 4\)"),
    ],
)
def test_prefix_valid_refuses_shapes_that_contradict(loc, commit, rows, message):
    with pytest.raises(ValueError, match=message):
        make().set_kv_buffer_prefix_valid(0, np.asarray(loc), np.asarray(commit), *tokens(rows))


def test_move_reads_every_source_before_it_writes_any_target():
    pool = filled(jnp.bfloat16)
    dst, src = np.asarray([5, 6, 4, 9]), np.asarray([4, 5, 6, 9])  # a cycle, and a slot onto itself
    after = pool.move_kv_cache(dst, src)
    for before, now in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        want = np.asarray(before).copy()
        want[dst] = np.asarray(before)[src]
        assert (np.asarray(now) == want).all()


def test_move_lanes_that_touch_padding_or_leave_the_pool_do_nothing():
    pool = filled()
    outside = pool.move_kv_cache([0, 4, 5, 6, 12, -1, 7], [4, 0, 12, -1, 4, 4, -(2**31)])
    assert_same(outside, pool)
    assert_same(pool.move_kv_cache([], []), pool)
    with pytest.raises(ValueError, match="dst has 2 lanes but src has 1"):
        pool.move_kv_cache([4, 5], [6])


# Reads.


def test_read_takes_locations_of_any_rank():
    pool = filled(jnp.float16)
    every_k, every_v = pool.read(0, np.arange(SLOTS))
    block = np.asarray([[4, 11, 0], [7, 7, 1]])
    k, v = pool.read(0, block)
    assert k.shape == (2, 3, HEADS, DIM)
    assert v.shape == (2, 3, HEADS, V_DIM)
    assert (k == every_k[block]).all()
    assert (v == every_v[block]).all()
    assert pool.read(0, 4)[0].shape == (HEADS, DIM)


def test_a_read_outside_the_pool_gives_the_padding_row():
    """B34, B36"""
    k, v = filled().read(0, [12, -1, 2**31 - 1, -(2**31)])
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_buffers_are_the_stored_leaves_themselves(dtype):
    pool = filled(dtype)
    assert pool.get_key_buffer(1) is pool.k[1]
    assert pool.get_value_buffer(1) is pool.v[1]
    assert pool.get_kv_buffer(0) == (pool.k[0], pool.v[0])
    assert pool.store_dtype == pool.k[0].dtype


# Transformations.


def step(pool, loc, k, v):
    pool = pool.set_kv_buffer(0, loc, k, v, 0.37, 3.0)
    pool = pool.set_kv_buffer_prefix_valid(1, loc[None], jnp.asarray([1]), k, v)
    return pool.move_kv_cache(loc, loc[::-1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bfloat16", "float8_e4m3fn"])
def test_eager_jit_scan_while_loop_and_vmap_agree_bit_for_bit(dtype):
    steps = 5
    rng = np.random.default_rng(4)
    locs = np.stack([rng.permutation(np.arange(1, SLOTS))[:3] for _ in range(steps)]).astype(np.int32)
    ks, vs = (np.stack(x) for x in zip(*(tokens(3, seed=i) for i in range(steps)), strict=True))
    eager = jitted = make(dtype)
    for i in range(steps):
        eager = step(eager, jnp.asarray(locs[i]), ks[i], vs[i])
        jitted = jax.jit(step)(jitted, locs[i], ks[i], vs[i])
    assert_same(jitted, eager)
    scanned, _ = jax.lax.scan(lambda p, x: (step(p, *x), None), make(dtype), (locs, ks, vs))
    assert_same(scanned, eager)

    def body(carry):
        i, p = carry
        return i + 1, step(p, *(jnp.asarray(x)[i] for x in (locs, ks, vs)))

    _, looped = jax.lax.while_loop(lambda c: c[0] < steps, body, (jnp.int32(0), make(dtype)))
    assert_same(looped, eager)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), filled(dtype))
    both = jax.vmap(step)(pair, locs[:2], ks[:2], vs[:2])
    for i in range(2):
        one = step(filled(dtype), jnp.asarray(locs[i]), ks[i], vs[i])
        assert_same(jax.tree.map(lambda x, i=i: x[i], both), one)
    assert both.slots == SLOTS
    assert both.bytes_per_token == filled(dtype).bytes_per_token


def test_twenty_steps_of_changing_values_trace_once_and_keep_the_static_fields():
    """B59"""
    traces = 0

    @jax.jit
    def traced(pool, loc, k, v):
        nonlocal traces
        traces += 1
        return step(pool, loc, k, v)

    pool = make(start_layer=0)
    structure = jax.tree.structure(pool)
    for i in range(20):
        k, v = tokens(2, seed=i)
        pool = traced(pool, np.asarray([4 + i % 8, 4 + (i + 1) % 8], np.int32), k, v)
        assert jax.tree.structure(pool) == structure
    assert traces == 1


def test_eager_calls_share_one_trace_over_layers_and_values(monkeypatch):
    """B59: a layer id is no part of the compile key."""
    traces = []
    put = reference.put
    monkeypatch.setattr(reference, "put", lambda *args, **kwargs: traces.append(1) or put(*args, **kwargs))
    pool = MHATokenToKVPool.create(5, 3, 4, 1, 3, dtype=jnp.float32)  # sizes that no other test compiles
    for layer in range(4):
        k = np.full((1, 1, 3), layer + 1, np.float32)
        pool = pool.set_kv_buffer(layer, [4 + layer], k, k)
    assert len(traces) == 2, "one trace writes K and V"
    assert [pool.k[layer][4 + layer, 0, 0].item() for layer in range(4)] == [1, 2, 3, 4]


def test_a_random_sequence_of_operations_agrees_with_numpy():
    rng = np.random.default_rng(11)
    pool = make(jnp.float32)
    k, v = np.zeros((LAYERS, SLOTS, HEADS, DIM), np.float32), np.zeros((LAYERS, SLOTS, HEADS, V_DIM), np.float32)
    write = jax.jit(lambda p, loc, a, b, layer: p.set_kv_buffer(layer, loc, a, b), static_argnames="layer")
    move = jax.jit(lambda p, dst, src: p.move_kv_cache(dst, src))
    for i in range(60):
        if rng.random() < 0.6:
            layer, loc = int(rng.integers(LAYERS)), rng.permutation(np.arange(-4, SLOTS + 4))[:6].astype(np.int32)
            a, b = tokens(6, seed=100 + i)
            pool = write(pool, loc, a, b, layer=layer)
            real = (loc > 0) & (loc < SLOTS)
            k[layer, loc[real]], v[layer, loc[real]] = a[real], b[real]
        else:
            dst, src = (rng.permutation(np.arange(SLOTS))[:4].astype(np.int32) for _ in range(2))
            pool = move(pool, dst, src)
            real = (dst > 0) & (src > 0)
            k[:, dst[real]], v[:, dst[real]] = k[:, src[real]], v[:, src[real]]
        for layer in range(LAYERS):
            assert (np.asarray(pool.k[layer]) == k[layer]).all()
            assert (np.asarray(pool.v[layer]) == v[layer]).all()


def test_state_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().size = 3  # type: ignore[misc]
