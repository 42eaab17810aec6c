"""A ledger's operations: every implementation does to random states what kvjax does, bit for bit."""
# pyright: reportArgumentType=false
# States are NumPy arrays here, in the fields and arguments of jax.Array.

from __future__ import annotations

import functools

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
from kvjax.kernels import books_of, with_books
from pallas_kernels import pallas_pages, registry
from pallas_kernels.books import Books
from pallas_kernels.ledger_decode import DECODED, ledger_decode
from pallas_kernels.ledger_extend import EXTENDED, ledger_extend
from pallas_kernels.release import RELEASED, release
from tests.kernels import mutants
from tests.kernels.ledger_states import SHAPES, Case, Shape, cases, random_books
from tests.kernels.triton_interpreter import Call, run


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """More than one block of pages and of tokens, also where JAX's interpreter runs the small shapes."""
    monkeypatch.setattr(pallas_pages, "MOST", 16)


UPDATED = {"ledger_decode": DECODED, "ledger_extend": EXTENDED, "release": RELEASED}
OPERATIONS = {"ledger_decode": ledger_decode, "ledger_extend": ledger_extend, "release": release}
COUNT = {"Llama-3-8B serving": 3, "odd batch, pages of 3": 18}  # states per shape and operation, else 12
# What runs in this process compiles for seconds; the shapes left out differ from these in nothing but sizes.
INTERPRETED = ("odd batch, pages of 3", "token ring", "pages of 16")


@functools.cache
def ledger(shape: Shape) -> Ledger:
    """A ledger of the shape's kind, whose arrays are replaced."""
    size = shape.num_pages * shape.page_size
    if shape.ring:
        allocator = TokenToKVPoolAllocator.create(size)
    else:
        allocator = PagedTokenToKVPoolAllocator.create(size, shape.page_size)
    return Ledger.create(ReqToTokenPool.create(shape.rows, shape.context), allocator)


@functools.cache
def by_kvjax(operation: str, shape: Shape):
    """The jax.numpy code of kvjax, as a function of arrays -> (arrays that it updates, other results)."""

    @jax.jit
    def call(books: Books, *lanes: jax.Array):
        before = with_books(ledger(shape), books)
        if operation == "ledger_decode":
            after, *out = alloc_for_decode(before, *lanes, implementation="xla")
        elif operation == "ledger_extend":
            after, *out = alloc_for_extend(before, *lanes, capacity=shape.capacity, implementation="xla")
        else:
            after, out = release_rows(before, *lanes, implementation="xla"), ()
        return books_of(after), tuple(out)

    return call


@functools.cache
def expected(operation: str, name: str) -> list[tuple[Case, Books, tuple[np.ndarray, ...]]]:
    """The cases of a shape, the books after each and the other results, on the host."""
    shape, out = SHAPES[name], []
    for case in cases(operation, shape, COUNT.get(name, 12)):
        out.append((case, *jax.tree.map(np.asarray, by_kvjax(operation, shape)(case.books, *case.lanes))))
    return out


def assert_same(case: Case, want: tuple[Books, tuple[np.ndarray, ...]], got) -> None:
    """got: what an implementation returns, the updated arrays and then the other results."""
    books, out = want
    names = (*UPDATED[case.operation], *(f"result {i}" for i in range(len(out))))
    values = (*(getattr(books, name) for name in UPDATED[case.operation]), *out)
    assert len(got) == len(values)
    for name, value, mine in zip(names, values, got, strict=True):
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(mine, value, err_msg=f"{name} after {case.operation} of {case.lanes}")


def assert_all_same(operation: str, name: str, results) -> None:
    for (case, *want), got in zip(expected(operation, name), results, strict=True):
        assert_same(case, want, got)


