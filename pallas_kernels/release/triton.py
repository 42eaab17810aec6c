"""release as one Triton program: rows first, then their pages in blocks (`pallas_kernels.triton_pages`)."""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.books import Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.release import RELEASED
from pallas_kernels.triton_books import exclusive, live_rows, twins
from pallas_kernels.triton_pages import block_size, give_back


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
    _lens,
    _free_rows,
    _row_pos,
    _row_counters,
    _pages,
    _page_pos,
    _counters,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
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
    row_faults = tl.load(row_counters + 1)
    lane = tl.arange(0, LANES)
    row = tl.load(rows + lane, mask=lane < BATCH, other=0)
    live = live_rows(row, row_pos, free_rows, num_free, ROWS)
    before, behind = twins(rows, rows, row, lane, BATCH, OTHERS, False)
    used = live & ~before
    # Of a live row the later lanes are refused, of any other row all lanes: each row that is refused counts once.
    refused = (row != 0) & ~before & (~live | behind)

    allocated = tl.load(lens + row * 3 + 1, mask=used, other=0)
    owned_from = tl.load(lens + row * 3 + 2, mask=used, other=0)
    committed = tl.load(lens + row * 3, mask=used, other=0)
    first = tl.cdiv(owned_from, PAGE)
    count = tl.maximum(tl.minimum(tl.cdiv(allocated, PAGE), (WIDTH + PAGE - 1) // PAGE) - first, 0)
    freed = used.to(tl.int32)
    at = num_free + exclusive(freed)
    tl.debug_barrier()

    tl.store(lens + row * 3, tl.minimum(committed, 0), mask=used)
    tl.store(lens + row * 3 + 1, tl.minimum(allocated, 0), mask=used)
    tl.store(lens + row * 3 + 2, tl.minimum(owned_from, 0), mask=used)
    tl.store(free_rows + at, row, mask=used)
    tl.store(row_pos + row, at, mask=used)
    tl.store(row_counters, num_free + tl.sum(freed, 0))
    tl.store(row_counters + 1, row_faults + tl.sum(refused.to(tl.int32), 0))

    given, faults = give_back(row, first, count, table, pages, page_pos, free, head, BLOCK, WIDTH, PAGES, PAGE, RING)
    if RING:
        tl.store(counters + 1, free + given)
        tl.store(counters + 3, page_faults + faults)
    else:
        tl.store(counters, free + given)
        tl.store(counters + 2, page_faults + faults)


def release(*arrays: jax.Array, page_size: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.release`. Returns the arrays that it updates, in the order of RELEASED."""
    *state, rows = arrays
    batch = rows.shape[0]
    return jax_triton_adapter.call(
        _kernel,
        arrays,
        grid=(1,),
        in_place=tuple(aliases(RELEASED)),
        num_warps=8,
        num_stages=1,
        BLOCK=block_size(batch),
        **Books(*state).sizes(batch, page_size),
    )
