"""What the Triton kernels of the allocation and of a ledger do alike: who is live, what is free, which lanes say the
same, which slots new tokens get.

One program serves a whole call, one lane per request. Lanes that pad the batch to a power of two hold row 0, and
nothing is stored for them.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import triton
import triton.language as tl


@triton.jit
def only_if(flag, lanes):
    """The lanes' flags where the one flag is set. (`lanes & flag` is no mask in Triton's interpreter.)"""
    return tl.where(flag, lanes, False)


@triton.jit
def exclusive(values):
    """Sum of the earlier lanes."""
    return tl.cumsum(values, 0) - values


@triton.jit
def floor_div(x, d: tl.constexpr):
    """x // d rounded down; Triton's own rounds towards 0."""
    return tl.where(x < 0, -1 - (-1 - x) // d, x // d)


@triton.jit
def ceil_div(x, d: tl.constexpr):
    """ceil(x / d) for x >= 0; the sum in Triton's own could pass int32."""
    return x // d + (x % d != 0).to(tl.int32)


@triton.jit
def table_entry(table, row, col, WIDTH: tl.constexpr):
    """Pointer to [row, col]; 64 bits wide, because a table may have more than 2^31 bytes."""
    return table + row.to(tl.int64) * WIDTH + col


@triton.jit
def live_rows(row, row_pos, free_rows, free, ROWS: tl.constexpr):
    """The row is handed out (`kvjax.freelist` says how the witness works)."""
    real = (row > 0) & (row < ROWS)
    at = tl.load(row_pos + row, mask=real, other=-1)
    listed = (at >= 0) & (at < free)
    return real & ~(listed & (tl.load(free_rows + at, mask=listed, other=0) == row))


@triton.jit
def taken_pages(page, page_pos, pages, free, head, PAGES: tl.constexpr, RING: tl.constexpr):
    """The id is a page's and the page is handed out."""
    real = (page > 0) & (page <= PAGES)
    at = tl.load(page_pos + page, mask=real, other=-1)
    depth = at
    if RING:
        depth = tl.where(at < head, at - head + PAGES, at - head)
    listed = (at >= 0) & (at < PAGES) & (depth < free)
    return real & ~(listed & (tl.load(pages + at, mask=listed, other=0) == page))


@triton.jit
def wrapped(head, rank, PAGES: tl.constexpr):
    """Index of the rank-th entry of the ring behind its head; no sum passes int32."""
    at = (head - PAGES) + rank
    return tl.where(at < 0, at + PAGES, at)


@triton.jit
def twins(rows, active, row, lane, BATCH: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """(an earlier, a later lane holds the same row); MASKED: only lanes that are active and hold a row are looked at.

    WIDTH: lanes that are compared at once.
    """
    before = tl.zeros_like(row)
    behind = tl.zeros_like(row)
    for start in range(0, BATCH, WIDTH):
        other = start + tl.arange(0, WIDTH)
        inside = other < BATCH
        held = tl.load(rows + other, mask=inside, other=0)
        if MASKED:
            inside = inside & (held != 0) & (tl.load(active + other, mask=inside, other=0) != 0)
        same = (row[:, None] == held[None, :]) & inside[None, :]
        before = tl.maximum(before, tl.max((same & (other[None, :] < lane[:, None])).to(tl.int32), 1))
        behind = tl.maximum(behind, tl.max((same & (other[None, :] > lane[:, None])).to(tl.int32), 1))
    return before > 0, behind > 0


@triton.jit
def slots_of(
    token,
    total,
    begin,
    end,
    prefix,
    started,
    first,
    last,
    pages,
    free,
    head,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
):
    """(slot, position in its row, bool[tokens, lanes] of whose it is) of some of the `total` new tokens of a call.

    Of each lane: its tokens begin .. end - 1, the length of its prefix and the pages that this touches, the rank of its
    first new page, and the slot before its first token. The slot is 0 from token `total` on.
    """
    mine = (begin[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    position = token + tl.sum(tl.where(mine, (prefix - begin)[None, :], 0), 1)
    follow = position + tl.sum(tl.where(mine, (last + 1 - prefix)[None, :], 0), 1)
    # Pages that the row touches before this one, minus those it had before the call, plus the lanes before.
    fresh_from = tl.sum(tl.where(mine, started[None, :], 0), 1)
    rank = position // PAGE - fresh_from + tl.sum(tl.where(mine, first[None, :], 0), 1)
    fresh = (position // PAGE >= fresh_from) & (token < total)
    index = wrapped(head, rank, PAGES) if RING else free - 1 - rank
    slot = tl.load(pages + index, mask=fresh, other=0) * PAGE + position % PAGE
    return tl.where(token < total, tl.where(fresh, slot, follow), 0), position, mine
