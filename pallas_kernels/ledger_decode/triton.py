"""ledger_decode as one Triton program.

The program reads everything that decides, then decides by sums over all lanes, and only then writes. A barrier stands
between the two, so no thread reads what another one writes.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton compiles the text of its kernels; read as Python, it has other types.

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.arguments import warps_of
from pallas_kernels.books import Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.ledger_decode import DECODED
from pallas_kernels.triton_books import exclusive, live_rows, only_if, table_entry, taken_pages, twins, wrapped


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
    active,
    loc,
    positions,
    ok,
    _table,
    _lens,
    _counters,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    OTHERS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
):
    head = tl.load(counters)
    free = tl.load(counters + 1) if RING else head
    lane = tl.arange(0, LANES)
    real = lane < BATCH
    row = tl.load(rows + lane, mask=real, other=0)
    live = (row != 0) & (tl.load(active + lane, mask=real, other=0) != 0)

    known = tl.where((row >= 0) & (row < ROWS), row, 0)
    committed = tl.load(lens + known * 3)
    allocated = tl.load(lens + known * 3 + 1)
    owned_from = tl.load(lens + known * 3 + 2)
    position = tl.where(live, committed, 0)
    offset = position % PAGE
    has = live & (position < allocated)  # a slot that the row was given before
    wants = live & ~has
    opens = wants & (offset == 0)

    legal = live_rows(row, row_pos, free_rows, tl.load(row_counters), ROWS)
    legal = legal & (position < WIDTH) & (owned_from <= position - offset)
    before, behind = twins(rows, active, row, lane, BATCH, OTHERS, True)
    legal = legal & ~before & ~behind
    inside = live & (position > 0) & (position <= WIDTH)
    last = tl.load(table_entry(table, known, position - 1, WIDTH), mask=inside, other=0)
    if PAGE > 1:  # the page that goes on must be handed out, and the token before must lie where it should
        there = taken_pages(last // PAGE, page_pos, pages, free, head, PAGES, RING) & (last % PAGE == offset - 1)
        legal = legal & (~(wants & ~opens) | (there & (last >= 0)))
    again = tl.load(table_entry(table, known, position, WIDTH), mask=has & (position < WIDTH), other=0)

    opened = opens.to(tl.int32)
    total = tl.sum(opened, 0)
    rank = exclusive(opened)
    good = (tl.sum((live & ~legal).to(tl.int32), 0) == 0) & (total <= free)
    at = wrapped(head, rank, PAGES) if RING else free - 1 - rank
    fresh = tl.load(pages + at, mask=only_if(good, opens), other=0) * PAGE
    slot = tl.where(has, again, tl.where(opens, fresh, last + 1))
    done = only_if(good, live)
    tl.debug_barrier()

    tl.store(table_entry(table, known, position, WIDTH), slot, mask=done)
    tl.store(lens + known * 3, position + 1, mask=done)
    tl.store(lens + known * 3 + 1, tl.maximum(position + 1, allocated), mask=done)
    tl.store(loc + lane, tl.where(done, slot, 0), mask=real)
    tl.store(positions + lane, tl.where(done, position, 0), mask=real)
    taken = tl.where(good, total, 0)
    if RING:
        tl.store(counters, wrapped(head, taken, PAGES))
        tl.store(counters + 1, free - taken)
    else:
        tl.store(counters, free - taken)
    tl.store(ok, good)


def ledger_decode(*arrays: jax.Array, page_size: int) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_decode`. Returns the arrays of DECODED, then (loc, positions, ok)."""
    *state, rows, _ = arrays
    batch = rows.shape[0]
    return jax_triton_adapter.call(
        _kernel,
        arrays,
        grid=(1,),
        in_place=tuple(aliases(DECODED)),
        out_shapes=(
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        num_warps=warps_of(batch),
        num_stages=1,
        **Books(*state).sizes(batch, page_size),
    )
