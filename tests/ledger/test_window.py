"""The ledger with a sliding window: what is released and when, what stays, and where window layers find tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from kvjax.invariants import report
from kvjax.pools import KVWriteLoc, SWAKVPool
from kvjax.window import edge

api: Any = kvjax  # its operations take lists where the types say arrays
WINDOW, ROWS, CONTEXT, CHUNK = 8, 3, 128, 16


def make(kind, page_size, size=256, size_swa=128, window: int | None = WINDOW, rows=ROWS):
    if kind == "dual":
        allocator = SWATokenToKVPoolAllocator.create(size, size_swa, page_size)
    elif kind == "pure":
        allocator = PureSWATokenToKVPoolAllocator.create(size_swa, page_size)
    else:
        allocator = SWARingTokenToKVPoolAllocator.create(size, page_size, rows, WINDOW, CHUNK)
    return Ledger.create(ReqToTokenPool.create(rows, CONTEXT), allocator, window)


def extend(ledger, row, prefix, seq, **kwargs):
    ledger, rows, _, ok = api.alloc_for_extend(ledger, [row], [prefix], [seq], capacity=CHUNK, **kwargs)
    return ledger, int(rows[0]), bool(ok)


def held(ledger):
    """Tokens of the pages that the window side has handed out."""
    return ledger.allocator.size_swa - int(ledger.allocator.swa_available_size())


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(("kind", "page_size"), [("dual", 1), ("dual", 4), ("pure", 1), ("pure", 4)])
def test_a_growing_row_holds_one_window(kind, page_size):
    ledger = make(kind, page_size)
    bound = WINDOW + 2 * page_size
    row = -1
    for prefix in (0, 16, 32):
        ledger, row, ok = extend(ledger, row, prefix, prefix + 16)
        assert ok
        assert held(ledger) <= bound + 16
        before = held(ledger)
        ledger = api.release_window(ledger, [row], max_tokens=16)
        assert held(ledger) <= bound
        assert before - held(ledger) <= (16 // page_size + 1) * page_size
    for written in range(49, 49 + 8 * WINDOW):
        before = held(ledger)
        ledger, _, _, ok = api.alloc_for_decode(ledger, [row])
        assert ok
        assert held(ledger) <= bound
        assert before - held(ledger) <= page_size
        reach = np.arange(written - WINDOW, written)
        assert (api.window_loc(ledger, jnp.full(WINDOW, row), reach) > 0).all(), "the whole window is there"
        assert int(ledger.lens[row, 3]) == max(0, (written - 1 - WINDOW) // page_size * page_size)
    assert report(ledger) == ""
    ledger = api.release_rows(ledger, [row])
    assert held(ledger) == 0
    assert int(ledger.faults) == 0
    assert report(ledger) == ""


def test_a_step_releases_before_it_allocates():
    ledger = make("dual", 4, size_swa=12)
    ledger, row, ok = extend(ledger, -1, 0, 12)
    assert ok
    assert held(ledger) == 12
    ledger, _, _, ok = api.alloc_for_decode(ledger, [row])
    assert ok, "the page that it needs is the one that it gives back"
    assert held(ledger) == 12


@pytest.mark.parametrize("kind", ["dual", "pure"])
def test_a_step_that_stops_for_memory_keeps_its_releases(kind):
    ledger = make(kind, 4, size=24, size_swa=24)
    ledger, one, _ = extend(ledger, -1, 0, 12)
    ledger, two, _ = extend(ledger, -1, 0, 12)
    if kind == "pure":  # the released page would serve the step, so let three rows want one
        ledger = make(kind, 4, size_swa=24)
        ledger, rows, _, _ = api.alloc_for_extend(ledger, [-1] * 3, [0] * 3, [12, 4, 8], capacity=24)
    else:
        rows = jnp.array([one, two, 0])
    before = held(ledger)
    stopped, loc, _, ok = api.alloc_for_decode(ledger, rows)
    assert not ok
    assert not loc.any()
    assert held(stopped) < before
    assert report(stopped) == ""
    again, _, _, ok = api.alloc_for_decode(stopped, rows)
    assert not ok
    assert same(again, stopped), "nothing is released twice"


def test_a_refused_step_releases_nothing():
    ledger = make("dual", 4)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    after, _, _, ok = api.alloc_for_decode(ledger, [row, 3 - row if row != 3 else 1])
    assert not ok
    assert same(after, ledger)


def test_the_table_forgets_what_a_pure_window_gave_back():
    ledger = make("pure", 4, size_swa=32)
    ledger, old, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [old], max_tokens=16)
    assert ledger.table.req_to_token[old, :12].tolist() == [0] * 8 + [12, 13, 14, 15]
    ledger, new, ok = extend(ledger, -1, 0, 16)
    assert ok
    mine = ledger.table.req_to_token[new, :16]
    ledger = api.release_rows(ledger, [old])
    assert int(ledger.faults) == 0
    assert not ledger.allocator.is_free(mine // 4).any(), "the other row's pages are still its own"
    assert report(ledger) == ""


@pytest.mark.parametrize("kind", ["dual", "pure"])
def test_a_row_cannot_be_resumed_where_its_window_is_gone(kind):
    ledger = make(kind, 4)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [row], max_tokens=16)  # holds 8 .. 15
    assert api.set_committed(ledger, [row], [15])[1]
    assert not api.set_committed(ledger, [row], [14])[1]
    assert extend(ledger, row, 15, 20)[2]
    refused, _, ok = extend(ledger, row, 14, 20)
    assert not ok
    assert same(refused, ledger)
    ledger, _, ok = extend(ledger, row, 0, 12)  # from the start: everything is computed again
    assert ok
    assert int(ledger.lens[row, 3]) == 0
    assert (api.window_loc(ledger, jnp.full(12, row), jnp.arange(12)) > 0).all()
    assert report(ledger) == ""


def test_going_on_inside_a_page_after_tokens_were_taken_back_counts_no_token_twice():
    ledger = make("dual", 4)
    ledger, row, _ = extend(ledger, -1, 0, 7)
    ledger, ok = api.set_committed(ledger, [row], [5])
    assert ok
    ledger, _, ok = extend(ledger, row, 5, 8)
    assert ok
    assert report(ledger) == ""
    ledger = api.release_rows(ledger, [row])
    assert held(ledger) == 0


def test_rows_that_begin_with_another_rows_pages_release_only_their_own():
    ledger = make("dual", 4)
    ledger, first, _ = extend(ledger, -1, 0, 16)
    prefix = ledger.table.req_to_token[first, :16][None]
    ledger, second, ok = extend(ledger, -1, 16, 20, prefix_loc=prefix)
    assert ok
    before = held(ledger)
    for _ in range(8):
        ledger, _, _, ok = api.alloc_for_decode(ledger, [second])
    assert held(ledger) == before + 8, "the pages below the window belong to the first row"
    for _ in range(8):
        ledger, _, _, ok = api.alloc_for_decode(ledger, [second])
    assert held(ledger) == 16 + WINDOW + 4
    assert report(ledger) == ""
    gone = ledger.allocator.free_swa(prefix[0, 8:12])
    broken = Ledger(ledger.table, gone, ledger.lens, ledger.window)
    assert not extend(broken, -1, 16, 20, prefix_loc=prefix)[2], "the window of the prefix has no partners"


def test_without_a_window_nothing_is_released():
    ledger = make("dual", 4, window=None)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [row], max_tokens=16)
    for _ in range(20):
        ledger, _, _, ok = api.alloc_for_decode(ledger, [row])
        assert ok
    assert held(ledger) == 36
    assert report(ledger) == ""


def test_surplus_counts_on_each_side_for_itself():
    """Resumed from 0, a row gives back all its full pages but only a window of partners: what else it asks must fit."""
    ledger = make("dual", 4, size=20, size_swa=20)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [row], max_tokens=16)
    ledger, _, ok = extend(ledger, -1, 0, 4)
    assert ok
    assert int(ledger.allocator.full_available_size()) == 0
    refused, _, ok = extend(ledger, -1, 0, 4)
    assert not ok
    assert same(refused, ledger)
    ledger, _, ok = extend(ledger, row, 0, 16)
    assert ok
    assert report(ledger) == ""


def test_a_resumed_row_is_refused_when_the_window_side_alone_is_short():
    """All its full pages come back, but of the four window pages that it asks for it holds only two."""
    ledger = make("dual", 4, size=64, size_swa=16)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [row], max_tokens=16)
    ledger, _, ok = extend(ledger, -1, 0, 8)
    assert ok
    refused, _, ok = extend(ledger, row, 0, 16)
    assert not ok
    assert same(refused, ledger)
    assert extend(ledger, row, 0, 8)[2]


def test_the_edge_never_reaches_into_the_window():
    """B22: a page larger than the window."""
    assert int(edge(jnp.int32(16), 4, 8)) == 8
    ledger = make("dual", 8, window=4)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger = api.release_window(ledger, [row], max_tokens=16)
    loc = api.window_loc(ledger, jnp.full(16, row), jnp.arange(16))
    assert not loc[:8].any()
    assert (loc[8:] > 0).all()


def test_every_token_of_a_prompt_longer_than_the_window_is_stored():
    """B24: what a later prefix hit would read, not only what attention reads now."""
    ps, tokens, window, chunk = 16, 393, 128, 256
    ledger = Ledger.create(ReqToTokenPool.create(2, 512), SWATokenToKVPoolAllocator.create(512, 448, ps), window)
    pool = SWAKVPool.create(512, 448, ps, [0], [1], 1, 4, dtype=jnp.float32)
    ledger.check_pool(pool)
    k = jnp.arange(1, tokens * 4 + 1, dtype=jnp.float32).reshape(tokens, 1, 4)
    row = jnp.array([-1])
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        ledger, row, loc, ok = api.alloc_for_extend(ledger, row, [start], [start + n], capacity=chunk)
        assert ok
        where = KVWriteLoc(loc[:n], api.window_loc(ledger, jnp.full(n, row[0]), jnp.arange(start, start + n), loc[:n]))
        for layer in (0, 1):
            pool = pool.set_kv_buffer(layer, where, k[start : start + n], -k[start : start + n])
    position = jnp.arange(tokens)
    slots = (ledger.table.req_to_token[row[0], :tokens], api.window_loc(ledger, jnp.full(tokens, row[0]), position))
    for layer, slot in enumerate(slots):
        assert len(set(slot.tolist())) == tokens
        want = np.zeros(pool.get_key_buffer(layer).shape, np.float32)
        want[np.asarray(slot)] = k
        np.testing.assert_array_equal(pool.get_key_buffer(layer), want)
        np.testing.assert_array_equal(pool.get_value_buffer(layer), -want)


@pytest.mark.parametrize("chunks", [[1] * 10, [3, 1, 4, 2]])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_ring_reads_the_last_window_in_order_however_it_was_filled(chunks, page_size):
    """B25"""
    window = 4
    allocator = SWARingTokenToKVPoolAllocator.create(64, page_size, 2, window, max(chunks))
    ledger = Ledger.create(ReqToTokenPool.create(2, 32), allocator, window)
    pool = SWAKVPool.create(*allocator.pool_sizes, page_size, [0], [1], 1, 1, dtype=jnp.float32)
    ledger.check_pool(pool)
    assert pool.get_key_buffer(1).shape[0] == 3 * allocator.ring
    written, row = 0, jnp.array([-1])
    for chunk in chunks:
        ledger, row, loc, ok = api.alloc_for_extend(ledger, row, [written], [written + chunk], capacity=max(chunks))
        assert ok
        position = jnp.arange(written, written + chunk)
        where = KVWriteLoc(loc[:chunk], api.window_loc(ledger, jnp.full(chunk, row[0]), position, loc[:chunk]))
        value = (position + 100.0).reshape(-1, 1, 1)
        pool = pool.set_kv_buffer(1, where, value, value)
        written += chunk
        last = np.arange(max(0, written - window), written)
        slots = api.window_loc(ledger, jnp.full(len(last), row[0]), last)
        assert pool.read(1, slots)[0][:, 0, 0].tolist() == [100.0 + p for p in last]
        pages = api.window_pages(ledger, row, jnp.array([last[0] // page_size]), count=window // page_size + 2)[0]
        at = pages[last // page_size - last[0] // page_size] * page_size + last % page_size
        assert at.tolist() == slots.tolist()
    assert not pool.get_key_buffer(1)[: allocator.ring].any(), "row 0's ring is padding"


def test_a_chunk_longer_than_the_ring_writes_its_end_only():
    allocator = SWARingTokenToKVPoolAllocator.create(64, 4, 2, 4)
    ledger = Ledger.create(ReqToTokenPool.create(2, 32), allocator, 4)
    ledger, row, loc, _ = api.alloc_for_extend(ledger, [-1], [0], [10], capacity=10)
    slots = api.window_loc(ledger, jnp.full(10, row[0]), jnp.arange(10), loc)
    assert slots.tolist() == [0] * 6 + [int(row[0]) * 4 + p % 4 for p in range(6, 10)]


def test_a_ring_row_is_resumed_only_while_its_window_is_not_overwritten():
    ledger = make("ring", 4)  # the ring holds 24: the window and what a chunk of 16 writes ahead
    ledger, row, _ = extend(ledger, -1, 0, 16)
    ledger, _, _ = extend(ledger, row, 16, 32)
    assert api.set_committed(ledger, [row], [15])[1]
    assert not api.set_committed(ledger, [row], [14])[1]
    assert not extend(ledger, row, 14, 16)[2]
    ledger, _, ok = extend(ledger, row, 0, 4)
    assert ok
    assert (api.window_loc(ledger, jnp.full(4, row), jnp.arange(4)) > 0).all()


def test_a_new_row_does_not_see_the_ring_of_the_row_before():
    ledger = make("ring", 4)
    ledger, row, _ = extend(ledger, -1, 0, 16)
    prefix = ledger.table.req_to_token[row, :8][None]
    ledger, new, ok = extend(ledger, -1, 8, 12, prefix_loc=prefix)
    assert ok
    assert (api.window_loc(ledger, jnp.full(12, new), jnp.arange(12)) > 0).tolist() == [False] * 8 + [True] * 4


def test_usable_prefix_leaves_a_window_to_compute_again():
    allocator = make("ring", 4).allocator
    assert [allocator.usable_prefix(n) for n in (0, 8, 11, 12, 31)] == [0, 0, 0, 4, 20]
    assert allocator.usable_prefix(31, window_layers=3) == 4
    with pytest.raises(ValueError, match="0 tokens or more"):
        allocator.usable_prefix(-1)


def test_padded_lanes_have_no_window_slots():
    for kind in ("dual", "pure", "ring"):
        ledger = make(kind, 4)
        ledger, row, _ = extend(ledger, -1, 0, 6)
        rows = jnp.array([0, row, row, 9])
        assert (api.window_loc(ledger, rows, jnp.array([1, 5, -1, 2])) > 0).tolist() == [False, True, False, False]
        assert api.window_pages(ledger, rows[:2], jnp.array([0, 1]), count=3).astype(bool).tolist() == [
            [False] * 3,
            [True, False, False],
        ]


def test_a_window_needs_an_allocator_with_a_window_side():
    table = ReqToTokenPool.create(ROWS, CONTEXT)
    with pytest.raises(ValueError, match="PagedTokenToKVPoolAllocator"):
        Ledger.create(table, PagedTokenToKVPoolAllocator.create(64, 4), 8)
    assert Ledger.create(table, PagedTokenToKVPoolAllocator.create(64, 4)).lens.shape[1] == 3
    ring = SWARingTokenToKVPoolAllocator.create(64, 4, ROWS, WINDOW)
    with pytest.raises(ValueError, match="window of 8, but the ledger has 3 rows and a window of 7"):
        Ledger.create(table, ring, 7)
    ledger = make("dual", 4)
    with pytest.raises(ValueError, match=r"\(256, 128\) tokens .* holds \(256, 64\)"):
        ledger.check_pool(SWAKVPool.create(256, 64, 4, [0], [1], 1, 4))
