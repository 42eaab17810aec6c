"""ledger_extend as one Triton program: decide, give back what rows hold beyond their prefix, then the new tokens.

One program, because what it decides it also writes: rows, pages and counters would otherwise be read by programs that
start after the first has written them. The tokens are taken in blocks, as many as there are.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.books import Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.ledger_extend import EXTENDED
from pallas_kernels.triton_books import (
    exclusive,
    live_rows,
    only_if,
    slots_of,
    table_entry,
    taken_pages,
    twins,
    wrapped,
)
from pallas_kernels.triton_pages import block_size, give_back

NEW_ROW = tl.constexpr(-1)


@triton.jit
def _goes_on(inside, prefix, last, page_pos, pages, free, head, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """Where the chunk begins inside a page: the page is handed out and the token before lies where it should."""
    taken = taken_pages(last // PAGE, page_pos, pages, free, head, PAGES, False)
    return ~inside | (taken & (last >= 0) & (last % PAGE == (prefix - 1) % PAGE))


@triton.jit
def _kernel(
    table,
    lens,
    free_rows,
    row_pos,
    generation,
    row_counters,
    pages,
    page_pos,
    counters,
    rows,
    prefix_lens,
    seq_lens,
    rows_out,
    loc,
    ok,
    _table,
    _lens,
    _generation,
    _row_counters,
    _pages,
    _page_pos,
    _counters,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
):
    head = tl.load(counters)
    free = tl.load(counters + 1) if RING else head
    page_faults = tl.load(counters + 3) if RING else tl.load(counters + 2)
    num_free = tl.load(row_counters)
    lane = tl.arange(0, LANES)
    real = lane < BATCH
    row = tl.load(rows + lane, mask=real, other=0)
    prefix = tl.load(prefix_lens + lane, mask=real, other=0)
    seq = tl.load(seq_lens + lane, mask=real, other=0)

    wants = row == NEW_ROW
    held = row > 0
    grows = seq > prefix
    known = tl.where(held & (row < ROWS), row, 0)
    committed = tl.load(lens + known * 3, mask=held, other=0)
    allocated = tl.load(lens + known * 3 + 1, mask=held, other=0)
    owned_from = tl.load(lens + known * 3 + 2, mask=held, other=0)
    started = tl.cdiv(prefix, PAGE)  # pages that the prefix touches
    own = tl.where(wants, started * PAGE, tl.minimum(owned_from, started * PAGE))
    before_it = held & (prefix > 0) & (prefix <= WIDTH)
    last = tl.load(table_entry(table, known, prefix - 1, WIDTH), mask=before_it, other=0)
    inside = grows & (prefix % PAGE != 0)

    legal = wants | live_rows(row, row_pos, free_rows, num_free, ROWS)
    legal = legal & (prefix <= committed)
    legal = ((row == 0) & (seq == prefix)) | ((row != 0) & legal)
    legal = legal & (prefix >= 0) & (seq >= prefix) & (seq <= WIDTH)
    legal = legal & (~inside | (own <= prefix - prefix % PAGE))
    if PAGE > 1:
        legal = legal & _goes_on(inside, prefix, last, page_pos, pages, free, head, PAGES, PAGE)
    before, behind = twins(rows, rows, row, lane, BATCH, OTHERS, False)
    legal = legal & ~(held & (before | behind))
    wanted = tl.sum(wants.to(tl.int32), 0)
    lawful = (tl.sum((real & ~legal).to(tl.int32), 0) == 0) & (wanted <= num_free)

    keep = tl.maximum(started, tl.cdiv(owned_from, PAGE))
    most = tl.minimum(tl.cdiv(allocated, PAGE), (WIDTH + PAGE - 1) // PAGE)
    grown = only_if(lawful, grows)
    surplus = tl.where(held & grown, tl.maximum(most - keep, 0), 0)
    new = tl.where(grown, seq - prefix, 0)
    needed = tl.where(grown, tl.cdiv(seq, PAGE) - started, 0)
    tokens = tl.sum(new, 0)
    needs = tl.sum(needed, 0)
    fits = lawful & (tokens <= CAPACITY) & (needs <= free + tl.sum(surplus, 0))
    tl.debug_barrier()

    # Pages that a row has beyond its prefix go back, but only if the whole call will then succeed.
    given, faults = give_back(
        row,
        keep,
        tl.where(fits, surplus, 0),
        table,
        pages,
        page_pos,
        free,
        head,
        BLOCK,
        WIDTH,
        PAGES,
        PAGE,
        RING,
    )
    free = free + given
    good = fits & (needs <= free)
    if PAGE > 1:
        # A table in which two rows name one page may end here: the page that goes on has just gone back.
        goes_on = _goes_on(inside, prefix, last, page_pos, pages, free, head, PAGES, PAGE)
        good = good & (tl.sum((real & ~goes_on).to(tl.int32), 0) == 0)

    taken_rows = tl.where(good, wanted, 0)
    opened = only_if(good, wants)
    at = num_free - taken_rows + exclusive(wants.to(tl.int32))
    row = tl.where(wants, tl.load(free_rows + at, mask=opened, other=0), row)
    age = tl.load(generation + row, mask=opened, other=0)
    tl.debug_barrier()
    tl.store(generation + row, age + 1, mask=opened)
    tl.store(row_counters, num_free - taken_rows)
    tl.store(rows_out + lane, tl.where(good, row, 0), mask=real)
    written = only_if(good, (row > 0) & (wants | grows))
    tl.store(lens + row * 3, seq, mask=written)
    tl.store(lens + row * 3 + 1, seq, mask=written)
    tl.store(lens + row * 3 + 2, own, mask=written)
    pages_taken = tl.where(good, needs, 0)
    if RING:
        tl.store(counters, wrapped(head, pages_taken, PAGES))
        tl.store(counters + 1, free - pages_taken)
        tl.store(counters + 3, page_faults + faults)
    else:
        tl.store(counters, free - pages_taken)
        tl.store(counters + 2, page_faults + faults)
    tl.store(ok, good)

    end = tl.cumsum(new, 0)
    begin = end - new
    first = exclusive(needed)  # rank of the lane's first new page
    tokens = tl.where(good, tokens, 0)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        slot, position, mine = slots_of(
            token, tokens, begin, end, prefix, started, first, last, pages, free, head, PAGES, PAGE, RING
        )
        of_row = tl.sum(tl.where(mine, row[None, :], 0), 1)
        tl.store(loc + token, slot, mask=token < CAPACITY)
        tl.store(table_entry(table, of_row, position, WIDTH), slot, mask=token < tokens)
    for start in range(tl.cdiv(tokens, BLOCK) * BLOCK, CAPACITY, BLOCK):
        token = start + tl.arange(0, BLOCK)
        tl.store(loc + token, tl.zeros_like(token), mask=token < CAPACITY)


def ledger_extend(*arrays: jax.Array, page_size: int, capacity: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_extend`. Returns the arrays of EXTENDED, then (rows, loc, ok)."""
    *state, rows, _, _ = arrays
    batch = rows.shape[0]
    return jax_triton_adapter.call(
        _kernel,
        arrays,
        grid=(1,),
        in_place=tuple(aliases(EXTENDED)),
        out_shapes=(
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        num_warps=8,
        num_stages=1,
        BLOCK=block_size(batch),
        CAPACITY=capacity,
        **Books(*state).sizes(batch, page_size),
    )
