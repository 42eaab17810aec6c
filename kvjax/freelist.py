"""Which ids are free, answered in O(batch): a free list with a sparse-set witness.

A stack of free ids and `pos`, one entry per id. A release writes `pos[id]` = the place where it put the id; taking
ids never touches it. An id is free exactly when `pos[id]` points inside the live part of the list and the list holds
the id there: a stale entry fails one of the two tests. (Briggs and Torczon, "An efficient representation for sparse
sets", 1993.) Releases use it to refuse what is already free, so a page can never be handed to two owners.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.indexing import in_range, parked, take_short
from kvjax.layout import INT32_MAX, INT32_MIN
from kvjax.operation import once_if

LONG, BLOCK = 2048, 64  # lanes from which exclusive_rank works in blocks, and their length


def staged_at(index: jax.Array) -> jax.Array:
    """Witness value of the id at `index` of the staged list: negative, so that it cannot be taken for a stack index."""
    return -1 - index


def is_free(
    ids: jax.Array,
    pos: jax.Array,
    stack: jax.Array,
    count: jax.Array,
    staged: jax.Array | None = None,
    num_staged: jax.Array | None = None,
) -> jax.Array:
    """bool, shape of ids: the id lies in stack[:count] (or in staged[:num_staged]). False for ids out of range."""
    at = take_short(pos, ids)
    found = in_range(at, count) & (take_short(stack, at) == ids)
    if staged is not None and num_staged is not None:
        back = staged_at(at)  # its own inverse
        found |= in_range(back, num_staged) & (take_short(staged, back) == ids)
    return found & in_range(ids, pos.shape[0], 1)


def two_or_more(lanes: jax.Array, fill: int | bool = 0) -> jax.Array:
    """[max(m, 2)]: a single lane gets padding beside it.

    XLA's CPU backend writes a single entry by a slice, and copies the whole list where it is read in the same program.
    """
    return lanes if lanes.shape[0] != 1 else jnp.pad(lanes, (0, 1), constant_values=fill)


def first_occurrences(ids: jax.Array, pos: jax.Array, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Marks the first candidate lane of every distinct id; O(batch), no sort.

    ids: i32[m]; candidates: bool[m], lanes to look at, all with ids in 1 .. len(pos) - 1. Returns (pos with the
    entries of these ids overwritten by marks, first: bool[m]); the caller must write the entry of every `first` lane.
    Candidates that were found by reading `pos` also make XLA read it before it is marked, so no copy is needed.
    """
    lane = jnp.arange(ids.shape[0], dtype=jnp.int32) + INT32_MIN  # below every witness value
    marked = pos.at[parked(ids, pos.shape[0], candidates)].min(lane, mode="drop")
    return marked, candidates & (take_short(marked, ids) == lane)


def count_distinct(ids: jax.Array, wanted: jax.Array) -> jax.Array:
    """How many different ids the wanted lanes hold (any int32 values); costs a sort only when a lane is wanted."""

    def counted(_: jax.Array) -> jax.Array:
        other, key = lax.sort((jnp.where(wanted, 0, 1).astype(jnp.int32), ids), num_keys=2)
        new = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]]) if ids.shape[0] else jnp.zeros(0, bool)
        return jnp.sum(new & (other == 0), dtype=jnp.int32)

    return once_if(jnp.any(wanted), counted, jnp.zeros((), jnp.int32))


def all_distinct(ids: jax.Array, used: jax.Array) -> jax.Array:
    """bool[]: no two used lanes hold the same id. One kernel, quadratic in the lanes; a batch is small."""
    lane = jnp.arange(ids.shape[0])
    same = (ids[:, None] == ids[None, :]) & used[:, None] & used[None, :] & (lane[:, None] != lane[None, :])
    return ~jnp.any(same)


def is_first(ids: jax.Array) -> jax.Array:
    """bool[m]: no earlier lane holds the same id. Quadratic in the lanes."""
    lane = jnp.arange(ids.shape[0])
    return ~jnp.any((ids[:, None] == ids[None, :]) & (lane[None, :] < lane[:, None]), axis=1)


def exclusive_rank(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(how many earlier lanes are set: i32[m], how many are set in all: i32[])."""
    m = mask.shape[0]
    if m < LONG:
        inclusive = jnp.cumsum(mask, dtype=jnp.int32)
        return inclusive - mask, inclusive[-1] if m else jnp.zeros((), jnp.int32)
    # Two levels: on a CPU a long cumsum costs twice as much as many short ones.
    blocks = jnp.pad(mask, (0, -m % BLOCK)).reshape(-1, BLOCK)
    within = jnp.cumsum(blocks, axis=1, dtype=jnp.int32)
    before, total = exclusive_sum(within[:, -1])
    return (within - blocks + before[:, None]).reshape(-1)[:m], total


def exclusive_sum(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the earlier lanes: i32[m], sum of all: i32[]); values i32[m], m >= 1."""
    inclusive = jnp.cumsum(values, dtype=jnp.int32)
    return inclusive - values, inclusive[-1]


def occurrences(ids: jax.Array, live: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """i32[limit + 1]: how often each id 1 .. limit stands in the live lanes; i32[]: live lanes outside. O(limit)."""
    real = live & in_range(ids, limit + 1, 1)
    times = jnp.zeros(limit + 1, jnp.int32).at[jnp.where(real, ids, 0)].add(real.astype(jnp.int32))
    return times, jnp.sum(live & ~real, dtype=jnp.int32)


def new_tokens(prefix: jax.Array, seq: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Tokens that each lane adds and whether the lengths make sense.

    prefix, seq: i32[b]. Returns (new i32[b], 0 where the lane's lengths are out of order; legal bool[]: 0 <= prefix
    <= seq everywhere and at most `capacity` new tokens in all, no sum having passed int32).
    """
    ordered = (prefix >= 0) & (seq >= prefix)
    new = jnp.where(ordered, seq - jnp.where(ordered, prefix, 0), 0)
    legal = jnp.all(ordered & (new <= capacity)) & (jnp.sum(new, dtype=jnp.int32) <= capacity)
    if prefix.shape[0] * capacity > INT32_MAX:  # only then can the int32 sum wrap
        legal &= jnp.sum(new.astype(jnp.float32)) < 2.0**31
    return new, legal
