"""SlotMapping: which slot of the sliding-window pool stands beside each slot of the full pool, token by token.

Two counts go with it. `held` says how many tokens of a full page have a partner, `users` how many tokens point into
an SWA page: when an unaligned tail lets one SWA page serve two full pages, the page is given back by the last of its
users. Every read is a gather at the lanes concerned, so nothing here costs more in a larger pool.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.freelist import first_occurrences
from kvjax.indexing import in_range, parked, put, take
from kvjax.layout import NO_LOC, page_of
from kvjax.operation import state, static


@state
class SlotMapping:
    """Full slot -> SWA slot (SGLang: full_to_swa_index_mapping); 0 means no partner."""

    # i32[size_full + page_size + 1]; the last entry, one more than the pool has slots, is -1 for good: SGLang reads it
    # with the index -1, so that "no last location" stays -1 when it is translated.
    table: jax.Array
    held: jax.Array  # i32[full pages + 1], tokens of each full page that have a partner
    users: jax.Array  # i32[SWA pages + 1], tokens whose partner lies in each SWA page
    page_size: int = static()

    @classmethod
    def create(cls, size_full: int, full_pages: int, swa_pages: int, page_size: int) -> SlotMapping:
        """A mapping without partners."""
        table = np.zeros(size_full + page_size + 1, np.int32)
        table[-1] = NO_LOC
        return cls(
            jnp.array(table), jnp.zeros(full_pages + 1, jnp.int32), jnp.zeros(swa_pages + 1, jnp.int32), page_size
        )

    def translate(self, loc: jax.Array) -> jax.Array:
        """i32, shape of loc: the partner of each full slot; -1 stays -1, any other id outside the pool gives 0."""
        end = self.table.shape[0] - 1
        return take(self.table, jnp.where(loc == NO_LOC, end, jnp.where(in_range(loc, end), loc, 0)))

    def bind(self, loc: jax.Array, swa_loc: jax.Array) -> SlotMapping:
        """Pair loc[i] with swa_loc[i], i32[n] each; a lane with 0 on either side pairs nothing.

        A slot that has a partner keeps it: a row that goes on inside its own page, after tokens were taken back,
        names the same pair again, and the counts must not see it twice.
        """
        new = (loc > 0) & (swa_loc > 0) & (take(self.table, loc) == 0)
        return dataclasses.replace(
            self,
            table=put(self.table, loc, swa_loc, valid=new, lower=1),
            held=_added(self.held, page_of(loc, self.page_size), new, 1),
            users=_added(self.users, page_of(swa_loc, self.page_size), new, 1),
        )

    def has_partners(self, pages: jax.Array) -> jax.Array:
        """bool, shape of pages: a token of the full page has a partner; False for ids out of range."""
        return take(self.held, pages) > 0

    def claim(self, pages: jax.Array, wanted: jax.Array) -> tuple[SlotMapping, jax.Array, jax.Array]:
        """The pages that are about to lose their partners, each at the first wanted lane that names it.

        pages: i32[m]; wanted: bool[m]. Returns (mapping, whose `held` is 0 for these pages: `unmap` must follow;
        first: bool[m]; later: bool[m], lanes behind the first one of a claimed page, wanted or not).
        """
        candidates = wanted & self.has_partners(pages)
        held, first = first_occurrences(pages, self.held, candidates)  # the counts of these pages are spent anyway
        mark = take(held, pages)
        lane = jnp.arange(pages.shape[0], dtype=jnp.int32)
        later = (mark < 0) & (mark - jnp.iinfo(jnp.int32).min < lane)
        return dataclasses.replace(self, held=put(held, pages, _zero(mark), valid=first, lower=1)), first, later

    def unmap(self, pages: jax.Array) -> tuple[SlotMapping, jax.Array]:
        """Take every partner of claimed full pages (i32[w], 0 = padding, no page twice) away.

        Returns (mapping, slots i32[w * page_size]: for every SWA page that has no user left one of its slots, at the
        token that was its last; 0 elsewhere).
        """
        slots = pages[:, None] * self.page_size + jnp.arange(self.page_size, dtype=jnp.int32)
        slots = slots.reshape(-1)
        partner = jnp.maximum(take(self.table, slots), 0)
        has = partner > 0
        # A constant would do, but XLA's CPU backend then copies the table: it may write before it reads.
        table = put(self.table, slots, jnp.minimum(partner, 0), valid=has, lower=1)
        if self.page_size == 1:
            users = put(self.users, partner, jnp.minimum(partner, 0), valid=has, lower=1)
            return dataclasses.replace(self, table=table, users=users), partner
        page = page_of(partner, self.page_size)
        users = _added(self.users, page, has, -1)
        emptied = has & (take(users, page) == 0)
        lane = jnp.arange(1, slots.shape[0] + 1, dtype=jnp.int32)
        users = users.at[parked(page, users.shape[0], emptied)].max(lane, mode="drop")
        mark = take(users, page)
        last = emptied & (mark == lane)
        users = put(users, page, jnp.minimum(mark, 0), valid=last, lower=1)
        return dataclasses.replace(self, table=table, users=users), jnp.where(last, partner, 0)

    def miscounted(self) -> tuple[jax.Array, jax.Array]:
        """bool[SWA pages + 1]: `users` is not what the table says; bool[]: the rest is wrong. O(pool)."""
        slots, ps = self.table[:-1], self.page_size
        users = jnp.zeros_like(self.users).at[page_of(slots, ps)].add((slots > 0).astype(jnp.int32), mode="drop")
        pages = page_of(jnp.arange(slots.shape[0]), ps)
        held = jnp.zeros_like(self.held).at[pages].add((slots > 0).astype(jnp.int32), mode="drop")
        outside = ~in_range(page_of(slots, ps), self.users.shape[0])
        return users != self.users, (self.table[-1] != NO_LOC) | jnp.any(held != self.held) | jnp.any(outside)

    def clear(self) -> SlotMapping:
        """No slot has a partner; the last entry stays -1. O(pool)."""
        table = jnp.minimum(self.table, 0)
        return dataclasses.replace(self, table=table, held=self.held * 0, users=self.users * 0)


def _added(counts: jax.Array, index: jax.Array, valid: jax.Array, amount: int) -> jax.Array:
    return counts.at[parked(index, counts.shape[0], valid)].add(amount, mode="drop")


def _zero(values: jax.Array) -> jax.Array:
    """0 for every lane, computed from what was read: see `unmap`."""
    return jnp.maximum(jnp.minimum(values, 0), 0)
