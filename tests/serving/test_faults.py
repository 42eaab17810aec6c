"""Known faults of serving systems as small cases, on the real ledger where pages move."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    check_invariants,
    release_rows,
    set_committed,
)
from kvjax.prefix import RadixCache
from kvjax.serving import LedgerBackend, Request, Scheduler
from kvjax.sizing import num_new_pages, page_aligned_decode_alloc_lens, swa_out_of_window


def ledger(size, page_size, rows=4, width=256):
    allocator = (
        TokenToKVPoolAllocator.create(size) if page_size == 1 else PagedTokenToKVPoolAllocator.create(size, page_size)
    )
    return Ledger.create(ReqToTokenPool.create(rows, width), allocator)


def extend(state, row, prefix, seq):
    state, rows, loc, ok = alloc_for_extend(state, jnp.array([row]), jnp.array([prefix]), jnp.array([seq]), capacity=64)
    assert bool(ok)
    return state, int(rows[0]), np.asarray(loc)[: seq - prefix].tolist()


def available(state):
    return int(state.allocator.available_size())


@pytest.mark.parametrize("page_size", [1, 4])
def test_b04_a_row_goes_back_once_with_everything_it_was_given(page_size):
    state, row, _ = extend(ledger(64, page_size), -1, 0, 3)
    for _ in range(3):  # two decode steps and one that overlapped: allocated 6
        state, _, _, ok = alloc_for_decode(state, jnp.array([row]))
        assert bool(ok)
    state, ok = set_committed(state, jnp.array([row]), jnp.array([5]))
    assert bool(ok)
    state = release_rows(state, jnp.array([row]))
    assert available(state) == 64
    state = release_rows(state, jnp.array([row]))
    assert available(state) == 64
    assert not bool(check_invariants(state).any())

    backend = LedgerBackend(ledger(64, page_size))
    scheduler = Scheduler(backend, None, max_steps=2)
    for finishes in (True, False):
        r = Request(1, np.arange(3), 4)
        scheduler.submit(r)
        scheduler.step()
        while finishes and scheduler.busy:
            scheduler.step()
        assert scheduler.abort(r) is not finishes
        assert not scheduler.abort(r)
        assert available(backend.ledger) == scheduler.capacity.available_size() == 64
    assert int(backend.ledger.faults) == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_b04_a_row_that_was_set_back_gave_everything_back_once(page_size):
    backend = LedgerBackend(ledger(20, page_size))
    scheduler = Scheduler(backend, None, max_steps=2)
    requests = [Request(i, np.arange(3) + 10 * i, 9) for i in range(3)]
    for r in requests:
        scheduler.submit(r)
    while scheduler.busy:
        scheduler.step()
        held = sum(r.owned_pages(page_size) for r in scheduler.running) * page_size
        assert available(backend.ledger) == scheduler.capacity.available_size() == 20 - held
    assert not bool(check_invariants(backend.ledger).any())
    assert sum(r.retractions for r in requests) > 0
    assert [len(r.output) for r in requests] == [9, 9, 9]
    assert (available(backend.ledger), int(backend.ledger.faults)) == (20, 0)


def test_b08_the_second_of_two_short_requests_waits_for_a_page_of_its_own():
    backend = LedgerBackend(ledger(128, 128))
    scheduler = Scheduler(backend, None)
    first, second = (Request(i, np.arange(2) + i, 4) for i in range(2))
    scheduler.submit(first)
    scheduler.submit(second)
    while first in scheduler.running or first in scheduler.waiting:
        report = scheduler.step()
        assert second not in report.admitted
    assert scheduler.step().admitted == [second]
    while scheduler.busy:
        scheduler.step()
    assert (len(second.output), second.retractions, available(backend.ledger)) == (4, 0, 128)


def test_b08_growing_inside_the_last_page_needs_no_page():
    assert num_new_pages([63], [64], page_size=64) == 0
    assert num_new_pages([0, 0], [2, 2], page_size=128) == 2
    state, row, _ = extend(ledger(64, 16), -1, 0, 63)
    assert available(state) == 0
    state, _, loc = extend(state, row, 63, 64)
    assert loc == [4 * 16 + 15]


def test_b14_a_reserve_is_recorded_in_whole_pages():
    now, after, need = page_aligned_decode_alloc_lens([20], [20], reserve=8, page_size=16)
    assert (now, after, need) == ([20], [32], 12)
    state, row, _ = extend(ledger(64, 16), -1, 0, 20)
    state, _, _ = extend(state, row, 20, after[0])
    assert int(state.allocated[row]) == 32
    state, ok = set_committed(state, jnp.array([row]), jnp.array([23]))
    assert bool(ok)
    assert available(state) == 32
    assert available(release_rows(state, jnp.array([row]))) == 64


def test_b17_a_resumed_row_gives_back_what_it_overwrites():
    state, row, _ = extend(ledger(64, 1), -1, 0, 10)
    before = available(state)
    state, _, _ = extend(state, row, 7, 10)
    assert available(state) == before
    assert available(release_rows(state, jnp.array([row]))) == 64

    state, row, first = extend(ledger(64, 4), -1, 0, 10)
    state, _, again = extend(state, row, 7, 10)
    assert again[0] == first[6] + 1  # position 7 keeps its slot; only whole pages from position 8 on go back
    assert available(release_rows(state, jnp.array([row]))) == 64
    assert not bool(check_invariants(state).any())


def test_b22_what_the_window_evicted_is_no_cached_prefix():
    freed, edge = swa_out_of_window(pre_len=16, evicted_seqlen=0, sliding_window_size=4, page_size=8)
    assert (freed, edge) == ([(0, 8)], 8)
    tree = RadixCache(8, window=4)
    assert tree.insert(np.arange(16), np.arange(8, 24), swa_evicted=16) == 0
    assert (tree.nodes, tree.swa_evictable) == (0, 0)
    tree.insert(np.arange(16), np.arange(8, 24), swa_evicted=edge)
    assert (tree.evictable, tree.swa_evictable) == (16, 8)
    assert tree.match_prefix(np.arange(16)).length == 16
    assert tree.match_prefix(np.arange(8)).length == 0
    tree.evict(16)
    assert (tree.evictable, tree.swa_evictable) == (0, 0)


def test_b71_a_running_prefix_is_not_evicted():
    backend = LedgerBackend(ledger(64, 4))
    tree = RadixCache(4)
    scheduler = Scheduler(backend, tree)
    r = Request(1, np.arange(8), 9)
    scheduler.submit(r)
    scheduler.step()
    assert tree.protected == 8
    assert tree.evict(100) == []
    assert r.node is not None
    tree.unlock(r.node)
    assert (tree.evictable, tree.protected) == (8, 0)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(r.node)
    assert (tree.evictable, tree.protected) == (8, 0)


def test_b73_a_prompt_below_a_page_is_never_cached():
    backend = LedgerBackend(ledger(64, 4))
    tree = RadixCache(4)
    scheduler = Scheduler(backend, tree)
    for n, cached in ((3, 0), (6, 4)):
        scheduler.submit(Request(n, np.arange(n) + 10 * n, 1))
        while scheduler.busy:
            scheduler.step()
        assert (tree.evictable, available(backend.ledger)) == (cached, 64 - cached)


def test_b75_a_full_hit_computes_the_last_page_in_a_page_of_its_own():
    backend = LedgerBackend(ledger(64, 4))
    tree = RadixCache(4)
    scheduler = Scheduler(backend, tree)
    prompt = np.arange(8)
    scheduler.submit(Request(1, prompt, 1))
    scheduler.step()
    second = tree.match_prefix(prompt).slots[4:]
    r = Request(2, prompt, 3)
    scheduler.submit(r)
    free = available(backend.ledger)
    report = scheduler.step()
    assert (r.cached_first, report.prefill_tokens) == (4, 4)
    # The copy of page 2 was taken, found to be there already, and given back; the row reads the tree's.
    assert available(backend.ledger) == free
    assert backend.row_slots(r.row, 8)[4:].tolist() == second.tolist()
    while scheduler.busy:
        scheduler.step()
    pages = jnp.asarray(np.pad(tree.pages(), (0, 16 - len(tree.pages()))))
    assert not bool(check_invariants(backend.ledger, pages).any())
