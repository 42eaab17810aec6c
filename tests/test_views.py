"""The views of the page table: KV read back through each is what the pool's own read gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import paged_attention as gpu_paged_attention

from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, alloc_for_extend, views
from kvjax.pools import MHATokenToKVPool

HEADS, DIM, V_DIM, CONTEXT, SIZE = 2, 16, 8, 32, 96
# Lanes: an inner row, one of a whole page, one not in use, one token, the whole table, a row that does not exist.
LENGTHS = np.array([11, 4, 0, 1, 32, 5], np.int32)
ROWS = np.array([3, 1, 0, 7, 2, 99], np.int32)
LIVE = [0, 1, 3, 4]
PAGES = (1, 4)


def make(page_size):
    """(table i32[9, CONTEXT] over shuffled pages, a pool in which every slot but page 0's differs)."""
    rng = np.random.default_rng(page_size)
    pages, table = rng.permutation(SIZE // page_size) + 1, np.zeros((9, CONTEXT), np.int32)
    for lane in LIVE:
        count = -(-LENGTHS[lane] // page_size)
        slots = (pages[:count, None] * page_size + np.arange(page_size)).reshape(-1)
        pages = pages[count:]
        table[ROWS[lane], : len(slots)] = slots
        table[ROWS[lane], len(slots) :] = 5  # what an earlier user of the row left there
    pool = MHATokenToKVPool.create(SIZE, page_size, 1, HEADS, DIM, V_DIM, dtype=jnp.float32)
    every = np.arange(page_size, pool.slots, dtype=np.int32)
    k = rng.normal(size=(len(every), HEADS, DIM)).astype(np.float32)
    return jnp.asarray(table), pool.set_kv_buffer(0, every, k, k[..., :V_DIM] + 1)


def expected(table, pool, lane):
    """K and V of the lane's tokens, [length, heads, width], by the pool's own read."""
    length = LENGTHS[lane] if lane in LIVE else 0
    k, v = pool.read(0, table[min(ROWS[lane], 8), :length])
    return np.asarray(k), np.asarray(v)


def tokens(pages, leaf, page_size, length):
    """What a library reads that follows a list of pages: [length, heads, width]."""
    return np.asarray(views.paged(leaf, page_size))[np.asarray(pages)].reshape(-1, *leaf.shape[1:])[:length]


@pytest.mark.parametrize(("pool_page", "page_size"), [(1, 1), (4, 4), (4, 2)])
def test_a_block_table_names_the_tokens(pool_page, page_size):
    table, pool = make(pool_page)
    view = jax.jit(lambda t: views.block_table(t, ROWS, LENGTHS, page_size=page_size, columns=CONTEXT))(table)
    assert view.ok
    assert view.lengths.tolist() == [11, 4, 0, 1, 32, 0]
    for lane in range(6):
        k, v = expected(table, pool, lane)
        used = -(-len(k) // page_size)
        assert not view.pages[lane, used:].any()
        np.testing.assert_array_equal(tokens(view.pages[lane], pool.k[0], page_size, len(k)), k)
        np.testing.assert_array_equal(tokens(view.pages[lane], pool.v[0], page_size, len(v)), v)


@pytest.mark.parametrize("page_size", PAGES)
def test_an_indptr_table_names_the_tokens(page_size):
    table, pool = make(page_size)
    view = views.indptr_table(table, ROWS, LENGTHS, page_size=page_size, capacity=60)
    assert view.ok
    indptr, last = view.kv_indptr.tolist(), view.kv_last_page_len.tolist()
    assert not view.kv_indices[indptr[-1] :].any()
    for lane in range(6):
        k, _ = expected(table, pool, lane)
        pages = view.kv_indices[indptr[lane] : indptr[lane + 1]]
        # FlashInfer knows a length as whole pages before the last one, and the tokens in that.
        assert max(len(pages) - 1, 0) * page_size + last[lane] == len(k)
        np.testing.assert_array_equal(tokens(pages, pool.k[0], page_size, len(k)), k)


def test_a_slot_mapping_names_what_a_step_writes():
    table, _ = make(4)
    start = np.array([8, 0, 0, 5, 30, 0], np.int32)  # the fourth lane has no new token: it starts behind its end
    loc, ok = views.slot_mapping(table, ROWS, start, LENGTHS, capacity=12)
    assert ok
    want = [*table[3, 8:11].tolist(), *table[1, :4].tolist(), *table[2, 30:].tolist()]
    assert loc.tolist() == want + [-1] * (12 - len(want))


def test_what_does_not_fit_is_said_and_nothing_is_named():
    table, _ = make(4)
    narrow = views.block_table(table, ROWS, LENGTHS, page_size=4, columns=7)
    short = views.indptr_table(table, ROWS, LENGTHS, page_size=4, capacity=12)
    few, ok = views.slot_mapping(table, ROWS, np.zeros(6, np.int32), LENGTHS, capacity=47)
    for array in (narrow.ok, narrow.pages, narrow.lengths, *jax.tree.leaves(short)):
        assert not array.any()
    assert not ok
    assert (few == -1).all()
    assert views.block_table(table, ROWS, LENGTHS, page_size=4, columns=8).ok
    assert views.indptr_table(table, ROWS, LENGTHS, page_size=4, capacity=13).ok
    assert views.slot_mapping(table, ROWS, np.zeros(6, np.int32), LENGTHS, capacity=48)[1]


def test_jaxs_own_paged_attention_reads_through_the_block_table():
    table, pool = make(4)
    view = views.block_table(table, ROWS, LENGTHS, page_size=4, columns=8)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(6, 2 * HEADS, DIM)).astype(np.float32)
    k_pages, v_pages = (views.head_major(leaf, 4) for leaf in (pool.k[0], pool.k[0]))
    out = gpu_paged_attention.paged_attention(
        q, k_pages, v_pages, view.pages, view.lengths, pages_per_compute_block=4, k_splits=1, interpret=True
    )
    for lane in LIVE:
        k, _ = expected(table, pool, lane)
        for head in range(2 * HEADS):
            scores = k[:, head // 2] @ q[lane, head]
            weights = np.exp(scores - scores.max())
            want = weights @ k[:, head // 2] / weights.sum()
            np.testing.assert_allclose(out[lane, head], want, rtol=2e-5, atol=2e-5)


def test_a_ledger_is_a_source_and_its_page_size_counts():
    allocator = PagedTokenToKVPoolAllocator.create(48, page_size=4)
    ledger = Ledger.create(ReqToTokenPool.create(4, 24), allocator)
    lanes = [jnp.asarray(lane, jnp.int32) for lane in ([-1, -1, 0], [0, 0, 0], [6, 9, 0])]
    ledger, rows, loc, ok = alloc_for_extend(ledger, *lanes, capacity=16)
    assert ok
    lens = [6, 9, 0]
    view = views.block_table(ledger, rows, lens, page_size=4, columns=3)
    assert view.pages.tolist() == views.block_table(ledger.table, rows, lens, page_size=4, columns=3).pages.tolist()
    assert [p for lane in view.pages.tolist() for p in lane if p] == [int(s) // 4 for s in loc if s and s % 4 == 0]
    assert views.slot_mapping(ledger, rows, [0, 0, 0], lens, capacity=16)[0][:15].tolist() == loc[:15].tolist()
    with pytest.raises(ValueError, match="pages of 3 tokens are no part of the ledger's pages of 4"):
        views.block_table(ledger, rows, lens, page_size=3, columns=3)
    with pytest.raises(ValueError, match="a leaf of 10 slots does not divide into pages of 4"):
        views.paged(jnp.zeros((10, 1, 1)), 4)


def test_no_lanes_have_no_slots():
    ledger = Ledger.create(ReqToTokenPool.create(4, 24), PagedTokenToKVPoolAllocator.create(48, page_size=4))
    none = np.zeros(0, np.int32)
    slots, ok = views.slot_mapping(ledger, none, none, none, capacity=3)
    assert (slots.tolist(), bool(ok)) == ([views.PAD_SLOT_ID] * 3, True)
    view = views.indptr_table(ledger, none, none, page_size=4, capacity=3)
    assert (view.kv_indptr.tolist(), view.kv_indices.tolist(), view.kv_last_page_len.tolist()) == ([0], [0] * 3, [])
    assert bool(view.ok)
