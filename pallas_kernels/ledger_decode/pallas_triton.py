"""ledger_decode as one Pallas program (Triton lowering).

The program reads everything that decides, then decides by sums over all lanes, and only then writes. A barrier stands
between the two, so no thread reads what another one writes.
"""
# pyright: reportArgumentType=false
# A piece of a reference, `ref.at[...]`, has no type that load and store declare.

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import warps_of
from pallas_kernels.books import ALLOCATED, COMMITTED, FREE_ROWS, HEAD, OWNED_FROM, Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.ledger_decode import DECODED
from pallas_kernels.pallas_books import (
    barrier,
    exclusive,
    lanes_of,
    live_rows,
    number,
    read2,
    store,
    taken_pages,
    twins,
    wrapped,
)


def _kernel(*refs, page_size: int, interpret: bool):
    *inputs, table, lens, counters, loc, positions, ok = refs
    books, (rows, active) = Books(*inputs[:-2]), inputs[-2:]
    size, page = rows.shape[0], jnp.int32(page_size)
    free, head = counters[books.free], counters[HEAD] if books.ring else None
    free_rows = books.row_counters[FREE_ROWS]
    lane, real = lanes_of(size)
    row = plgpu.load(rows.at[lane])

    def used(at):
        return (plgpu.load(active.at[at]) != 0) & (plgpu.load(rows.at[at]) != 0)

    live = used(lane)
    known = jnp.where((row >= 0) & (row < lens.shape[0]), row, 0)
    committed, allocated, owned_from = (
        plgpu.load(lens.at[known, jnp.full_like(known, column)]) for column in (COMMITTED, ALLOCATED, OWNED_FROM)
    )
    position = jnp.where(live, committed, 0)
    offset = lax.rem(position, page)
    has = live & (position < allocated)  # a slot that the row was given before
    wants = live & ~has
    opens = wants & (offset == 0)

    legal = live_rows(row, books.row_pos, books.free_rows, free_rows)
    legal &= (position < table.shape[1]) & (owned_from <= position - offset)
    before, behind = twins(rows, row, lane, used)
    legal &= ~before & ~behind
    last = read2(table, row, position - 1, live & (position > 0))
    if page_size > 1:  # the page that goes on must be handed out, and the token before must lie where it should
        there = taken_pages(lax.div(last, page), books.page_pos, books.pages, free, head)
        there &= lax.rem(last, page) == offset - 1
        legal &= ~(wants & ~opens) | (there & (last >= 0))
    again = read2(table, row, position, has)

    total = number(opens & real)
    rank = exclusive((opens & real).astype(jnp.int32))  # a padding lane's is its twin's, or one more
    rank = jnp.where(real, rank, total - opens.astype(jnp.int32))
    good = (number(live & ~legal & real) == 0) & (total <= free)

    served = opens & good
    at = free - 1 - rank if head is None else wrapped(head, rank, books.pages.shape[0])
    fresh = plgpu.load(books.pages.at[jnp.where(served, at, 0)]) * page
    slot = jnp.where(has, again, jnp.where(opens, fresh, last + 1))
    done = live & good
    zero = jnp.where(done, known, 0)
    barrier(interpret)
    store(table, (zero, jnp.where(done, position, 0)), slot, done, interpret)
    store(lens, (zero, jnp.full_like(zero, COMMITTED)), position + 1, done, interpret)
    store(lens, (zero, jnp.full_like(zero, ALLOCATED)), jnp.maximum(position + 1, allocated), done, interpret)
    plgpu.store(loc.at[lane], jnp.where(done, slot, 0))
    plgpu.store(positions.at[lane], jnp.where(done, position, 0))
    taken = jnp.where(good, total, 0)
    counters[books.free] = free - taken
    if head is not None:
        counters[HEAD] = wrapped(head, taken, books.pages.shape[0])
    ok[()] = good


def ledger_decode(*arrays: jax.Array, page_size: int, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_decode`. Returns the arrays of DECODED, then (loc, positions, ok)."""
    *state, rows, _ = arrays
    lanes = jax.ShapeDtypeStruct(rows.shape, jnp.int32)
    return pl.pallas_call(
        functools.partial(_kernel, page_size=page_size, interpret=interpret),
        out_shape=(*Books(*state).shapes(DECODED), lanes, lanes, jax.ShapeDtypeStruct((), jnp.bool_)),
        input_output_aliases=aliases(DECODED),
        compiler_params=plgpu.CompilerParams(num_warps=warps_of(rows.shape[0]), num_stages=1),
        interpret=interpret,
        name="ledger_decode",
    )(*arrays)
