"""Requests of different lengths in one axis."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.ragged import lanes_of


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [([2, 0, 3], 7), ([0, 0, 1], 4), ([0, 0], 3), ([5], 5), ([1, 1, 1], 3), ([4, 4], 5), ([0, 3, 0, 0, 2, 0], 6)],
)
def test_every_entry_knows_its_lane_and_offset(lengths, capacity):
    lane, offset, valid = jax.jit(lanes_of, static_argnums=1)(jnp.array(lengths, jnp.int32), capacity)
    entries = [(i, k) for i, n in enumerate(lengths) for k in range(n)][:capacity]
    rest = capacity - len(entries)
    assert lane.tolist() == [i for i, _ in entries] + [0] * rest
    assert offset.tolist() == [k for _, k in entries] + [0] * rest
    assert valid.tolist() == [True] * len(entries) + [False] * rest