@functools.cache
def jitted(operation: str, implementation: str, **static):
    interpret = {"interpret": True} if implementation == "pallas_triton" else {}

    def call(books, *lanes):
        after = OPERATIONS[operation](books, *lanes, implementation=implementation, **static, **interpret)
        after, *out = after if operation != "release" else (after,)
        return (*(getattr(after, name) for name in UPDATED[operation]), *out)

    return jax.jit(call)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("implementation", "name"),
    [*(("pallas_triton", name) for name in INTERPRETED), *(("xla", name) for name in INTERPRETED[:2])],
)
def test_an_implementation_does_what_the_ledger_does(implementation, name, operation):
    results = (jitted(operation, implementation, **c.static)(c.books, *c.lanes) for c, *_ in expected(operation, name))
    assert_all_same(operation, name, results)


# --- Triton, in one process of its own -------------------------------------------------------------------------------

BROKEN = "odd batch, pages of 3"  # the shape on which faults are looked for
TRITON = {op: f"pallas_kernels/{op}/triton.py" for op in OPERATIONS}
# operation, file, what stands there, what is put there. The first is the off-by-one in the last partial page.
FAULTS = {
    "the last partial page is not taken": ("ledger_extend", "tl.cdiv(seq, PAGE) - started", "seq // PAGE - started"),
    "the last partial page stays": ("release", "tl.cdiv(allocated, PAGE)", "allocated // PAGE"),
    "a page is opened one token late": (
        "ledger_decode",
        "opens = wants & (offset == 0)",
        "opens = wants & (offset == 1)",
    ),
    "the page below the top is taken": ("ledger_decode", "free - 1 - rank", "free - 2 - rank"),
    "a row that comes twice is taken": ("ledger_decode", "& ~before & ~behind", ""),
    "a fault counts twice": ("release", "& ~before & (~live | behind)", "& (~live | before)"),
    "the generation stays": ("ledger_extend", "age + 1", "age"),
}


ENTRIES = [(254_201, 2112, 8448), (1, 5, 7), (70_000, 32_767, 32_768)]  # row, column, tokens per row


