"""Pages of several rows go back to the free list, as a part of a Triton kernel of one program.

The pages are taken in blocks, in lane order, three times: every page gets the mark of its first lane in the witness;
the marks tell how many pages go back, which says where they lie; then they are written. So a page that stands twice
goes back once, at its first place, and no prefix sum is larger than a block.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import triton
import triton.language as tl

from pallas_kernels.arguments import power_of_two
from pallas_kernels.triton_books import exclusive, floor_div, table_entry, taken_pages, wrapped

COMPARISONS = 8_192  # pages x lanes that are compared at once: 32 per thread of 8 warps


def block_size(batch: int) -> int:
    """Pages per block, for `batch` lanes."""
    return max(16, min(512, COMPARISONS // power_of_two(batch)))


@triton.jit
def _block(start, row, skip, begin, end, total, table, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """(index of each item of the block, its page; 0 behind the last item)."""
    item = start + tl.arange(0, BLOCK)
    mine = (begin[None, :] <= item[:, None]) & (item[:, None] < end[None, :])
    of_row = tl.sum(tl.where(mine, row[None, :], 0), 1)
    column = item + tl.sum(tl.where(mine, skip[None, :], 0), 1)
    slot = tl.load(table_entry(table, of_row, column * PAGE, WIDTH), mask=item < total, other=0)
    return item, floor_div(slot, PAGE)


@triton.jit
def _fresh(item, page, page_pos, PAGES: tl.constexpr):
    """The item's page goes back, and this is its first item."""
    real = (page > 0) & (page <= PAGES)
    return real & (tl.load(page_pos + page, mask=real, other=0) == item + (-2147483647 - 1))


@triton.jit
def give_back(
    row,
    first,
    count,
    table,
    pages,
    page_pos,
    free,
    head,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
):
    """Release `count` pages of each lane's row, from its page `first` on.

    Returns (pages that went back, different pages that were refused). The caller holds the counters.
    """
    end = tl.cumsum(count, 0)
    begin = end - count
    skip = first - begin
    total = tl.sum(count, 0)

    for start in range(0, total, BLOCK):
        item, page = _block(start, row, skip, begin, end, total, table, BLOCK, WIDTH, PAGE)
        # A mark is below every index, so what is marked counts as taken, and the smallest mark stays.
        taken = taken_pages(page, page_pos, pages, free, head, PAGES, RING)
        tl.atomic_min(page_pos + page, item + (-2147483647 - 1), mask=taken)
    tl.debug_barrier()

    given = total * 0
    refused = total * 0
    for start in range(0, total, BLOCK):
        item, page = _block(start, row, skip, begin, end, total, table, BLOCK, WIDTH, PAGE)
        fresh = _fresh(item, page, page_pos, PAGES)
        given += tl.sum(fresh.to(tl.int32), 0)
        refused += tl.sum(((page != 0) & ~fresh).to(tl.int32), 0)

    # Different pages among the refused: the smallest, the smallest above it, and so on. Usually there is none.
    faults = total * 0
    least = total * 0
    while refused > 0:
        lowest = total * 0 + 2147483647
        refused = total * 0
        for start in range(0, total, BLOCK):
            item, page = _block(start, row, skip, begin, end, total, table, BLOCK, WIDTH, PAGE)
            looked = (page != 0) & ~_fresh(item, page, page_pos, PAGES) & ((faults == 0) | (page > least))
            refused += tl.sum(looked.to(tl.int32), 0)
            lowest = tl.minimum(lowest, tl.min(tl.where(looked, page, 2147483647), 0))
        least = lowest
        faults += tl.where(refused > 0, 1, 0)
    tl.debug_barrier()

    done = total * 0
    for start in range(0, total, BLOCK):
        item, page = _block(start, row, skip, begin, end, total, table, BLOCK, WIDTH, PAGE)
        fresh = _fresh(item, page, page_pos, PAGES)
        rank = done + exclusive(fresh.to(tl.int32))
        at = wrapped(head, free + rank, PAGES) if RING else free + given - 1 - rank
        done += tl.sum(fresh.to(tl.int32), 0)
        tl.debug_barrier()
        tl.store(pages + at, page, mask=fresh)
        tl.store(page_pos + page, at, mask=fresh)
    tl.debug_barrier()
    return given, faults
