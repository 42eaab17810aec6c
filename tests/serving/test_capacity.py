"""Capacity questions, answered on the host for every allocator in the same words."""

import numpy as np
import pytest

from kvjax import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvjax.allocators import Capacity
from kvjax.prefix import RadixCache


@pytest.mark.parametrize(
    ("allocator", "page_size", "tokens"),
    [
        (TokenToKVPoolAllocator.create(100), 1, 100),
        (TokenToKVPoolAllocator.create(100, need_sort=True), 1, 100),
        (PagedTokenToKVPoolAllocator.create(100, 16), 16, 96),
        (PagedTokenToKVPoolAllocator.create(100, 16, need_sort=True), 16, 96),
    ],
)
def test_the_mirror_counts_free_and_staged(allocator, page_size, tokens):
    taken, loc, ok = allocator.alloc(2 * page_size, capacity=2 * page_size)
    assert bool(ok)
    mirror = allocator.capacity()
    assert (mirror.available_size(), mirror.page_size) == (tokens, page_size)
    assert taken.capacity() == mirror.took(2)
    assert taken.free(loc).capacity() == mirror.took(2).gave(2)


def test_the_base_answers_are_sglangs():
    ones, pages = Capacity(100, 1, 100), Capacity(100 // 16, 16, 6)
    assert [ones.max_new_tokens_for_memory(n, 50) for n in (0, 10, 33, 60, 100)] == [50, 50, 50, 38, 0]
    assert pages.max_new_tokens_for_memory(33, 50) == 96 - 48 - 16 - 1
    assert ones.request_slot_reserve(True, 10) == 0
    assert ones.prealloc_ceiling_fits(1, 1) is None
    assert ones.prealloc_fits(10, 99, 10)
    assert not ones.prealloc_fits(10, 5, 10, 4)
    assert not ones.prealloc_fits(11, 5, 10, 5)
    slots = np.array([3, 4])
    assert ones.translate_kv_indices_for_transfer(slots) is slots


def test_eviction_frees_what_is_short_and_says_which_slots():
    tree = RadixCache(4)
    tree.insert(np.arange(8), np.arange(4, 12))
    tree.insert(np.arange(50, 58), np.arange(20, 28))
    mirror = Capacity(10, 4, 1)
    assert mirror.evict_to_free_tokens(None, 40) == (mirror, [])
    assert mirror.evict_to_free_tokens(tree, 4) == (mirror, [])
    now, pieces, ok = mirror.check_decode_capacity(tree, 8)
    assert (now.free_pages, ok, [p.tolist() for p in pieces]) == (3, True, [list(range(4, 12))])
    now, pieces, ok = now.check_decode_capacity(tree, 40)
    assert (now.free_pages, ok, len(pieces)) == (5, False, 1)


def test_a_mirror_that_can_not_be_is_refused():
    with pytest.raises(ValueError, match="given back twice"):
        Capacity(4, 4, 4).gave(1)
    with pytest.raises(ValueError, match="taken without being there"):
        Capacity(4, 4, 1).took(2)
