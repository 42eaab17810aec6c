"""SWATokenToKVPoolAllocator: two allocators that agree, one for full attention and one for sliding-window layers.

A token has a slot on the full side for as long as its row lives, and a partner on the SWA side while a window can
still see it. The two sides are ordinary page (or token) allocators; `SlotMapping` pairs their slots. All results are
full slots; `translate` gives the partners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax import freelist
from kvjax.allocators.paged import SMALL, PagedTokenToKVPoolAllocator, _released, segment_pages
from kvjax.allocators.slot_mapping import SlotMapping
from kvjax.allocators.swa_capacity import SWACapacity
from kvjax.allocators.token import TokenToKVPoolAllocator
from kvjax.allocators.window_side import FullSide, PagedWindow
from kvjax.indexing import put
from kvjax.layout import NO_LOC, ceil_div, page_of, positive
from kvjax.operation import int32, mask, narrow, once_if, operation, same_length, state

Side = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator


def create_side(size: int, page_size: int, need_sort: bool = False) -> Side:
    """One side's allocator: slots in FIFO order at page size 1, pages otherwise."""
    if positive("page_size", page_size) == 1:
        return TokenToKVPoolAllocator.create(size, need_sort)
    return PagedTokenToKVPoolAllocator.create(size, page_size, need_sort)


def opened_pages(prefix: jax.Array, new: jax.Array, page_size: int) -> jax.Array:
    """i32[]: pages that lanes open which add `new` tokens (i32[b]) to `prefix` tokens (i32[b])."""
    opened = jnp.where(new > 0, ceil_div(prefix + new, page_size) - ceil_div(prefix, page_size), 0)
    return jnp.sum(opened, dtype=jnp.int32)


def free_items(side: Side, loc: jax.Array, freed: jax.Array, segment: jax.Array, kind: jax.Array) -> Side:
    """One side's part of a group: token sets, then segment pages, by the side's own group rule.

    loc: i32[m]; freed, segment: bool[m]. kind: bool[m], what else tells neighbouring items apart.
    """
    ps, tokens = side.page_size, jnp.where(freed, loc, 0)
    if ps == 1:  # one list in call order
        return side.free(tokens)
    # A segment's page begins at offset 0, or behind a lane of another page or kind.
    what = jnp.stack([page_of(loc, ps), freed, segment, kind])
    begins = (loc % ps == 0) | jnp.any(what != jnp.roll(what, 1, axis=1), axis=0) | (jnp.arange(loc.shape[0]) == 0)
    pages = jnp.where(segment & begins, _released(tokens, ps), 0)
    return side.free_group(jnp.where(segment, 0, tokens), pages=pages)


