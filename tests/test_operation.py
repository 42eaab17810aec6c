"""What every operation shares: int32 at the boundary, one trace, fixed metadata."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    release_rows,
)
from kvjax.operation import int32, mask, narrow, once_if, operation, same_length, state, static


@pytest.mark.parametrize("value", [2**32 + 5, -(2**31) - 1, 2**31])
@pytest.mark.parametrize("form", [int, np.int64, lambda v: [v], lambda v: np.array([1, v]), lambda v: ([v],)])
def test_b47_host_integers_that_do_not_fit_int32_are_refused(value, form):
    with pytest.raises(ValueError, match=rf"{value} does not fit int32 \(-2147483648 .. 2147483647\)"):
        narrow(form(value))


def test_b47_every_release_refuses_a_64_bit_id_instead_of_cutting_it():
    big = np.array([2**32 + 5], np.int64)  # 5 when cut to 32 bits
    paged, token = PagedTokenToKVPoolAllocator.create(32, 4), TokenToKVPoolAllocator.create(8)
    pool = ReqToTokenPool.create(8, 4)
    ledger = Ledger.create(pool, paged)
    for call in (paged.free, paged.free_segment, paged.free_page_ids, token.free, token.free_segment, pool.free_rows):
        with pytest.raises(ValueError, match="4294967301 does not fit int32"):
            call(big)
    for kind in ("tokens", "pages"):
        with pytest.raises(ValueError, match="4294967301 does not fit int32"):
            paged.free_group(**{kind: big})
    with pytest.raises(ValueError, match="4294967301 does not fit int32"):
        release_rows(ledger, big)
    with pytest.raises(ValueError, match="4294967301 does not fit int32"):
        alloc_for_extend(ledger, [-1], [0], big, capacity=4)
    with pytest.raises(ValueError, match="4294967301 does not fit int32"):
        paged.alloc(2**32 + 5, capacity=4)


def test_small_int64_and_lists_become_int32():
    assert narrow([1, 2]).dtype == np.int32
    assert narrow(np.array([1, 2])).dtype == np.int32
    assert narrow([]).dtype == np.int32
    assert narrow(((1, 2), 3))[1].dtype == np.int32
    assert narrow(True) is True
    assert narrow(None) is None


def test_int32_shows_dtype_and_shape():
    with pytest.raises(ValueError, match="loc must be int32, got float32"):
        int32("loc", jnp.zeros(2), 1)
    with pytest.raises(ValueError, match=r"loc must have rank 1, got shape \(2, 1\)"):
        int32("loc", jnp.zeros((2, 1), jnp.int32), 1)


def test_mask_shows_dtype_and_both_shapes():
    with pytest.raises(ValueError, match="active must be bool, got int32"):
        mask("active", jnp.zeros(2, jnp.int32), (2,))
    with pytest.raises(ValueError, match=r"active must have shape \(3,\), one entry per lane, got \(2,\)"):
        mask("active", jnp.zeros(2, bool), (3,))


def test_same_length_shows_both():
    with pytest.raises(ValueError, match="a has 2 lanes but b has 3"):
        same_length(a=jnp.zeros(2), b=jnp.zeros(3))
    assert same_length(a=jnp.zeros(2), b=jnp.zeros(2)) == 2


def test_once_if_runs_the_body_once_or_not_at_all():
    add = jax.jit(lambda p, x: once_if(p, lambda v: v + 1, x))
    assert [add(p, 5).item() for p in (True, False)] == [6, 5]
    each = jax.vmap(lambda p, x: once_if(p, lambda v: v + 1, x))
    assert each(jnp.array([True, False]), jnp.array([5, 5])).tolist() == [6, 5]


def test_state_is_a_frozen_pytree_with_static_metadata():
    @state
    class Thing:
        x: jax.Array
        n: int = static()

    thing = Thing(jnp.zeros(2), 3)
    assert len(jax.tree.leaves(thing)) == 1
    assert jax.tree.structure(thing) != jax.tree.structure(Thing(jnp.zeros(2), 4))
    with pytest.raises(AttributeError, match="n"):
        thing.n = 5  # type: ignore[misc]


def test_an_eager_operation_is_traced_once_per_shape():
    traces = []

    @operation("capacity")
    def double(x, *, capacity):
        traces.append(capacity)
        return x * 2

    for value in range(5):
        double([value, 1], capacity=4)
    assert traces == [4]
    double([1, 2], capacity=8)
    assert traces == [4, 8]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [False, True])
def test_b59_twenty_steps_trace_each_operation_once_and_keep_static_fields(page_size, need_sort):
    allocator = (
        TokenToKVPoolAllocator.create(64, need_sort)
        if page_size == 1
        else PagedTokenToKVPoolAllocator.create(64, page_size, need_sort)
    )
    ledger = Ledger.create(ReqToTokenPool.create(4, 32), allocator)
    structure, traces = jax.tree.structure(ledger), {}

    def counted(name, fn):
        def body(*args):
            traces[name] = traces.get(name, 0) + 1
            return fn(*args)

        return jax.jit(body)

    extend = counted("extend", partial(alloc_for_extend, capacity=16))
    decode, release = counted("decode", alloc_for_decode), counted("release", release_rows)
    alloc = counted("alloc", lambda a: a.alloc(page_size, capacity=16))
    free = counted("free", lambda a, loc: a.free(loc))
    for step in range(20):
        ledger, rows, _, ok = extend(ledger, jnp.array([-1, 0]), jnp.array([0, 0]), jnp.array([step % 7 + 1, 0]))
        assert ok
        ledger, _, _, ok = decode(ledger, rows)
        assert ok
        held, loc, ok = alloc(ledger.allocator)
        assert ok
        ledger = Ledger(ledger.table, free(held, loc), ledger.lens)
        ledger = release(ledger, rows)
        assert jax.tree.structure(ledger) == structure
    assert traces == {"extend": 1, "decode": 1, "release": 1, "alloc": 1, "free": 1}
    assert {f._cache_size() for f in (extend, decode, release, alloc, free)} == {1}
    assert int(ledger.faults) == 0
