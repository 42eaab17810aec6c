"""release as one Pallas program (Triton lowering): rows first, then their pages (`pallas_kernels.pallas_pages`)."""
# pyright: reportArgumentType=false
# A piece of a reference, `ref.at[...]`, has no type that load and store declare.

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.books import ALLOCATED, FREE_ROWS, HEAD, OWNED_FROM, ROW_FAULTS, Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.pallas_books import barrier, exclusive, lanes_of, live_rows, number, store, twins
from pallas_kernels.pallas_pages import Held, give_back, row_pages
from pallas_kernels.release import RELEASED


def _kernel(*refs, page_size: int, interpret: bool):
    inputs, results = refs[: len(Books._fields) + 1], refs[len(Books._fields) + 1 :]
    books = Books(*inputs[:-1])._replace(**dict(zip(RELEASED, results, strict=True)))
    rows, table, lens = inputs[-1], books.req_to_token, books.lens
    free, head = books.counters[books.free], books.counters[HEAD] if books.ring else None
    page_faults = books.counters[books.free + 2]
    free_rows, row_faults = books.row_counters[FREE_ROWS], books.row_counters[ROW_FAULTS]
    lane, real = lanes_of(rows.shape[0])
    row = plgpu.load(rows.at[lane])

    live = live_rows(row, books.row_pos, books.free_rows, free_rows)
    before, behind = twins(rows, row, lane)
    used = live & ~before & real
    # Of a live row the later lanes are refused, of any other row all lanes: each row that is refused counts once.
    refused = (row != 0) & ~before & (~live | behind) & real

    known = jnp.where(used, row, 0)
    now = [plgpu.load(lens.at[known, jnp.full_like(known, column)]) for column in range(3)]
    first, count = row_pages(now[OWNED_FROM], now[ALLOCATED], page_size, table.shape[1])
    at = free_rows + exclusive(used.astype(jnp.int32))
    barrier(interpret)

    for column, length in enumerate(now):
        store(lens, (known, jnp.full_like(known, column)), jnp.minimum(length, 0), used, interpret)
    store(books.free_rows, (jnp.where(used, at, 0),), row, used, interpret)
    store(books.row_pos, (known,), at, used, interpret)
    books.row_counters[FREE_ROWS] = free_rows + number(used)
    books.row_counters[ROW_FAULTS] = row_faults + number(refused)

    held = Held(row, first, jnp.where(used, count, 0))
    given, faults = give_back(held, table, books.pages, books.page_pos, free, head, page_size, interpret)
    books.counters[books.free] = free + given
    books.counters[books.free + 2] = page_faults + faults


def release(*arrays: jax.Array, page_size: int, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.release`. Returns the arrays that it updates, in the order of RELEASED."""
    return pl.pallas_call(
        functools.partial(_kernel, page_size=page_size, interpret=interpret),
        out_shape=Books(*arrays[:-1]).shapes(RELEASED),
        input_output_aliases=aliases(RELEASED),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="release",
    )(*arrays)