@state
class SWATokenToKVPoolAllocator(FullSide, PagedWindow):
    """Slots for models with full-attention and sliding-window layers (SGLang: SWATokenToKVPoolAllocator).

    Same contract as PagedTokenToKVPoolAllocator. A call that one side cannot serve changes neither: both are asked
    before anything moves. Only `alloc_decode` keeps, as SGLang does, the sorted merges that precede its check.
    A full page that still has partners cannot be freed on the full side, and an SWA page goes back when the last
    token that points into it is released, so neither can come to two owners.
    """

    full_attn_allocator: Side
    swa_attn_allocator: Side
    pairs: SlotMapping

    @classmethod
    def create(cls, size: int, size_swa: int, page_size: int, need_sort: bool = False) -> SWATokenToKVPoolAllocator:
        """Everything free. size, size_swa: tokens of the full and of the SWA side. ValueError as in the sides'."""
        full, swa = create_side(size, page_size, need_sort), create_side(size_swa, page_size, need_sort)
        return cls(full, swa, SlotMapping.create(full.size, full.num_pages, swa.num_pages, full.page_size))

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        return self.full_attn_allocator.page_size

    @property
    def size_full(self) -> int:
        """Tokens of the full side."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Tokens of the SWA side."""
        return self.swa_attn_allocator.size

    @property
    def size(self) -> int:
        """The smaller side (SGLang's size)."""
        return min(self.size_full, self.size_swa)

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """(full, swa) sizes of the SWAKVPool that goes with it."""
        return self.size_full, self.size_swa

    @property
    def num_pages(self) -> int:
        """Pages of the full side, whose ids name everything that this allocator hands out."""
        return self.full_attn_allocator.num_pages

    @property
    def mapping(self) -> jax.Array:
        """i32[size_full + page_size + 1]: SWA slot of each full slot, 0 = none; the last entry is -1."""
        return self.pairs.table

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused. A double `free` counts once, on the full side."""
        return self.full_attn_allocator.faults + self.swa_attn_allocator.faults

    def full_available_size(self) -> jax.Array:
        """i32[]: tokens free or staged on the full side."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> jax.Array:
        """i32[]: tokens free or staged on the SWA side."""
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> jax.Array:
        """i32[]: tokens that both sides can still take, the smaller of the two."""
        return jnp.minimum(self.full_available_size(), self.swa_available_size())

    def capacity(self) -> SWACapacity:
        """The mirror of both sides that answers capacity questions on the host, fetched from the device."""
        return SWACapacity.of(self)

    @operation()
    def translate(self, loc: jax.Array) -> jax.Array:
        """i32, shape of loc: SWA slots of full slots (SGLang: translate_loc_from_full_to_swa); -1 stays -1."""
        array = jnp.asarray(loc)
        return self.pairs.translate(int32("loc", array, array.ndim))

    # --- what the ledger asks a window side (kvjax.window) ------------------------------------------------------

    forgets_window = False  # the row keeps its full slots

    def room(self, full_pages: jax.Array, window_pages: jax.Array) -> jax.Array:
        """i32[]: pages that can be taken after so many came back on the full side and on the window side."""
        full, swa, ps = self.full_available_size(), self.swa_available_size(), self.page_size
        return jnp.minimum(full // ps + full_pages, swa // ps + window_pages)

    def broken_pairs(self) -> jax.Array:
        """bool[SWA pages + 1]: pages that are free and used at once, lost, or miscounted; entry 0: a broken mapping.

        O(pool), for check_invariants.
        """
        listed, outside = self.swa_attn_allocator.owns_free_marks()
        wrong, at_all = self.pairs.miscounted()
        used = self.pairs.users > 0
        broken = wrong | (listed > 1) | ((listed > 0) == used)
        return broken.at[0].set(at_all | (outside > 0) | wrong[0])

    # --- taking ------------------------------------------------------------------------------------------------

    @operation("capacity")
    def alloc(self, need: jax.Array, *, capacity: int) -> tuple[SWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """`need` (i32[]) tokens on both sides, a multiple of the page. Returns (allocator, loc i32[capacity], ok)."""
        width, need = positive("capacity", capacity), int32("need", need, 0)
        ok = (need >= 0) & (need % self.page_size == 0) & (need <= width) & (need <= self.available_size())
        asked = jnp.where(ok, need, -1)  # a negative need is refused before anything is merged
        full, loc, _ = self.full_attn_allocator.alloc(asked, capacity=width)
        swa, swa_loc, _ = self.swa_attn_allocator.alloc(asked, capacity=width)
        return self._paired(full, swa, loc, swa_loc), loc, ok

    @operation("capacity", "implementation")
    def alloc_extend(
        self,
        prefix_lens: jax.Array,
        seq_lens: jax.Array,
        last_loc: jax.Array,
        *,
        capacity: int,
        num_lanes: jax.Array | None = None,
        implementation: str | None = None,
    ) -> tuple[SWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """Slots for positions prefix .. seq - 1 of every lane, on both sides (SGLang: alloc_extend).

        As in PagedTokenToKVPoolAllocator. last_loc is the full slot; where the prefix ends inside a page, its partner
        must lie at the same offset of a live SWA page, otherwise the call is refused.
        """
        width, ps = positive("capacity", capacity), self.page_size
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        last = int32("last_loc", last_loc, 1)
        same_length(prefix_lens=prefix, seq_lens=seq, last_loc=last)
        new, legal = freelist.new_tokens(prefix, seq, width)
        swa_last = self.pairs.translate(last)
        legal &= jnp.all(self._both_continue(prefix, last, swa_last, new > 0))
        ok = legal & (opened_pages(prefix, new, ps) <= self.available_size() // ps)
        seq = jnp.where(ok, seq, prefix - 1)  # out of order: refused before anything is merged
        take = {"capacity": width, "num_lanes": num_lanes, "implementation": implementation}
        full, loc, _ = self.full_attn_allocator.alloc_extend(prefix, seq, last, **take)
        swa, swa_loc, _ = self.swa_attn_allocator.alloc_extend(prefix, seq, swa_last, **take)
        return self._paired(full, swa, loc, swa_loc), loc, ok

    @operation("capacity", "implementation")
    def alloc_extend_swa_tail(
        self,
        prefix_lens: jax.Array,
        seq_lens: jax.Array,
        last_loc: jax.Array,
        swa_tail_len: jax.Array,
        *,
        capacity: int,
        implementation: str | None = None,
    ) -> tuple[SWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """Full slots for one lane's whole extension, partners for its last tokens only (SGLang: alloc_extend_swa_tail).

        prefix_lens, seq_lens, last_loc: i32[1]; swa_tail_len: i32[], 0 .. seq - prefix. The partners come from fresh
        SWA pages, from offset 0 on, so their in-page offsets may differ from those of the full slots; the other new
        tokens have none. Refused besides: a tail length out of range, and an extension inside a page whose next
        tokens have partners already. Returns (allocator, loc i32[capacity], ok).
        """
        width, ps = positive("capacity", capacity), self.page_size
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        last, tail = int32("last_loc", last_loc, 1), int32("swa_tail_len", swa_tail_len, 0)
        if same_length(prefix_lens=prefix, seq_lens=seq, last_loc=last) != 1:
            raise ValueError(f"alloc_extend_swa_tail serves one request, got {prefix.shape[0]} lanes.")
        new, legal = freelist.new_tokens(prefix, seq, width)
        legal &= jnp.all(self.full_attn_allocator.continues(prefix, last, new > 0)) & (tail >= 0) & (tail <= new[0])
        rest = jnp.arange(1, ps, dtype=jnp.int32)  # tokens that still fit into the prefix's last page
        inside = (prefix[0] % ps != 0) & (rest <= ps - prefix[0] % ps) & (rest <= new[0])
        legal &= ~jnp.any(inside & (self.pairs.translate(jnp.where(inside, last[0] + rest, 0)) > 0))
        ok = legal & (opened_pages(prefix, new, ps) <= self.full_available_size() // ps)
        ok &= ceil_div(jnp.maximum(tail, 0), ps) <= self.swa_available_size() // ps

        take = {"capacity": width, "num_lanes": jnp.int32(1), "implementation": implementation}
        full, loc, _ = self.full_attn_allocator.alloc_extend(prefix, jnp.where(ok, seq, prefix - 1), last, **take)
        # An empty tail does not touch the SWA side, not even for a merge.
        swa_seq = jnp.where(ok & (tail > 0), tail, -1)[None]
        swa, fresh, _ = self.swa_attn_allocator.alloc_extend(
            jnp.zeros(1, jnp.int32), swa_seq, jnp.full(1, NO_LOC, jnp.int32), **take
        )
        before = new[0] - tail  # new tokens without a partner
        index = jnp.arange(width, dtype=jnp.int32)
        swa_loc = put(jnp.zeros(width, jnp.int32), index + before, fresh, valid=fresh > 0)
        return self._paired(full, swa, loc, swa_loc), loc, ok

    @operation("implementation")
    def alloc_decode(
        self, seq_lens: jax.Array, last_loc: jax.Array, active: jax.Array, *, implementation: str | None = None
    ) -> tuple[SWATokenToKVPoolAllocator, jax.Array, jax.Array]:
        """One slot on both sides for position seq - 1 of every active lane (SGLang: alloc_decode; seq already + 1).

        As in PagedTokenToKVPoolAllocator. Each side first merges by its own rule, then both are checked: on failure
        the merges stay and nothing is taken (upstream takes the full side's pages and loses them).
        """
        seq, last, ps = int32("seq_lens", seq_lens, 1), int32("last_loc", last_loc, 1), self.page_size
        active = mask("active", active, (same_length(seq_lens=seq, last_loc=last),))
        takes = active & (seq > 0)
        swa_last = self.pairs.translate(last)
        legal = jnp.all(~active | (seq >= 0)) & jnp.all(self._both_continue(seq - 1, last, swa_last, takes))
        # What each side's own alloc_decode merges for: pages count all active lanes, single slots those that take one.
        lanes = jnp.sum(takes if ps == 1 else active, dtype=jnp.int32)
        full, swa = (
            side._merged(legal & (lanes > side.free_pages))
            for side in (self.full_attn_allocator, self.swa_attn_allocator)
        )
        opened = jnp.sum(takes & ((seq - 1) % ps == 0), dtype=jnp.int32)
        ok = legal & (opened <= full.free_pages) & (opened <= swa.free_pages)
        full, loc, _ = full.alloc_decode(seq, last, active & ok, implementation=implementation)
        swa, swa_loc, _ = swa.alloc_decode(seq, swa_last, active & ok, implementation=implementation)
        return self._paired(full, swa, loc, swa_loc), loc, ok

    def continues(self, prefix: jax.Array, last: jax.Array, used: jax.Array) -> jax.Array:
        """bool[b]: the lane needs no last_loc, or has one whose slots continue a handed-out page on both sides."""
        return self._both_continue(prefix, last, self.pairs.translate(last), used)

    def _both_continue(self, prefix: jax.Array, last: jax.Array, swa_last: jax.Array, used: jax.Array) -> jax.Array:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        return full.continues(prefix, last, used) & swa.continues(prefix, swa_last, used)

    def _paired(self, full: Side, swa: Side, loc: jax.Array, swa_loc: jax.Array) -> SWATokenToKVPoolAllocator:
        return SWATokenToKVPoolAllocator(full, swa, self.pairs.bind(loc, swa_loc))

    # --- giving back -------------------------------------------------------------------------------------------

    @operation()
    def free(self, loc: jax.Array) -> SWATokenToKVPoolAllocator:
        """Release both sides of every page named in loc (i32[m], any order, 0 = padding), each page once, ascending."""
        loc = int32("loc", loc, 1)
        return self._tokens_without_partners(loc)._full_side(lambda full: full.free(loc))

    @operation()
    def free_swa(self, loc: jax.Array) -> SWATokenToKVPoolAllocator:
        """Release the partners of the whole pages named in loc; the full slots stay. Tokens without one are ignored."""
        return self._tokens_without_partners(int32("loc", loc, 1))

    @operation()
    def free_full(self, loc: jax.Array) -> SWATokenToKVPoolAllocator:
        """Release the full side only. A page that still has partners stays, and counts in `faults`."""
        loc = int32("loc", loc, 1)
        page = page_of(loc, self.page_size)
        refused = self.pairs.has_partners(page)
        out = self._full_side(lambda full: full.free(jnp.where(refused, 0, loc)))
        return out._counted(freelist.count_distinct(page, refused))

    def free_segment(self, loc: jax.Array, start_pos: int = 0) -> SWATokenToKVPoolAllocator:
        """Both sides of a row piece's pages, in row order; see `segment_pages` for loc and start_pos."""
        return self.free_page_ids(segment_pages(jnp.asarray(narrow(loc)), start_pos, self.page_size))

    def free_swa_segment(self, loc: jax.Array, start_pos: int = 0) -> SWATokenToKVPoolAllocator:
        """The partners of a row piece's pages, in row order; the full slots stay."""
        return self.free_swa_page_ids(segment_pages(jnp.asarray(narrow(loc)), start_pos, self.page_size))

    def free_full_segment(self, loc: jax.Array, start_pos: int = 0) -> SWATokenToKVPoolAllocator:
        """The full side of a row piece's pages, in row order; pages with partners stay and count."""
        return self.free_full_page_ids(segment_pages(jnp.asarray(narrow(loc)), start_pos, self.page_size))

    @operation()
    def free_page_ids(self, pages: jax.Array) -> SWATokenToKVPoolAllocator:
        """Both sides of full pages (i32[j], 0 = padding) in the given order."""
        pages = int32("pages", pages, 1)
        return self._pages_without_partners(pages)._full_side(lambda full: full.free_page_ids(pages))

    @operation()
    def free_swa_page_ids(self, pages: jax.Array) -> SWATokenToKVPoolAllocator:
        """The partners of full pages (i32[j], 0 = padding) in the given order; the full slots stay."""
        return self._pages_without_partners(int32("pages", pages, 1))

    @operation()
    def free_full_page_ids(self, pages: jax.Array) -> SWATokenToKVPoolAllocator:
        """Full pages in the given order; those with partners stay and count."""
        pages = int32("pages", pages, 1)
        refused = self.pairs.has_partners(pages)
        out = self._full_side(lambda full: full.free_page_ids(jnp.where(refused, 0, pages)))
        return out._counted(freelist.count_distinct(pages, refused))

    @operation()
    def free_group(
        self, loc: jax.Array, swa: jax.Array, full: jax.Array, segment: jax.Array
    ) -> SWATokenToKVPoolAllocator:
        """What SGLang brackets with free_group_begin / free_group_end: all items in call order, one after the other.

        loc: i32[m], the tokens of all items, 0 = padding; swa, full, segment: bool[m], the kind of each token's item:
        free (swa and full), free_swa (swa), free_full (full), and their _segment forms. Partners are looked up in call
        order, so a full-only item is refused where its page still has some at that moment. SWA pages of segments go
        back first, then those of token sets; on the full side it is the other way round. At page size 1 everything is
        one list in call order.
        """
        loc = int32("loc", loc, 1)
        swa, full, segment = (mask(n, v, loc.shape) for n, v in (("swa", swa), ("full", full), ("segment", segment)))
        page = page_of(loc, self.page_size)
        had = self.pairs.has_partners(page)
        out, unmapped = self._unpaired(page, swa & (loc != 0), segment)
        refused = full & ~swa & had & ~unmapped
        out = out._counted(freelist.count_distinct(page, refused))
        return out._full_side(lambda side: free_items(side, loc, full & ~refused, segment, swa))

    def _full_side(self, change: Callable[[Side], Side]) -> SWATokenToKVPoolAllocator:
        return dataclasses.replace(self, full_attn_allocator=change(self.full_attn_allocator))

    def _counted(self, faults: jax.Array) -> SWATokenToKVPoolAllocator:
        """`faults` more refusals, on the full side: the last of its counters."""
        return self._full_side(lambda full: dataclasses.replace(full, counters=full.counters.at[..., -1].add(faults)))

    def _tokens_without_partners(self, loc: jax.Array) -> SWATokenToKVPoolAllocator:
        return self._unpaired(page_of(loc, self.page_size), loc != 0, False)[0]

    def _pages_without_partners(self, pages: jax.Array) -> SWATokenToKVPoolAllocator:
        return self._unpaired(pages, pages != 0, True, usual=pages.shape[0])[0]

    def _unpaired(
        self, page: jax.Array, wanted: jax.Array, segment: jax.Array | bool, usual: int | None = None
    ) -> tuple[SWATokenToKVPoolAllocator, jax.Array]:
        """Unmap the wanted full pages (i32[m], bool[m]) and release the SWA pages that lose their last user.

        segment: which lanes release in row order (the others: ascending). usual: how many distinct pages to expect at
        most; None: as many as whole pages in row order would be. Returns (allocator, bool[m]: an earlier lane of this
        call has taken the page's partners).
        """
        ps, m = self.page_size, page.shape[0]
        pairs, first, later = self.pairs.claim(page, wanted)
        out = dataclasses.replace(self, pairs=pairs)
        if usual is None:
            usual = m if m <= SMALL else min(2 * ceil_div(m, ps), m)
        if usual == m:
            return out._unmapped(jnp.where(first, page, 0), segment), later
        rank, total = freelist.exclusive_rank(first)

        def packed(a: SWATokenToKVPoolAllocator, width: int) -> SWATokenToKVPoolAllocator:
            # Every page expands to page_size tokens, so the pages are closed up first.
            in_order = segment
            if not isinstance(segment, bool):
                in_order = put(jnp.zeros(width, bool), rank, segment, valid=first)
            return a._unmapped(put(jnp.zeros(width, jnp.int32), rank, page, valid=first), in_order)

        out = once_if((total > 0) & (total <= usual), lambda a: packed(a, usual), out)
        return once_if(total > usual, lambda a: packed(a, m), out), later

    def _unmapped(self, pages: jax.Array, segment: jax.Array | bool) -> SWATokenToKVPoolAllocator:
        """The claimed pages (i32[w], 0 = padding) without partners; segment: bool or bool[w]."""
        ps = self.page_size
        pairs, slots = self.pairs.unmap(pages)
        swa = self.swa_attn_allocator
        if isinstance(swa, TokenToKVPoolAllocator):
            swa = swa.free(slots)
        elif segment is False:
            swa = swa.free_page_set(page_of(slots, ps), usual=pages.shape[0])
        elif segment is True:
            swa = swa.free_page_ids(page_of(slots, ps))
        else:
            of_segment = jnp.repeat(segment, ps, total_repeat_length=slots.shape[0])
            swa = swa.free_page_ids(jnp.where(of_segment, page_of(slots, ps), 0))
            swa = swa.free_page_set(jnp.where(of_segment, 0, page_of(slots, ps)), usual=pages.shape[0])
        return dataclasses.replace(self, swa_attn_allocator=swa, pairs=pairs)

    # --- housekeeping ------------------------------------------------------------------------------------------

    @operation()
    def merge_and_sort_free(self) -> SWATokenToKVPoolAllocator:
        """Free and staged pages together, ascending, on both sides. O(pool)."""
        full, swa = self.full_attn_allocator.merge_and_sort_free(), self.swa_attn_allocator.merge_and_sort_free()
        return SWATokenToKVPoolAllocator(full, swa, self.pairs)

    @operation()
    def clear(self) -> SWATokenToKVPoolAllocator:
        """Everything free again, no partners; the fault counts stay. O(pool)."""
        full, swa = self.full_attn_allocator.clear(), self.swa_attn_allocator.clear()
        return SWATokenToKVPoolAllocator(full, swa, self.pairs.clear())
