"""Sliding-window bookkeeping, compiled: in place at every size, the mapping included."""

from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from kvjax import (
    Ledger,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    release_rows,
    release_window,
    window_loc,
    window_pages,
)
from kvjax.compiled import compile_for, h200_available, inspect

pytestmark = pytest.mark.compiled

BATCH, CHUNK, WINDOW, CONTEXT, SLOTS = 4, 64, 64, 512, 1 << 18


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def flag(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def allocator(kind, slots, page, sort=False):
    if kind == "dual":
        return SWATokenToKVPoolAllocator.create(slots, slots // 2, page, sort)
    if kind == "pure":
        return PureSWATokenToKVPoolAllocator.create(slots, page, sort)
    return SWARingTokenToKVPoolAllocator.create(slots, page, slots // CONTEXT, WINDOW, CHUNK, sort)


def ledger(kind, slots, page):
    return Ledger.create(ReqToTokenPool.create(slots // CONTEXT, CONTEXT), allocator(kind, slots, page), WINDOW)


def decode(state, rows, steps):
    """The order of a decode program: release, allocate, table, write, read; then rows that finish go back."""

    def body(carry):
        step, state, seen = carry
        state, loc, positions, _ = alloc_for_decode(state, rows)
        swa_loc = window_loc(state, rows, positions, loc)
        pages = window_pages(state, rows, positions // state.page_size, count=WINDOW // state.page_size + 2)
        token = swa_loc + jnp.sum(pages, axis=1)  # stands for what the model makes of what it reads
        state = release_rows(state, jnp.where(token % 7 == 0, rows, 0))
        return step + 1, state, seen + jnp.sum(token)

    return jax.lax.while_loop(lambda c: c[0] < steps, body, (jnp.int32(0), state, jnp.int32(0)))


def extend(state, rows, prefix, seq):
    state, rows, loc, ok = alloc_for_extend(state, rows, prefix, seq, capacity=CHUNK)
    lane = jnp.arange(CHUNK) % BATCH
    swa_loc = window_loc(state, rows[lane], prefix[lane] + jnp.arange(CHUNK) // BATCH, loc)
    return release_window(state, rows, swa_loc, max_tokens=CHUNK), swa_loc, ok


LEDGER = {"decode": (decode, (i32(BATCH), i32())), "extend": (extend, (i32(BATCH),) * 3)}
FREES = ("free", "free_swa", "free_full", "free_page_ids", "free_swa_page_ids", "free_full_page_ids")
ALLOCATOR = {
    **{name: (lambda a, loc, name=name: getattr(a, name)(loc), (i32(CHUNK),)) for name in FREES},
    "free_group": (lambda a, *args: a.free_group(*args), (i32(CHUNK), *(flag(CHUNK),) * 3)),
    "alloc_extend_swa_tail": (
        lambda a, p, s, loc, n: a.alloc_extend_swa_tail(p, s, loc, n, capacity=CHUNK),
        (i32(1), i32(1), i32(1), i32()),
    ),
    "alloc": (lambda a, n: a.alloc(n, capacity=CHUNK), (i32(),)),
    "translate after a release": (lambda a, loc: (lambda b: (b, b.translate(loc)))(a.free_swa(loc)), (i32(CHUNK),)),
}
CASES = [(kind, name, page) for kind in ("dual", "pure", "ring") for name in LEDGER for page in (1, 16)] + [
    ("dual", name, page) for name in ALLOCATOR for page in (1, 16)
]


def report(kind, name, page, slots, platform: Literal["cpu", "h200"] = "cpu"):
    program, args = (LEDGER | ALLOCATOR)[name]
    state = jax.eval_shape(lambda: (ledger if name in LEDGER else allocator)(kind, slots, page))
    return state, inspect(compile_for(program, (state, *args), platform, donate_argnums=0))


def walked(found, leaves):
    """Operations over something as large as a list of pages, and copies of any leaf, however small."""
    shapes = {f"s32[{','.join(map(str, leaf.shape))}]" for leaf in leaves if leaf.size > 8}  # not the counters
    pages = min(leaf.size * 4 for leaf in leaves if leaf.size > SLOTS // 64)
    return [str(op) for op in found.large_ops(1) if op.nbytes >= pages or (op.opcode == "copy" and op.shape in shapes)]


@pytest.mark.parametrize(("kind", "name", "page"), CASES)
def test_nothing_is_copied_and_temporaries_do_not_grow(kind, name, page):
    """At N slots and at 4N: every leaf is updated where it lies, and what a call needs besides stays the same."""
    temporary = []
    for slots in (SLOTS, 4 * SLOTS):
        state, found = report(kind, name, page, slots)
        leaves = jax.tree.leaves(state)
        assert found.alias_bytes >= sum(leaf.size * 4 for leaf in leaves)
        assert not walked(found, leaves)
        temporary.append(found.temp_bytes)
    assert temporary[1] <= temporary[0] + 256


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["dual", "pure", "ring"])
@pytest.mark.parametrize("name", LEDGER)
def test_it_compiles_for_an_h200_without_copies(kind, name):
    available, why = h200_available()
    assert available, f"`make test` installs the deviceless compiler: {why}"
    small, large = (report(kind, name, 16, slots, "h200") for slots in (SLOTS, 4 * SLOTS))
    for state, found in (small, large):
        assert not walked(found, jax.tree.leaves(state))
    assert large[1].temp_bytes <= small[1].temp_bytes + 4096
