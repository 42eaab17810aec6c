"""PagedTokenToKVPoolAllocator: hands out pages, and slots inside them, in SGLang's order.

Free pages are a stack: the page that SGLang would pop from the front of its list is the top, so taking and
"prepending" pages are both O(batch). With `need_sort`, freed pages wait in a staged list until a sorted merge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax import freelist
from kvjax.allocators.capacity import Capacity
from kvjax.indexing import in_range, put
from kvjax.layout import INT32_MAX, INT32_MIN, capacity_of, ceil_div, check_start_pos, page_of, pool_slots
from kvjax.operation import int32, mask, narrow, once_if, operation, same_length, state, static, unbatched
from pallas_kernels.alloc_decode import alloc_decode
from pallas_kernels.alloc_extend import alloc_extend
from pallas_kernels.arguments import from_top

FREE, STAGED, FAULTS = range(3)  # entries of `counters`
SMALL = 64  # token sets up to this size are released without looking for whole pages first


def segment_pages(loc: jax.Array, start_pos: int, page_size: int) -> jax.Array:
    """Pages of a row piece in row order: one per `page_size` lanes, the partly filled last one included.

    loc: i32[k], slots of positions start_pos, start_pos + 1, ...; 0 = padding behind the piece. Returns
    i32[ceil(k / page_size)]. ValueError if start_pos is not on a page boundary.
    """
    check_start_pos(start_pos, page_size)
    return _released(int32("segments", loc, 1)[::page_size], page_size)


def _released(slots: jax.Array, page_size: int) -> jax.Array:
    """Page of each slot in a release: 0 for the padding slot alone, no page's id for the other slots of page 0."""
    page = page_of(slots, page_size)
    return page if page_size == 1 else jnp.where((page == 0) & (slots != 0), INT32_MIN, page)


