"""check_locations: what a write list holds that a pool would drop or leave undefined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import MHATokenToKVPool, check_locations

SLOTS = 12


def counts(flags):
    return tuple(int(x) for x in (flags.negative, flags.too_large, flags.duplicates, flags.padding))


@pytest.mark.parametrize(
    ("loc", "expected"),
    [
        ([4, 5, 6, 11], (0, 0, 0, 0)),
        ([], (0, 0, 0, 0)),
        ([0, 0, 0], (0, 0, 0, 3)),  # padding may repeat
        ([4, -1, -1], (2, 0, 0, 0)),  # B36
        ([12, 4, 2**31 - 1], (0, 2, 0, 0)),  # B34: size + page is the first slot that is not there
        ([12, 12, -5, -5], (2, 2, 0, 0)),  # what is dropped does not also count as a duplicate
        ([7, 4, 7, 7, 4], (0, 0, 3, 0)),  # B40
        ([7, 0, -1, 12, 7, 0], (1, 1, 1, 2)),
    ],
)
def test_each_kind_is_counted_eagerly_and_under_jit(loc, expected):
    flags = check_locations(loc, SLOTS)
    assert counts(flags) == expected
    assert bool(flags.ok) == (expected[:3] == (0, 0, 0))
    assert counts(jax.jit(check_locations)(jnp.asarray(loc, jnp.int32), SLOTS)) == expected


def test_locations_may_have_any_rank():
    assert counts(check_locations([[4, 5], [5, 0]], SLOTS)) == (0, 0, 1, 1)
    assert counts(check_locations(5, SLOTS)) == (0, 0, 0, 0)


def test_it_works_under_vmap_with_a_bound_for_each():
    flags = jax.vmap(check_locations)(jnp.asarray([[4, 4], [4, 12], [12, 0]]), jnp.asarray([12, 13, 12]))
    assert flags.ok.tolist() == [False, True, False]


def test_locations_of_another_dtype_or_past_int32_are_refused():
    """B47"""
    with pytest.raises(ValueError, match="int32"):
        check_locations(jnp.asarray([1.0]), SLOTS)
    with pytest.raises(ValueError, match="2147483653"):
        check_locations(np.asarray([2**31 + 5]), SLOTS)


def test_it_agrees_with_a_count_by_hand_on_random_lists():
    rng = np.random.default_rng(0)
    check = jax.jit(check_locations)
    for _ in range(50):
        loc = rng.integers(-3, SLOTS + 3, 24).astype(np.int32)
        real = loc[(loc > 0) & (loc < SLOTS)]
        by_hand = (
            int((loc < 0).sum()),
            int((loc >= SLOTS).sum()),
            len(real) - len(set(real.tolist())),
            int((loc == 0).sum()),
        )
        assert counts(check(loc, SLOTS)) == by_hand


def test_a_write_that_check_locations_reports_leaves_the_pool_unchanged():
    """B34"""
    pool = MHATokenToKVPool.create(8, 4, 1, 1, 2, dtype=jnp.float32)
    rows = np.ones((1, 1, 2), np.float32)
    for slot in (8 + 4, 2**31 - 1, -1, -12, -(2**31)):
        assert not check_locations([slot], pool.slots).ok
        assert not pool.set_kv_buffer(0, [slot], rows, rows).k[0].any()
    assert check_locations([11], pool.slots).ok
    assert (pool.set_kv_buffer(0, [11], rows, rows).k[0][11] == 1).all()