@pytest.fixture(scope="module")
def by_triton():
    """What the Triton kernels make of all cases: {(operation, shape name): results}, and of the faults."""
    calls, index = [], {}
    for operation in OPERATIONS:
        for name in SHAPES:
            index[operation, name] = range(len(calls), len(calls) + len(expected(operation, name)))
            for case, *_ in expected(operation, name):
                calls.append(Call(f"pallas_kernels.{operation}.triton", operation, case.arrays, case.static))
    for fault, (operation, old, new) in FAULTS.items():
        index[fault] = range(len(calls), len(calls) + len(expected(operation, BROKEN)))
        more = {"operation": operation, "path": TRITON[operation], "old": old, "new": new}
        for case, *_ in expected(operation, BROKEN):
            calls.append(Call("tests.kernels.mutants", "call", case.arrays, {**case.static, **more}))
    index["addresses"] = range(len(calls), len(calls) + len(ENTRIES))
    calls += [Call("tests.kernels.table_addresses", "bytes_to", (np.array(e, np.int32),)) for e in ENTRIES]
    results = run(calls)
    return {key: [results[i] for i in at] for key, at in index.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_triton_does_what_the_ledger_does(by_triton, name, operation):
    assert_all_same(operation, name, by_triton[operation, name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_triton_kernel_is_caught(by_triton, fault):
    with pytest.raises(AssertionError, match="after"):
        assert_all_same(FAULTS[fault][0], BROKEN, by_triton[fault])


def test_a_fault_in_a_pallas_kernel_is_caught():
    path = "pallas_kernels/ledger_extend/pallas_triton.py"
    broken = mutants.load(path, "ceil_div(seq, page_size) - started", "div(seq, page_size) - started")
    call = jax.jit(functools.partial(broken.ledger_extend, interpret=True), static_argnames=("page_size", "capacity"))
    results = (call(*case.arrays, **case.static) for case, *_ in expected("ledger_extend", BROKEN))
    with pytest.raises(AssertionError, match="after ledger_extend"):
        assert_all_same("ledger_extend", BROKEN, results)


# --- the suite itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_cases_reach_both_ends(name):
    for operation in ("ledger_decode", "ledger_extend"):
        ok = {bool(out[-1]) for _, _, out in expected(operation, name)}
        assert ok == {True, False} or COUNT.get(name) == 3
        for case, books, out in expected(operation, name):
            if not out[-1] and operation == "ledger_decode":
                for before, after in zip(case.books, books, strict=True):
                    np.testing.assert_array_equal(before, after)
    gains = [
        books.counters[books.free] - case.books.counters[books.free] for case, books, _ in expected("release", name)
    ]
    assert max(gains) > 0


# --- faults of the list ----------------------------------------------------------------------------------------------


def every_way(operation: str, name: str):
    """Implementations that run in this process, as functions of (books, *lanes)."""
    shape = SHAPES[name]
    static = Case(operation, shape, None, ()).static
    return {way: jitted(operation, way, **static) for way in ("xla", "pallas_triton")}


@pytest.mark.parametrize("way", ["xla", "pallas_triton"])
def test_b38_garbage_rows_write_nothing(way):
    name = "odd batch, pages of 3"
    shape, rng = SHAPES[name], np.random.default_rng(5)
    books = random_books(rng, shape, 1.0, 0.5)
    rows = np.array([-1, shape.rows + 1, 2**31 - 1, -(2**31), 0], np.int32)
    decoded = every_way("ledger_decode", name)[way](books, rows, np.ones(5, bool))
    table, lens, counters, loc, positions, ok = decoded
    assert not ok
    assert not loc.any()
    assert not positions.any()
    np.testing.assert_array_equal(table, books.req_to_token)
    np.testing.assert_array_equal(lens, books.lens)
    np.testing.assert_array_equal(counters, books.counters)
    after = dict(zip(RELEASED, every_way("release", name)[way](books, rows), strict=True))
    for field in set(RELEASED) - {"row_counters"}:
        np.testing.assert_array_equal(after[field], getattr(books, field))
    assert after["row_counters"].tolist() == [books.row_counters[0], books.row_counters[1] + 4]


@pytest.mark.parametrize("way", ["xla", "pallas_triton"])
def test_b41_b43_nothing_in_the_padding_reaches_a_real_lane(way):
    """Padded lanes and inactive ones give 0, whatever row 0 and page 0 hold."""
    name = "odd batch, pages of 3"
    shape, rng = SHAPES[name], np.random.default_rng(6)
    books = random_books(rng, shape, 1.0, 0.7)
    room = [r for r in range(1, shape.rows + 1) if 0 < books.lens[r, 0] < shape.context]
    rows = np.array([0, room[0], 0, room[1], room[2]], np.int32)
    active = np.array([True, True, False, True, False])
    results = []
    for junk in (0, 7, -(2**31), 2**31 - 1):
        table, lens, pos = books.req_to_token.copy(), books.lens.copy(), books.page_pos.copy()
        table[0], lens[0], pos[0] = junk, junk, junk
        poisoned = books._replace(req_to_token=table, lens=lens, page_pos=pos)
        table, lens, *rest = every_way("ledger_decode", name)[way](poisoned, rows, active)
        assert (table[0] == junk).all()
        assert (lens[0] == junk).all()
        results.append(jax.tree.map(np.asarray, (table[1:], lens[1:], *rest)))
    loc, positions, ok = results[0][-3:]
    assert ok
    assert loc[[0, 2, 4]].tolist() == positions[[0, 2, 4]].tolist() == [0, 0, 0]
    assert loc[[1, 3]].min() > 0
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_b45_addresses_in_the_page_table_do_not_wrap(by_triton):
    for (row, column, width), (high, low) in zip(ENTRIES, by_triton["addresses"], strict=True):
        assert (int(high) << 31) + int(low) == 4 * (row * width + column)


# --- which ledgers have a kernel -------------------------------------------------------------------------------------


def test_on_a_cpu_the_ledger_runs_its_own_code():
    if registry.target_platform() != "cpu":
        pytest.skip("the default device is not a CPU")  # what None takes on a GPU is tested in tests/gpu_aot
    shape = SHAPES["odd batch, pages of 3"]
    lanes = jnp.zeros(3, jnp.int32)
    for call in (alloc_for_decode, release_rows):
        text = str(jax.make_jaxpr(call)(ledger(shape), lanes))
        assert text == str(jax.make_jaxpr(functools.partial(call, implementation="xla"))(ledger(shape), lanes))
        with pytest.raises(ValueError, match="'triton' needs an NVIDIA GPU and the platform is 'cpu'"):
            call(ledger(shape), lanes, implementation="triton")


def others():
    from kvjax import HybridReqToTokenPool, SWATokenToKVPoolAllocator

    paged, rows = PagedTokenToKVPoolAllocator.create(64, 4), ReqToTokenPool.create(3, 16)
    sides = SWATokenToKVPoolAllocator.create(64, 32, 4)
    return {
        "window side": Ledger.create(rows, sides, 8),
        "state slots": Ledger.create(HybridReqToTokenPool.create(3, 16, 8), paged),
        "need_sort": Ledger.create(rows, PagedTokenToKVPoolAllocator.create(64, 4, need_sort=True)),
    }


@pytest.mark.parametrize("kind", ["window side", "state slots", "need_sort"])
def test_a_ledger_without_a_kernel_says_so(kind):
    other, lanes = others()[kind], jnp.zeros(2, jnp.int32)
    for call in (
        alloc_for_decode,
        release_rows,
        lambda ledger, rows, **k: alloc_for_extend(ledger, rows, lanes, lanes, capacity=4, **k),
    ):
        with pytest.raises(ValueError, match=f"'triton' cannot be used: no kernel knows .*{kind}.*choose 'xla'"):
            call(other, lanes, implementation="triton")
        jax.eval_shape(functools.partial(call, implementation="xla"), other, lanes)


def test_a_prefix_found_elsewhere_has_no_kernel():
    lanes, plain = jnp.zeros(2, jnp.int32), ledger(SHAPES["pages of 16"])
    with pytest.raises(ValueError, match="no kernel knows prefix_loc and owned_from"):
        alloc_for_extend(
            *(plain, lanes, lanes, lanes), capacity=4, prefix_loc=jnp.zeros((2, 3), jnp.int32), implementation="triton"
        )


@pytest.mark.parametrize("way", ["xla", "pallas_triton"])
def test_without_a_mask_every_lane_in_use_is_active(way):
    case = expected("ledger_decode", "token ring")[0][0]
    call, rows = every_way("ledger_decode", "token ring")[way], case.lanes[0]
    for mine, theirs in zip(call(case.books, rows, None), call(case.books, rows, rows != 0), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_more_lanes_than_a_program_holds_are_refused():
    shape = SHAPES["token pages"]
    books = books_of(ledger(shape))
    with pytest.raises(ValueError, match="at most 1024 lanes, and this one has 1025"):
        release(books, jnp.zeros(1025, jnp.int32), page_size=1, implementation="pallas_triton", interpret=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lens": np.zeros((7, 3), np.int32)}, r"lens must be int32\[8, 3\], got int32\[7, 3\]"),
        ({"page_pos": np.zeros(40, np.int32)}, r"page_pos must be int32\[41\]"),
        ({"counters": np.zeros(4, np.int32)}, "a ring hands out single slots, got page_size 3"),
    ],
)
def test_books_that_do_not_fit_are_refused(change, reason):
    books = random_books(np.random.default_rng(0), SHAPES["odd batch, pages of 3"], 1.0)
    with pytest.raises(ValueError, match=reason):
        ledger_decode(books._replace(**change), np.zeros(2, np.int32), np.ones(2, bool), page_size=3)
