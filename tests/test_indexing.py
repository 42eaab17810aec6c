"""Safe indexing: nothing wraps, clamps or lands anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.indexing import in_range, parked, put, put2, take, take2, take_short
from kvjax.layout import INT32_MAX
from tests.inplace import needs_two_cores

OUTSIDE = [-1, -4, -5, 4, 5, INT32_MAX, -(2**31)]


def i32(*values):
    return jnp.array(values, jnp.int32)


def test_in_range():
    assert in_range(i32(-1, 0, 3, 4), 4).tolist() == [False, True, True, False]
    assert in_range(i32(0, 1, 3, 4), 4, 1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("idx", OUTSIDE)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_b36_put_drops_what_is_outside(idx, wrap):
    before = jnp.arange(10, 14)
    assert wrap(lambda a, i: put(a, i, 99))(before, i32(idx, 1)).tolist() == [10, 99, 12, 13]


def test_put_skips_invalid_lanes_and_indices_below_lower():
    out = put(jnp.zeros(4, jnp.int32), i32(0, 1, 2), i32(7, 8, 9), valid=jnp.array([True, True, False]), lower=1)
    assert out.tolist() == [0, 8, 0, 0]


def test_put_writes_whole_rows():
    out = put(jnp.zeros((3, 2), jnp.int32), i32(2, -1), jnp.array([[1, 2], [3, 4]], jnp.int32))
    assert out.tolist() == [[0, 0], [0, 0], [1, 2]]


@pytest.mark.parametrize("row", [*OUTSIDE, 1])
@pytest.mark.parametrize("col", [*OUTSIDE, 1])
def test_put2_and_take2_need_both_indices_inside(row, col):
    table = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    inside = row == col == 1
    out = put2(table, i32(row), i32(col), 99, valid=jnp.array([True]))
    assert int((np.asarray(out) != np.asarray(table)).sum()) == int(inside)
    assert take2(table, i32(row), i32(col)).tolist() == [5 if inside else 0]
    assert put2(table, i32(1), i32(1), 99, valid=jnp.array([False])).tolist() == table.tolist()


@pytest.mark.parametrize("idx", OUTSIDE)
def test_take_reads_the_padding_entry_where_the_index_is_outside(idx):
    assert take(jnp.arange(10, 14), i32(idx, 3)).tolist() == [10, 13]


def test_parked_indices_are_distinct_and_past_the_end():
    idx = parked(i32(2, 2, -1, 7), 4, jnp.array([True, False, False, False]))
    assert idx.tolist() == [2, 5, 6, 7]


def test_parked_refuses_an_array_that_leaves_no_dropped_indices():
    with pytest.raises(ValueError, match=f"{INT32_MAX - 1} entries leaves no int32 indices for 2 dropped lanes"):
        parked(i32(0, 1), INT32_MAX - 1, jnp.array([True, True]))


POOL = 1 << 18  # entries: a MiB, which XLA's CPU backend takes for enough work for several threads


def _pool_reads(array, idx):
    """Two reads that depend on each other, with arithmetic to fuse with, as a free list's witness is read."""
    found = take_short(array, idx)
    return jnp.where((take_short(array, found) == idx) & (found > 3), found, 0)


def test_take_from_a_pool_sized_list_reads_what_numpy_reads():
    rng = np.random.default_rng(0)
    array = rng.integers(0, POOL, POOL).astype(np.int32)
    idx = rng.integers(-5, POOL + 5, (3, 40)).astype(np.int32)
    idx[0, :4] = 0, -1, POOL - 1, POOL
    expected = array[np.where((idx >= 0) & (idx < POOL), idx, 0)]
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(take_short)(jnp.array(array), jnp.array(idx)), expected)
        np.testing.assert_array_equal(wrap(jax.vmap(take_short, (None, 0)))(jnp.array(array), jnp.array(idx)), expected)


@pytest.mark.compiled
def test_take_under_vmap_reads_and_writes_nothing_else():
    arrays = jnp.arange(3 * POOL, dtype=jnp.int32).reshape(3, POOL)
    idx = jnp.array([[0, POOL - 1], [5, -1], [POOL, 7]], jnp.int32)
    compiled = jax.jit(jax.vmap(take_short)).lower(arrays, idx).compile()
    assert compiled(arrays, idx).tolist() == [[0, POOL - 1], [POOL + 5, POOL], [2 * POOL, 2 * POOL + 7]]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < POOL


def _threaded(step, *args):
    """Fusions that the CPU backend splits over threads when `step` runs in a loop."""
    loop = jax.jit(lambda a, i: jax.lax.fori_loop(0, 9, lambda _, x: step(a, x), i))
    return (loop.lower(*args).compile().as_text() or "").count("outer_dimension_partitions")


@pytest.mark.compiled
@needs_two_cores
def test_a_short_read_of_a_pool_sized_list_is_not_split_over_threads():
    array, idx = jnp.arange(POOL, dtype=jnp.int32), jnp.arange(64, dtype=jnp.int32)
    assert _threaded(_pool_reads, array, idx) == 0
    # What it is about: the same read without `take`.
    assert _threaded(lambda a, i: jnp.where(a.at[i].get(mode="promise_in_bounds") > 3, i, 1), array, idx) > 0
