"""check_locations: what a write list holds that a pool would drop or leave undefined."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.layout import PAD_SLOT
from kvjax.operation import operation, state
from kvjax.pools.leaves import locations


@state
class LocationFlags:
    """What a list of write locations holds. Counts of lanes, i32[] each; `ok` says whether the list is sound."""

    negative: jax.Array  # lanes below 0: dropped
    too_large: jax.Array  # lanes at or past the pool's last slot: dropped
    duplicates: jax.Array  # lanes that repeat a real slot named by another lane: which of them is kept is undefined
    padding: jax.Array  # lanes at slot 0: dropped, and legal any number of times

    @property
    def ok(self) -> jax.Array:
        """bool[]: every lane is padding or a real slot of its own."""
        return (self.negative == 0) & (self.too_large == 0) & (self.duplicates == 0)


@operation()
def check_locations(loc: Any, slots: Any) -> LocationFlags:
    """Flags of loc, i32 of any rank, for a pool with `slots` rows (`pool.slots`: size + page_size).

    Usable under jit. Writes never ask: they drop what is outside and are cheaper for it. O(n log n) for n lanes.
    """
    flat = locations("loc", loc).reshape(-1)
    real = (flat > PAD_SLOT) & (flat < slots)
    order = jnp.sort(jnp.where(real, flat, PAD_SLOT))

    def count(lanes: jax.Array) -> jax.Array:
        return jnp.sum(lanes, dtype=jnp.int32)

    return LocationFlags(
        negative=count(flat < PAD_SLOT),
        too_large=count(flat >= slots),
        duplicates=count((order[1:] == order[:-1]) & (order[1:] > PAD_SLOT)),
        padding=count(flat == PAD_SLOT),
    )
