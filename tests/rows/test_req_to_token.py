"""ReqToTokenPool: SGLang's order, padding row, generations."""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import ReqToTokenPool
from kvjax.layout import INT32_MAX
from tests.inplace import assert_in_place


def want(*lanes):
    return jnp.array(lanes, bool)


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_rows_come_from_the_end_of_the_list_as_in_sglang():
    pool = ReqToTokenPool.create(4, 8)
    assert pool.to_list() == [1, 2, 3, 4]
    pool, rows, ok = pool.alloc_rows(want(1, 1))
    assert (rows.tolist(), bool(ok), pool.to_list()) == ([3, 4], True, [1, 2])
    assert pool.generation.tolist() == [0, 0, 0, 1, 1]
    pool, rows, _ = pool.alloc_rows(want(1))
    assert rows.tolist() == [2]
    pool = pool.free_rows([3])
    assert pool.to_list() == [1, 3]
    pool, rows, _ = pool.alloc_rows(want(0, 1))  # SGLang: alloc(reuse row 4, new) -> [4, 3]
    assert rows.tolist() == [0, 3]
    assert pool.generation.tolist() == [0, 0, 1, 2, 1]
    pool, rows, ok = pool.alloc_rows(want(0, 0))
    assert (rows.tolist(), bool(ok)) == ([0, 0], True)
    before = pool
    pool, rows, ok = pool.alloc_rows(want(*[1] * 9))
    assert (rows.tolist(), bool(ok)) == ([0] * 9, False)
    assert equal(pool, before)
    pool = pool.clear()
    assert pool.to_list() == [1, 2, 3, 4]
    assert pool.generation.tolist() == [0, 0, 1, 2, 1]


def test_b44_rows_are_numbered_from_1_and_row_0_stays_untouched():
    pool = ReqToTokenPool.create(3, 4)
    assert pool.req_to_token.shape == (4, 4)
    pool, rows, ok = pool.alloc_rows(want(1, 1, 1))
    assert ok
    assert sorted(rows.tolist()) == [1, 2, 3]
    _, _, ok = pool.alloc_rows(want(1))
    assert not ok
    _, none, ok = pool.alloc_rows(want(0))
    assert (none.tolist(), bool(ok)) == ([0], True)
    written = pool.write([1, 0], [[0], [0]], [[7], [9]])
    assert written.req_to_token[1, 0] == 7
    assert not written.req_to_token[0].any()
    assert equal(written.req_to_token[2:], pool.req_to_token[2:])


def test_write_drops_rows_and_positions_outside_and_lanes_that_are_not_valid():
    pool = ReqToTokenPool.create(3, 4)
    rows = [-1, 4, INT32_MAX, 2, 3]
    positions = [[0, 1], [0, 1], [0, 1], [-1, 4], [3, 0]]
    out = pool.write(rows, positions, [[5, 5]] * 5, [[True, True]] * 4 + [[True, False]])  # type: ignore[arg-type]
    assert np.argwhere(np.asarray(out.req_to_token)).tolist() == [[3, 3]]
    assert out.locs([3, 3, 0, -1], [[3, 4], [-1, 0], [0, 1], [3, 3]]).tolist() == [[5, 0], [0, 0], [0, 0], [0, 0]]


def test_freed_rows_keep_their_tokens():
    pool, rows, _ = ReqToTokenPool.create(3, 4).alloc_rows(want(1))
    pool = pool.write(rows, [[0, 1]], [[8, 9]]).free_rows(rows)
    assert pool.req_to_token[3].tolist() == [8, 9, 0, 0]


def test_b01_a_row_freed_twice_is_listed_once_and_counted():
    pool, rows, _ = ReqToTokenPool.create(4, 4).alloc_rows(want(1, 1))
    pool = pool.free_rows([3, 3, 0])
    assert (pool.to_list(), int(pool.faults)) == ([1, 2, 3], 1)
    pool = pool.free_rows([3, 3, 1, -1, 5, INT32_MAX, 4])
    assert (pool.to_list(), int(pool.faults)) == ([1, 2, 3, 4], 6)
    assert int(pool.clear().faults) == 6
    pool, rows, _ = pool.alloc_rows(want(1, 1, 1, 1))
    assert sorted(rows.tolist()) == [1, 2, 3, 4]