@state
class PagedTokenToKVPoolAllocator:
    """Page allocator for `size` tokens (SGLang: PagedTokenToKVPoolAllocator). Pages 1 .. size // page_size.

    Every operation returns a new allocator first, runs under jit / scan / while_loop / vmap, and costs O(batch);
    only the sorted merge and `clear` are O(pool). A call that cannot be served returns ok == False, locations 0 and
    the state as it was (with need_sort a merge that SGLang would have made first is kept).
    """

    stack: jax.Array  # i32[num_pages], free pages; stack[free - 1] is handed out next
    pos: jax.Array  # i32[num_pages + 1], witness of each page (kvjax.freelist)
    staged: jax.Array | None  # i32[num_pages] with need_sort: freed pages in release order, waiting for a merge
    counters: jax.Array  # i32[3]: free pages, staged pages, faults
    size: int = static()  # tokens
    page_size: int = static()  # tokens per page
    need_sort: bool = static(default=False)

    @classmethod
    def create(cls, size: int, page_size: int, need_sort: bool = False) -> PagedTokenToKVPoolAllocator:
        """All pages free, in ascending order. A tail of `size` shorter than a page is unusable.

        Raises ValueError for sizes below 1, a page larger than the pool, or slots past int32.
        """
        pool_slots(size, page_size)
        if size < page_size:
            raise ValueError(f"a pool of {size} tokens holds no page of {page_size}; make size at least one page_size.")
        n = int(size) // int(page_size)
        stack, pos = _all_free(n)
        staged = jnp.zeros(n, jnp.int32) if need_sort else None
        counters = jnp.array([n, 0, 0], jnp.int32)
        return cls(stack, pos, staged, counters, int(size), int(page_size), bool(need_sort))

    @classmethod
    def from_lists(
        cls, free: Sequence[int], staged: Sequence[int] = (), *, size: int, page_size: int, need_sort: bool = False
    ) -> PagedTokenToKVPoolAllocator:
        """An allocator with the given free list (front first) and staged list, for tests. Not checked for sense."""
        base = cls.create(size, page_size, need_sort)
        n = base.num_pages
        if len(free) > n or len(staged) > n or (staged and not need_sort):
            raise ValueError(
                f"{len(free)} free and {len(staged)} staged pages do not fit an allocator of {n} pages "
                f"(staged pages need need_sort=True)."
            )
        stack, pos = np.zeros(n, np.int32), np.full(n + 1, n, np.int32)
        order = np.asarray(list(free)[::-1], np.int32)
        stack[: len(order)] = order
        pos[order] = np.arange(len(order), dtype=np.int32)
        wait = np.zeros(n, np.int32)
        wait[: len(staged)] = list(staged)
        pos[np.asarray(list(staged), np.int32)] = -1 - np.arange(len(staged), dtype=np.int32)
        counters = jnp.array([len(free), len(staged), 0], jnp.int32)
        rest = jnp.array(wait) if need_sort else None
        return cls(jnp.array(stack), jnp.array(pos), rest, counters, base.size, base.page_size, base.need_sort)

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that the allocator owns; their ids are 1 .. num_pages."""
        return self.size // self.page_size

    @property
    def num_slots(self) -> int:
        """Slots of a pool that this allocator serves: size + page_size."""
        return self.size + self.page_size

    @property
    def faults(self) -> jax.Array:
        """i32[]: releases that were refused, once per distinct page and call. `clear` keeps the count."""
        return self.counters[..., FAULTS]

    @property
    def free_pages(self) -> jax.Array:
        """i32[]: pages that the next allocation is served from."""
        return self.counters[..., FREE]

    @property
    def staged_pages(self) -> jax.Array:
        """i32[]: pages waiting for a merge (need_sort)."""
        return self.counters[..., STAGED]

    def available_size(self) -> jax.Array:
        """i32[]: tokens in free and staged pages."""
        return (self.free_pages + self.staged_pages) * self.page_size

    def capacity(self) -> Capacity:
        """The mirror that answers capacity questions on the host, fetched from the device."""
        unbatched("capacity", self.counters, 1)
        return Capacity.of(self)

    def to_lists(self) -> tuple[list[int], list[int]]:
        """(free pages, next one first; staged pages in release order), read to the host."""
        unbatched("to_lists", self.counters, 1)
        free, staged, _ = np.asarray(self.counters).tolist()
        waiting = [] if self.staged is None else np.asarray(self.staged)[:staged].tolist()
        return np.asarray(self.stack)[:free][::-1].tolist(), waiting

    def is_free(self, pages: jax.Array) -> jax.Array:
        """bool, shape of pages: the page is free or staged; False for ids out of range."""
        return freelist.is_free(pages, self.pos, self.stack, self.free_pages, self.staged, self.staged_pages)

    def owns_free_marks(self) -> tuple[jax.Array, jax.Array]:
        """i32[num_pages + 1]: how often each page is listed (free, staged) and i32[]: entries that name no page.

        O(pool), for check_invariants.
        """
        lane = jnp.arange(self.num_pages, dtype=jnp.int32)
        listed, live = [self.stack], [lane < self.free_pages]
        if self.staged is not None:
            listed.append(self.staged)
            live.append(lane < self.staged_pages)
        return freelist.occurrences(jnp.concatenate(listed), jnp.concatenate(live), self.num_pages)

    # --- taking ------------------------------------------------------------------------------------------------

    @operation("capacity")
    def alloc(self, need: ArrayLike, *, capacity: int) -> tuple[PagedTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """Whole pages for `need` tokens (i32[]), a multiple of the page; anything else is refused.

        Returns (allocator, loc i32[capacity] page by page, 0 behind the last, ok bool[]).
        """
        width, ps = capacity_of(capacity), self.page_size
        need = int32("need", need, 0)
        pages = need // ps
        legal = (need >= 0) & (need % ps == 0) & (need <= width)
        now = self._merged(legal & (pages > self.free_pages))
        ok = legal & (pages <= now.free_pages)
        taken = jnp.where(ok, pages, 0)
        rank = jnp.arange(ceil_div(width, ps), dtype=jnp.int32)
        page = jnp.where(rank < taken, from_top(now.stack, now.free_pages, rank, rank.size), 0)
        loc = jnp.where(page[:, None] > 0, page[:, None] * ps + jnp.arange(ps, dtype=jnp.int32), 0)
        return now._took(taken), loc.reshape(-1)[:width], ok

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
    ) -> tuple[PagedTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """Slots for positions prefix .. seq - 1 of every lane (SGLang: alloc_extend).

        prefix_lens, seq_lens, last_loc: i32[b]; a lane with seq == prefix gets nothing. last_loc is the slot of
        position prefix - 1, read only where the prefix ends inside a page. num_lanes: i32[], lanes that SGLang's
        merge bound counts (None: those with seq > prefix). Refused: seq < prefix, a last_loc that does not continue a
        handed-out page at the right offset, more than `capacity` new tokens.
        Returns (allocator, loc i32[capacity]: the new slots back to back in batch order, 0 behind them, ok bool[]).
        """
        width, ps = capacity_of(capacity), self.page_size
        prefix, seq = int32("prefix_lens", prefix_lens, 1), int32("seq_lens", seq_lens, 1)
        last = int32("last_loc", last_loc, 1)
        same_length(prefix_lens=prefix, seq_lens=seq, last_loc=last)
        new, legal = freelist.new_tokens(prefix, seq, width)
        # Behind this bound the end of a lane's last page would pass int32.
        legal &= jnp.all(self.continues(prefix, last, new > 0) & ((new == 0) | (seq <= INT32_MAX - ps)))
        total = jnp.sum(new, dtype=jnp.int32)
        lanes = jnp.sum(new > 0, dtype=jnp.int32)
        if num_lanes is not None:
            lanes = jnp.maximum(lanes, int32("num_lanes", num_lanes, 0))
        # SGLang's bound, total // ps + lanes + 1 > free, in a form that cannot pass int32.
        now = self._merged(legal & (lanes >= self.free_pages - total // ps))
        used = legal & (new > 0)  # the others become lanes of length 0, whatever they hold
        prefix, seq = jnp.where(used, prefix, 0), jnp.where(used, seq, 0)
        loc, taken, fits = alloc_extend(
            now.stack, now.free_pages, prefix, seq, last, page_size=ps, capacity=width, implementation=implementation
        )
        return now._took(taken), loc, legal & fits

    @operation("implementation")
    def alloc_decode(
        self, seq_lens: jax.Array, last_loc: jax.Array, active: jax.Array, *, implementation: str | None = None
    ) -> tuple[PagedTokenToKVPoolAllocator, jax.Array, jax.Array]:
        """One slot for position seq - 1 of every active lane (SGLang: alloc_decode; seq_lens already + 1).

        seq_lens, last_loc: i32[b]; active: bool[b]. A page is opened where (seq - 1) % page_size == 0. An active lane
        of length 0 takes nothing and gets slot 0, but counts for the merge. Returns (allocator, loc i32[b], ok).
        """
        seq, last = int32("seq_lens", seq_lens, 1), int32("last_loc", last_loc, 1)
        b = same_length(seq_lens=seq, last_loc=last)
        active = mask("active", active, (b,))
        takes = active & (seq > 0)
        legal = jnp.all(~active | (seq >= 0)) & jnp.all(self.continues(seq - 1, last, takes))
        now = self._merged(legal & (jnp.sum(active, dtype=jnp.int32) > self.free_pages))
        loc, taken, fits = alloc_decode(
            now.stack,
            now.free_pages,
            seq,
            last,
            active & legal,
            page_size=self.page_size,
            implementation=implementation,
        )
        return now._took(taken), loc, legal & fits

    def continues(self, prefix: jax.Array, last: jax.Array, used: jax.Array) -> jax.Array:
        """bool[b]: the lane needs no last_loc, or has one at the right offset of a page that is handed out."""
        inside = used & (prefix % self.page_size != 0)
        page = page_of(last, self.page_size)
        real = in_range(page, self.num_pages + 1, 1) & ~self.is_free(page)
        return ~inside | (real & (last % self.page_size == (prefix - 1) % self.page_size))

    def _took(self, pages: jax.Array) -> PagedTokenToKVPoolAllocator:
        return dataclasses.replace(self, counters=self.counters.at[FREE].add(-pages))

    # --- giving back -------------------------------------------------------------------------------------------

    @operation()
    def free(self, loc: jax.Array) -> PagedTokenToKVPoolAllocator:
        """Release the page of every slot in loc (i32[m], any order, 0 = padding), each page once, ascending."""
        return self._free_tokens(int32("loc", loc, 1))

    def free_segment(self, loc: jax.Array, start_pos: int = 0) -> PagedTokenToKVPoolAllocator:
        """Release the pages of a row piece in row order; see `segment_pages` for loc and start_pos."""
        return self.free_group(segments=((loc, start_pos),))

    @operation()
    def free_page_ids(self, pages: jax.Array) -> PagedTokenToKVPoolAllocator:
        """Release pages (i32[j], 0 = padding) in the given order."""
        return self._free_pages(int32("pages", pages, 1))

    @operation("usual")
    def free_page_set(self, pages: jax.Array, *, usual: int | None = None) -> PagedTokenToKVPoolAllocator:
        """Release pages (i32[j], any order, 0 = padding), each once, ascending; `usual`: how many to expect."""
        pages = int32("pages", pages, 1)
        return self._free_set(pages, pages == 0, usual)

    def free_group(
        self,
        tokens: jax.Array | None = None,
        segments: Sequence[tuple[jax.Array, int]] = (),
        pages: jax.Array | None = None,
    ) -> PagedTokenToKVPoolAllocator:
        """What SGLang brackets with free_group_begin / free_group_end, in one call.

        First all token sets together (ascending, each page once), then segments and page ids as a second release,
        which ends up in front. Where page ids and segments were mixed, pass all of them in `pages`, in call order,
        with `segment_pages` for the segments.
        """
        # start_pos is checked here, on the host, so it never becomes part of the compile key.
        reps = tuple(segment_pages(narrow(loc), start, self.page_size) for loc, start in segments)
        return self._free_group(tokens, reps, pages)

    @operation()
    def _free_group(
        self, tokens: jax.Array | None, segments: tuple[jax.Array, ...], pages: jax.Array | None
    ) -> PagedTokenToKVPoolAllocator:
        listed = [int32("segments", s, 1) for s in segments]
        if pages is not None:
            listed.append(int32("pages", pages, 1))
        if tokens is None or not listed:
            out = self if tokens is None else self._free_tokens(int32("tokens", tokens, 1))
            return out._free_pages(jnp.concatenate(listed)) if listed else out
        tokens, ids = int32("tokens", tokens, 1), jnp.concatenate(listed)
        # It is one call, so a page that is refused among the tokens and among the page ids counts once: what is
        # refused at first sight is counted over both and set aside. A second copy is left to the releases.
        every = jnp.concatenate([_released(tokens, self.page_size), ids])
        bad = (every != 0) & ~(in_range(every, self.num_pages + 1, 1) & ~self.is_free(every))
        of_tokens, of_ids = jnp.split(bad, [tokens.shape[0]])
        out = self._free_tokens(jnp.where(of_tokens, 0, tokens))._free_pages(jnp.where(of_ids, 0, ids))
        return dataclasses.replace(out, counters=out.counters.at[FAULTS].add(freelist.count_distinct(every, bad)))

    def _free_tokens(self, loc: jax.Array) -> PagedTokenToKVPoolAllocator:
        ps, m = self.page_size, loc.shape[0]
        if m <= SMALL or ps == 1:
            return self._free_set(page_of(loc, ps), loc == 0)
        # Whole pages in row order are the usual case: then one lane in page_size says it all.
        runs = jnp.pad(loc, (0, -m % ps)).reshape(-1, ps)
        lowest, highest = jnp.min(runs, axis=1), jnp.max(runs, axis=1)
        aligned = jnp.all(page_of(lowest, ps) == page_of(highest, ps))
        out = once_if(aligned, lambda a: a._free_set(page_of(highest, ps), highest == 0), self)
        return once_if(~aligned, lambda a: a._free_set(page_of(loc, ps), loc == 0, 2 * runs.shape[0]), out)

    def _free_set(self, page: jax.Array, padding: jax.Array, usual: int | None = None) -> PagedTokenToKVPoolAllocator:
        """Release a set of pages, ascending, each once. `usual`: how many distinct pages to expect at most."""
        if page.shape[0] == 0:
            return self
        candidates = ~padding & in_range(page, self.num_pages + 1, 1) & ~self.is_free(page)
        pos, fresh = freelist.first_occurrences(page, self.pos, candidates)
        faults = freelist.count_distinct(page, ~padding & ~candidates)
        rank, total = freelist.exclusive_rank(fresh)

        def ascending(a: PagedTokenToKVPoolAllocator, width: int) -> PagedTokenToKVPoolAllocator:
            # Only the distinct pages are sorted: they are a fraction of the tokens.
            lane = jnp.arange(width, dtype=jnp.int32)
            dense = put(jnp.full(width, INT32_MAX), rank, page, valid=fresh)
            return a._push(jnp.sort(dense), lane < total, lane, total, faults)

        out = dataclasses.replace(self, pos=pos)
        if usual is None or usual >= page.shape[0]:
            return ascending(out, page.shape[0])
        out = once_if(total <= usual, lambda a: ascending(a, usual), out)
        return once_if(total > usual, lambda a: ascending(a, page.shape[0]), out)

    def _free_pages(self, pages: jax.Array) -> PagedTokenToKVPoolAllocator:
        """Release pages in the given order; a second copy and what is already free are faults."""
        if pages.shape[0] == 0:
            return self
        candidates = in_range(pages, self.num_pages + 1, 1) & ~self.is_free(pages)
        pos, fresh = freelist.first_occurrences(pages, self.pos, candidates)
        faults = freelist.count_distinct(pages, (pages != 0) & ~fresh)
        rank, total = freelist.exclusive_rank(fresh)
        return dataclasses.replace(self, pos=pos)._push(pages, fresh, rank, total, faults)

    def _push(
        self, pages: jax.Array, fresh: jax.Array, rank: jax.Array, total: jax.Array, faults: jax.Array
    ) -> PagedTokenToKVPoolAllocator:
        """Put the fresh pages in front of the free list, in rank order (need_sort: behind the staged ones)."""
        if self.staged is None:
            at = self.free_pages + total - 1 - rank
            stack = put(self.stack, at, pages, valid=fresh)
            pos = put(self.pos, pages, at, valid=fresh, lower=1)
            counters = self.counters + _counts(total, 0, faults)
            return dataclasses.replace(self, stack=stack, pos=pos, counters=counters)
        at = self.staged_pages + rank
        staged = put(self.staged, at, pages, valid=fresh)
        pos = put(self.pos, pages, freelist.staged_at(at), valid=fresh, lower=1)
        counters = self.counters + _counts(0, total, faults)
        return dataclasses.replace(self, staged=staged, pos=pos, counters=counters)

    # --- housekeeping ------------------------------------------------------------------------------------------

    @operation()
    def merge_and_sort_free(self) -> PagedTokenToKVPoolAllocator:
        """Free and staged pages together, ascending; nothing happens when no page is staged. O(pool)."""
        return self._merged(jnp.ones((), bool))

    @operation()
    def clear(self) -> PagedTokenToKVPoolAllocator:
        """Every page free again, ascending, nothing staged; the fault count stays. O(pool)."""
        stack, pos = _all_free(self.num_pages)
        return dataclasses.replace(self, stack=stack, pos=pos, counters=_counts(self.num_pages, 0, self.faults))

    def _merged(self, wanted: jax.Array) -> PagedTokenToKVPoolAllocator:
        if self.staged is None:
            return self

        def merge(a: PagedTokenToKVPoolAllocator) -> PagedTokenToKVPoolAllocator:
            times, _ = a.owns_free_marks()
            listed = times > 0
            rank, total = freelist.exclusive_rank(listed)
            at = total - 1 - rank
            page = jnp.arange(a.num_pages + 1, dtype=jnp.int32)
            stack = put(a.stack, at, page, valid=listed)
            pos = jnp.where(listed, at, a.pos)
            return dataclasses.replace(a, stack=stack, pos=pos, counters=_counts(total, 0, a.faults))

        return once_if(wanted & (self.staged_pages > 0), merge, self)


def _all_free(n: int) -> tuple[jax.Array, jax.Array]:
    page = jnp.arange(n + 1, dtype=jnp.int32)
    return n - page[:n], n - page


def _counts(free, staged, faults) -> jax.Array:
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (free, staged, faults)])
