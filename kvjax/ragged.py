"""Requests of different lengths, back to back in one axis of fixed capacity."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lanes_of(lengths: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which request each packed entry belongs to, and which entry of it this is.

    lengths: i32[b], >= 0, with a sum of at most `capacity` (entries beyond are cut). Returns (lane i32[capacity],
    offset i32[capacity], valid bool[capacity]); lane and offset are 0 where valid is False.
    """
    end = jnp.cumsum(lengths, dtype=jnp.int32)
    start = end - lengths
    # Every request adds one step where it begins; requests without entries step at the same place.
    steps = jnp.zeros(capacity, jnp.int32).at[start].add(1, mode="drop")
    lane = jnp.cumsum(steps, dtype=jnp.int32) - 1
    index = jnp.arange(capacity, dtype=jnp.int32)
    valid = index < end[-1]
    lane = jnp.where(valid, lane, 0)
    return lane, jnp.where(valid, index - start[lane], 0), valid