def test_generation_wraps_after_2_to_31_hand_outs():
    pool = ReqToTokenPool.create(2, 4)
    pool = jax.tree.unflatten(
        jax.tree.structure(pool),
        [jnp.full(3, INT32_MAX, jnp.int32) if leaf is pool.generation else leaf for leaf in jax.tree.leaves(pool)],
    )
    after, _, _ = pool.alloc_rows(want(1))
    assert after.generation.tolist() == [INT32_MAX, INT32_MAX, -(2**31)]


def test_is_live_tells_rows_in_use():
    pool, _, _ = ReqToTokenPool.create(3, 4).alloc_rows(want(1))
    assert pool.is_live(jnp.array([-1, 0, 1, 2, 3, 4], jnp.int32)).tolist() == [False] * 4 + [True, False]


def test_from_list():
    pool = ReqToTokenPool.from_list([4, 1], size=4, max_context_len=2)
    assert pool.to_list() == [4, 1]
    assert pool.is_live(jnp.array([1, 2, 3, 4])).tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", ["size", "max_context_len"])
@pytest.mark.parametrize("value", [0, INT32_MAX, 2**40])
def test_create_refuses_sizes_that_make_no_table(name, value):
    sizes = {"size": 4, "max_context_len": 4} | {name: value}
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        ReqToTokenPool.create(**sizes)


def test_wrong_arguments_raise_with_both_values():
    pool = ReqToTokenPool.create(3, 4)
    with pytest.raises(ValueError, match="want must be bool, got int32"):
        pool.alloc_rows(jnp.array([1, 0]))
    with pytest.raises(ValueError, match="rows must be int32, got float32"):
        pool.free_rows(jnp.array([1.0]))
    with pytest.raises(ValueError, match=r"positions \(1, 2\) and locs \(1, 3\) must be \[b, t\] with b = 1"):
        pool.write([1], [[0, 1]], [[0, 1, 2]])
    with pytest.raises(ValueError, match=r"valid must have shape \(1, 2\).*got \(1, 1\)"):
        pool.write([1], [[0, 1]], [[0, 1]], jnp.array([[True]]))


def cycle(pool):
    """Two rows taken, one written, one given back."""
    pool, rows, _ = pool.alloc_rows(want(1, 0, 1))
    pool = pool.write(rows, jnp.zeros((3, 1), jnp.int32), rows[:, None] * 10)
    return pool.free_rows(rows[:1])


def test_jit_scan_while_and_vmap_agree_with_eager_calls():
    start = eager = ReqToTokenPool.create(5, 3)
    for _ in range(3):
        eager = cycle(eager)
    jitted = start
    for _ in range(3):
        jitted = jax.jit(cycle)(jitted)
    scanned, _ = lax.scan(lambda p, _: (cycle(p), None), start, None, length=3)
    _, looped = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, cycle(c[1])), (0, start))
    stacked = jax.vmap(lambda p, n: lax.fori_loop(0, n, lambda _, q: cycle(q), p), in_axes=(None, 0))(
        start, jnp.array([3, 1])
    )
    for other in (jitted, scanned, looped, jax.tree.map(lambda x: x[0], stacked)):
        assert equal(other, eager)
    assert equal(jax.tree.map(lambda x: x[1], stacked), cycle(start))


@pytest.mark.compiled
def test_every_operation_updates_a_donated_table_in_place():
    pool, lanes = ReqToTokenPool.create(2**12, 256), jnp.zeros(8, jnp.int32)
    cells = jnp.zeros((8, 4), jnp.int32)
    assert_in_place(lambda p: p.alloc_rows(jnp.ones(8, bool))[0], pool, temp=4096)
    assert_in_place(lambda p, rows: p.free_rows(rows), pool, lanes, temp=4096)
    assert_in_place(lambda p, rows, at: p.write(rows, at, at), pool, lanes, cells, temp=4096)
