"""The free list's witness, ranks and counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.freelist import (
    LONG,
    count_distinct,
    exclusive_rank,
    exclusive_sum,
    first_occurrences,
    is_free,
    new_tokens,
    occurrences,
    staged_at,
)
from kvjax.layout import INT32_MAX


def i32(*values):
    return jnp.array(values, jnp.int32)


def test_an_id_is_free_only_where_list_and_witness_agree():
    stack, count = i32(5, 2, 3, 0), i32(2)[0]  # 3 stands behind the live part
    pos = i32(9, 9, 1, 2, 0, 0)  # 4's stale entry points at 5, 1's past the list
    assert is_free(i32(0, 1, 2, 3, 4, 5), pos, stack, count).tolist() == [False, False, True, False, False, True]


def test_ids_out_of_range_are_never_free():
    stack, pos = i32(1, 2, 3), i32(0, 0, 1, 2)
    assert not is_free(i32(-1, 0, 4, INT32_MAX, -(2**31)), pos, stack, i32(3)[0]).any()


def test_staged_ids_are_free_too_and_cannot_be_taken_for_listed_ones():
    stack, staged = i32(3, 0, 0), i32(2, 1, 0)
    first, second = staged_at(i32(0, 1)).tolist()
    pos = i32(9, second, first, 0)
    assert is_free(i32(1, 2, 3), pos, stack, i32(1)[0], staged, i32(2)[0]).tolist() == [True, True, True]
    assert is_free(i32(1, 2, 3), pos, stack, i32(1)[0], staged, i32(1)[0]).tolist() == [False, True, True]
    assert staged_at(staged_at(i32(5))).tolist() == [5]


def test_first_occurrences_marks_the_first_lane_of_every_candidate():
    ids, candidates = i32(3, 1, 3, 2, 1, 3), jnp.array([False, True, True, True, True, True])
    marked, first = first_occurrences(ids, jnp.full(4, 7, jnp.int32), candidates)
    assert first.tolist() == [False, True, True, True, False, False]
    assert marked[0] == 7, "entries of other ids stay"
    assert (marked[1:] < -100).all(), "below every witness value"


def test_count_distinct_counts_ids_of_wanted_lanes_once():
    ids = i32(-5, 3, -5, INT32_MAX, 3, -(2**31), 0)
    assert count_distinct(ids, jnp.ones(7, bool)).item() == 5
    assert count_distinct(ids, jnp.array([1, 0, 1, 0, 1, 0, 0], bool)).item() == 2
    assert count_distinct(ids, jnp.zeros(7, bool)).item() == 0
    assert count_distinct(ids[:0], jnp.zeros(0, bool)).item() == 0


@pytest.mark.parametrize("length", [0, 1, 7, LONG - 1, LONG, LONG + 1, 2 * LONG + 37])
def test_exclusive_rank_counts_earlier_lanes(length):
    mask = np.random.default_rng(length).random(length) < 0.4
    rank, total = exclusive_rank(jnp.asarray(mask))
    assert rank.dtype == jnp.int32
    assert rank.tolist() == (np.cumsum(mask) - mask).tolist()
    assert total.item() == mask.sum()


def test_exclusive_sum():
    before, total = exclusive_sum(i32(3, 0, 4))
    assert before.tolist() == [0, 3, 3]
    assert total.item() == 7


def test_occurrences_counts_live_entries_and_those_outside():
    times, outside = occurrences(i32(1, 2, 2, 0, 4, -1, 3), jnp.array([1, 1, 1, 1, 1, 1, 0], bool), 3)
    assert times.tolist() == [0, 1, 2, 0]
    assert outside.item() == 3


@pytest.mark.parametrize(
    ("prefix", "seq", "legal"),
    [
        ([0, 5], [3, 5], True),
        ([0, 5], [4, 9], True),
        ([0, 5], [4, 10], False),  # 9 tokens, capacity 8
        ([3, 0], [2, 0], False),
        ([-1, 0], [2, 0], False),
        ([-(2**31), 0], [2**31 - 1, 0], False),
        ([0, 0], [2**31 - 1, 2**31 - 1], False),
        ([2**31 - 2, 0], [2**31 - 1, 0], True),
    ],
)
def test_new_tokens_refuses_lengths_out_of_order_and_too_many(prefix, seq, legal):
    new, ok = jax.jit(new_tokens, static_argnums=2)(i32(*prefix), i32(*seq), 8)
    assert ok.item() == legal
    if legal:
        assert new.tolist() == [s - p for p, s in zip(prefix, seq, strict=True)]


def test_new_tokens_whose_sum_wraps_past_int32_are_refused():
    capacity = 2**30  # four lanes of 2**30 wrap to 0
    _, ok = new_tokens(jnp.zeros(4, jnp.int32), jnp.full(4, 2**30, jnp.int32), capacity)
    assert not ok
