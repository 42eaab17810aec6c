"""ledger_extend as one Pallas program (Triton lowering): decide, give back what rows hold beyond their prefix, then
the new tokens, in blocks.

One program, because what it decides it also writes: rows, pages and counters would otherwise be read by programs that
start after the first has written them.
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

from pallas_kernels.arguments import ceil_div, div
from pallas_kernels.books import ALLOCATED, COMMITTED, FREE_ROWS, HEAD, OWNED_FROM, Books, aliases
from pallas_kernels.books import unsupported as unsupported  # for the registry
from pallas_kernels.ledger_extend import EXTENDED
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
from pallas_kernels.pallas_pages import Held, block_size, give_back

NEW_ROW = -1


def _kernel(*refs, page_size: int, interpret: bool):
    inputs, results = refs[: len(Books._fields) + 3], refs[len(Books._fields) + 3 :]
    books = Books(*inputs[:-3])._replace(**dict(zip(EXTENDED, results[:-3], strict=True)))
    (rows, prefix_lens, seq_lens), (rows_out, loc, ok) = inputs[-3:], results[-3:]
    table, lens, width = books.req_to_token, books.lens, books.req_to_token.shape[1]
    free, head = books.counters[books.free], books.counters[HEAD] if books.ring else None
    page_faults, free_rows = books.counters[books.free + 2], books.row_counters[FREE_ROWS]
    at, real = lanes_of(rows.shape[0])
    row, prefix, seq = (jnp.where(real, plgpu.load(a.at[at]), 0) for a in (rows, prefix_lens, seq_lens))

    wants, held, grows = row == NEW_ROW, row > 0, seq > prefix
    known = jnp.where(held & (row < lens.shape[0]), row, 0)
    now = [jnp.where(held, plgpu.load(lens.at[known, jnp.full_like(known, c)]), 0) for c in range(3)]
    started = ceil_div(prefix, page_size)  # pages that the prefix touches
    own = jnp.where(wants, started * page_size, jnp.minimum(now[OWNED_FROM], started * page_size))
    last = read2(table, row, prefix - 1, held)
    within = lax.rem(prefix, jnp.int32(page_size))
    inside = grows & (within != 0)

    def goes_on(free):
        """Where the chunk begins inside a page: it is handed out and the token before lies where it should."""
        if page_size == 1:
            return jnp.full(inside.shape, True)
        taken = taken_pages(div(last, page_size), books.page_pos, books.pages, free, head)
        there = taken & (last >= 0) & (lax.rem(last, jnp.int32(page_size)) == within - 1)
        return ~inside | there

    named = (wants | live_rows(row, books.row_pos, books.free_rows, free_rows)) & (prefix <= now[COMMITTED])
    legal = ((row == 0) & (seq == prefix)) | ((row != 0) & named)
    legal &= (prefix >= 0) & (seq >= prefix) & (seq <= width)
    legal &= (~inside | (own <= prefix - within)) & goes_on(free)
    before, behind = twins(rows, row, jnp.arange(row.shape[0], dtype=jnp.int32))
    legal &= ~(held & (before | behind))
    wanted = number(wants)
    lawful = (number(real & ~legal) == 0) & (wanted <= free_rows)

    keep = jnp.maximum(started, ceil_div(now[OWNED_FROM], page_size))
    most = jnp.minimum(ceil_div(now[ALLOCATED], page_size), pl.cdiv(width, page_size))
    surplus = jnp.where(held & grows & lawful, jnp.maximum(most - keep, 0), 0)
    new = jnp.where(grows & lawful, seq - prefix, 0)
    needed = jnp.where(grows & lawful, ceil_div(seq, page_size) - started, 0)
    needs = jnp.sum(needed)
    fits = lawful & (jnp.sum(new) <= loc.shape[0]) & (needs <= free + jnp.sum(surplus))
    barrier(interpret)

    # Pages that a row has beyond its prefix go back, but only if the whole call will then succeed.
    beyond = Held(row, keep, jnp.where(fits, surplus, 0))
    given, faults = give_back(beyond, table, books.pages, books.page_pos, free, head, page_size, interpret)
    barrier(interpret)
    free = free + given
    # A table in which two rows name one page may end here: the page that goes on has just gone back.
    good = fits & (needs <= free) & (number(real & ~goes_on(free)) == 0)

    taken_rows = jnp.where(good, wanted, 0)
    opens = wants & good
    at_row = jnp.where(opens, free_rows - taken_rows + exclusive(wants.astype(jnp.int32)), 0)
    row = jnp.where(wants, jnp.where(good, plgpu.load(books.free_rows.at[at_row]), 0), row)
    written = good & (row > 0) & (wants | grows)
    safe = jnp.where(written, row, 0)
    age = plgpu.load(books.generation.at[safe])
    barrier(interpret)
    store(books.generation, (safe,), age + 1, opens, interpret)
    for column, length in ((COMMITTED, seq), (ALLOCATED, seq), (OWNED_FROM, own)):
        store(lens, (safe, jnp.full_like(safe, column)), length, written, interpret)
    store(rows_out, (at,), jnp.where(good, row, 0), real, interpret)
    books.row_counters[FREE_ROWS] = free_rows - taken_rows
    pages_taken = jnp.where(good, needs, 0)
    books.counters[books.free] = free - pages_taken
    books.counters[books.free + 2] = page_faults + faults
    if head is not None:
        books.counters[HEAD] = wrapped(head, pages_taken, books.pages.shape[0])
    ok[()] = good
    new = jnp.where(good, new, 0)
    _write_tokens(row, prefix, started, new, needed, last, books, loc, free, head, page_size, interpret)


def _write_tokens(row, prefix, started, new, needed, last, books, loc, free, head, page_size: int, interpret: bool):
    """The slot of every new token, into `loc` and the page table; 0 behind the last one."""
    block, capacity = block_size(row.shape[0]), loc.shape[0]
    end, total = jnp.cumsum(new), jnp.sum(new)
    begin, first = end - new, exclusive(needed)

    def turn(k, carry):
        token = k * block + jnp.arange(block, dtype=jnp.int32)
        mine = (begin[None, :] <= token[:, None]) & (token[:, None] < end[None, :])

        def of(values):
            return jnp.sum(jnp.where(mine, values[None, :], 0), axis=1)

        valid, position = token < total, token + of(prefix - begin)
        nth = div(position, page_size) - of(started)  # negative: still the page that the prefix ends in
        fresh, rank = valid & (nth >= 0), of(first) + nth
        index = free - 1 - rank if head is None else wrapped(head, rank, books.pages.shape[0])
        page = plgpu.load(books.pages.at[jnp.where(fresh, index, 0)])
        slot = page * page_size + lax.rem(position, jnp.int32(page_size))
        slot = jnp.where(valid, jnp.where(fresh, slot, position + of(last + 1 - prefix)), 0)
        inside = token < capacity
        store(loc, (jnp.where(inside, token, 0),), slot, inside, interpret)
        at = jnp.where(valid, of(row), 0), jnp.where(valid, position, 0)
        store(books.req_to_token, at, slot, valid, interpret)
        return carry

    lax.fori_loop(0, pl.cdiv(capacity, block), turn, jnp.int32(0))


def ledger_extend(*arrays: jax.Array, page_size: int, capacity: int, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.ledger_extend`. Returns the arrays of EXTENDED, then (rows, loc, ok)."""
    *state, rows, _, _ = arrays
    return pl.pallas_call(
        functools.partial(_kernel, page_size=page_size, interpret=interpret),
        out_shape=(
            *Books(*state).shapes(EXTENDED),
            jax.ShapeDtypeStruct(rows.shape, jnp.int32),
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
        input_output_aliases=aliases(EXTENDED),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="ledger_extend",
    )(*arrays)
