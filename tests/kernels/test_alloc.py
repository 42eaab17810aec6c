"""alloc_extend and alloc_decode: every implementation, the same shapes, against a model written token by token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compat import traced_for
from kvjax.compiled import compile_for, inspect
from pallas_kernels import jax_triton_adapter, registry
from pallas_kernels.alloc_decode import alloc_decode
from pallas_kernels.alloc_extend import alloc_extend
from pallas_kernels.alloc_extend.pallas_triton import first_token
from pallas_kernels.alloc_extend.plan import block_size
from pallas_kernels.alloc_extend.reference import by_page, by_token
from tests.kernels import triton_interpreter

EXTEND = {
    "xla": functools.partial(alloc_extend, implementation="xla"),
    "by_page": by_page,  # the two forms of "xla", both on whatever platform runs the tests
    "by_token": by_token,
    "pallas_triton": functools.partial(alloc_extend, implementation="pallas_triton", interpret=True),
}
EXTEND = {name: jax.jit(fn, static_argnames=("page_size", "capacity")) for name, fn in EXTEND.items()}
DECODE = {
    "xla": functools.partial(alloc_decode, implementation="xla"),
    "pallas_triton": functools.partial(alloc_decode, implementation="pallas_triton", interpret=True),
}
DECODE = {name: jax.jit(fn, static_argnames="page_size") for name, fn in DECODE.items()}
# name: (batch, page_size, capacity)
SHAPES = {
    "Llama-3-8B serving": (64, 16, 8192),
    "DeepSeek-V3": (256, 64, 4096),
    "one lane, one token": (1, 1, 1),
    "one lane, pages of 128": (1, 128, 300),
    "three lanes, pages of 3": (3, 3, 50),
    "token pages, ragged capacity": (5, 1, 77),
    "pages of 4, capacity below a page": (3, 4, 3),
    "odd batch, odd page": (37, 5, 200),
}
BIG = ("Llama-3-8B serving", "DeepSeek-V3")


def model_extend(stack, free, prefix, seq, last, page_size, capacity):
    """The operation as a person would do it: token by token, popping a page where one begins."""
    left, out = [int(p) for p in stack[:free]], []
    for p, s, slot in zip(prefix, seq, last, strict=True):
        for position in range(p, s):
            if position % page_size == 0:
                if not left:
                    return np.zeros(capacity, np.int32), 0, False
                slot = left.pop() * page_size
            else:
                slot = slot + 1
            out.append(int(slot))
    if len(out) > capacity:
        return np.zeros(capacity, np.int32), 0, False
    return np.array(out + [0] * (capacity - len(out)), np.int32), free - len(left), True


def model_decode(stack, free, seq, last, active, page_size):
    left, out = [int(p) for p in stack[:free]], []
    for s, slot, on in zip(seq, last, active, strict=True):
        if not on or s < 1:
            out.append(0)
        elif (s - 1) % page_size == 0:
            if not left:
                return np.zeros(len(seq), np.int32), 0, False
            out.append(left.pop() * page_size)
        else:
            out.append(int(slot) + 1)
    return np.array(out, np.int32), free - len(left), True


def assert_same(got, want):
    loc, new_pages, ok = got
    assert (loc.dtype, new_pages.dtype, ok.dtype) == (jnp.int32, jnp.int32, jnp.bool_)
    assert (bool(ok), int(new_pages)) == (want[2], want[1])
    np.testing.assert_array_equal(loc, want[0])


def i32(*values):
    return jnp.asarray(values, jnp.int32)


def make_stack(rng, num_pages):
    """Free pages in random order; what lies above the free count is whatever an earlier user left there."""
    return rng.permutation(num_pages).astype(np.int32) + 1


def lengths(rng, batch, page_size, total):
    """Ragged lanes of about `total` new tokens, a quarter of them not in use; last_loc where one is due."""
    prefix = rng.integers(0, 4 * page_size, batch)
    new = rng.multinomial(total, rng.dirichlet(np.ones(batch))) * (rng.random(batch) < 0.75)
    offset = (prefix - 1) % page_size
    last = np.where(prefix % page_size == 0, -1, rng.integers(1, 5000, batch) * page_size + offset)
    return tuple(x.astype(np.int32) for x in (prefix, prefix + new, last))


# Exact values from the fault list (sglang#18200, #30892) and from SGLang's own kernel. The free list is in the
# order of hand-out; the stack holds it reversed.
EXACT = {
    "inside one page": ([6], [7], [9], [5], [10], 0),
    "to the end of the page": ([6], [8], [9], [5], [10, 11], 0),
    "over the end of the page": ([6], [9], [9], [5], [10, 11, 20], 1),
    "nothing new": ([8], [8], [15], [5], [], 0),
    "less than a page": ([0], [3], [-1], [1], [4, 5, 6], 1),
    "three lanes": (
        *([0, 5, 8], [3, 9, 9], [-1, 37, 47], [1, 2, 3, 4, 5]),
        *([4, 5, 6, 38, 39, 40, 8, 12], 3),
    ),
    "two fresh lanes": ([0, 0], [6, 3], [-1, -1], [1, 2, 3, 4], [4, 5, 6, 7, 8, 9, 12, 13, 14], 3),
    "both continue": ([6, 3], [11, 4], [9, 14], [4, 5], [10, 11, 16, 17, 18, 15], 1),
}


def random_extend(shape):
    """Calls of a shape, about half of which find no room."""
    batch, page_size, capacity = SHAPES[shape]
    rng, static = np.random.default_rng(7), {"page_size": page_size, "capacity": capacity}
    num_pages = capacity // page_size + 2 * batch + 1
    for case in range(6 if shape in BIG else 30):
        stack = make_stack(rng, num_pages)
        prefix, seq, last = lengths(rng, batch, page_size, int(rng.integers(0, capacity + 1 + capacity // 8)))
        free = num_pages if case % 2 else int(rng.integers(0, num_pages // 2 + 1))
        want = model_extend(stack, free, prefix, seq, last, page_size, capacity)
        yield (stack, np.int32(free), prefix, seq, last), static, want


def exact_extend():
    for prefix, seq, last, pages, slots, taken in EXACT.values():
        want = np.array(slots + [0] * (12 - len(slots)), np.int32), taken, True
        yield extend(pages, prefix, seq, last, 12), want


def past_the_free_pages():
    """sglang#30892: four pages wanted, two free. The page below the stack's bottom must not come out twice either."""
    lanes, none = ([0, 0], [5, 5], [-1, -1], 16), (np.zeros(16), 0, False)
    yield extend([1, 2], *lanes), none
    (stack, *rest), static = extend([1, 2], *lanes)
    yield ((np.append(stack, [99, 98, 97]).astype(np.int32), *rest), static), none
    yield extend([1, 2, 3, 4], *lanes), (np.array([4, 5, 6, 7, 8, 12, 13, 14, 15, 16] + [0] * 6), 4, True)


def exactly_full():
    """The last page and the last output, and one token more of either."""
    pages = [1, 2, 3, 4]
    yield extend(pages, [0], [16], [-1], 16), (np.arange(4, 20), 4, True)
    yield extend(pages, [0], [17], [-1], 32), (np.zeros(32), 0, False)
    yield extend(pages, [0], [16], [-1], 15), (np.zeros(15), 0, False)
    (stack, _, *lanes), static = extend(pages, [2], [4], [9], 2)
    yield ((stack, np.int32(0), *lanes), static), (np.array([10, 11]), 0, True)


def without_new_tokens():
    (stack, _, *lanes), static = extend([2, 1], [0, 3, 8], [0, 3, 8], [-1, 6, 11], 5)
    yield ((stack, np.int32(0), *lanes), static), (np.zeros(5), 0, True)


def extend(pages, prefix, seq, last, capacity):
    """(arrays, static) of a call with pages of 4; the pages stand in the order of hand-out."""
    lanes = (np.array(x, np.int32) for x in (prefix, seq, last))
    stack = np.array(pages[::-1], np.int32)
    return (stack, np.int32(len(pages)), *lanes), {"page_size": 4, "capacity": capacity}


def random_decode(batch, page_size):
    rng = np.random.default_rng(3)
    for case in range(20):
        stack = make_stack(rng, batch + 1)
        seq = rng.integers(0, 3 * page_size + 2, batch).astype(np.int32)
        if case % 4 == 0:
            seq = seq // page_size * page_size + 1  # every lane opens a page
        last = rng.integers(1, 100_000, batch).astype(np.int32)
        active = rng.random(batch) < 0.8
        free = batch if case % 2 else 0
        want = model_decode(stack, free, seq, last, active, page_size)
        yield (stack, np.int32(free), seq, last, active), {"page_size": page_size}, want


def exact_decode():
    def decode(pages, free, seq, last, active=(True, True, True), page_size=4):
        arrays = (np.array(x, np.int32) for x in (pages[::-1], free, seq, last))
        return (*arrays, np.array(active)), {"page_size": page_size}

    pages = [40, 41, 42]
    yield decode(pages, 3, [5, 0, 9], [15, -1, 30]), (np.array([160, 0, 164]), 2, True)
    yield decode(pages, 1, [5, 0, 9], [15, -1, 30]), (np.zeros(3), 0, False)
    yield decode(pages, 0, [12, 15, 2], [18, 17, 4]), (np.array([19, 18, 5]), 0, True)
    # Idle lanes need no page, whatever their lengths say.
    idle = decode(pages, 1, [5, 5, 9], [15, 15, 30], [True, False, False])
    yield idle, (np.array([168, 0, 0]), 1, True)
    yield decode([7, 8, 9], 3, [2, 7], [5, 6], [True, True], 1), (np.array([7, 8]), 2, True)


# operation -> name of some calls -> how they are made: ((arrays, static), what comes out) each.
MADE = {
    "alloc_extend": {
        **{shape: functools.partial(random_extend, shape) for shape in SHAPES},
        "every slot that sglang names": exact_extend,
        "past the free pages": past_the_free_pages,
        "exactly full": exactly_full,
        "without new tokens": without_new_tokens,
    },
    "alloc_decode": {
        **{
            f"{batch} lanes, pages of {size}": functools.partial(random_decode, batch, size)
            for batch, size in [(1, 1), (3, 3), (64, 16), (256, 64), (256, 1), (37, 128), (5, 4)]
        },
        "the slots that sglang names": exact_decode,
    },
}
ALWAYS_ROOM = ("every slot that sglang names", "without new tokens")
IN_PROCESS = {"alloc_extend": EXTEND, "alloc_decode": DECODE}
# operation, on which calls, what stands in its Triton kernel, what is put there.
FAULTS = {
    "the last partial page is not taken": (
        *("alloc_extend", "three lanes, pages of 3"),
        *("ceil_div(seq, PAGE) - started", "seq // PAGE - started"),
    ),
    "a token too many fits": ("alloc_extend", "exactly full", "tokens <= CAPACITY", "tokens <= CAPACITY + 1"),
    "the last block is left out": ("alloc_extend", "exactly full", "-(-capacity // block)", "capacity // block - 1"),
    "the page below the top is taken": ("alloc_decode", "3 lanes, pages of 3", "free - 1 - excl", "free - 2 - excl"),
    "the last free page stays": ("alloc_decode", "the slots that sglang names", "total <= free", "total < free"),
    "an idle lane takes a page": ("alloc_decode", "5 lanes, pages of 4", "!= 0) & (seq >= 1)", ">= 0) & (seq >= 1)"),
}


@functools.cache
def calls(operation, name):
    """[(arrays, static, what the model makes of them)]."""
    return [call if len(call) == 3 else (*call[0], call[1]) for call in MADE[operation][name]()]


def calls_of_triton(operation, name):
    """Those that Triton's interpreter does; it takes seconds for each of the big ones, so it gets one that has room."""
    every = calls(operation, name)
    return [next(call for call in every if call[2][2])] if name in BIG else every[:10]


@pytest.fixture(scope="module")
def by_triton():
    """(operation, calls) -> results, and fault -> results, from one process of Triton's interpreter."""
    asked: dict[Any, Any] = {
        (operation, name): (f"pallas_kernels.{operation}.triton", operation, {}) for operation, name in ALL
    }
    for fault, (operation, name, old, new) in FAULTS.items():
        change = {"operation": operation, "path": f"pallas_kernels/{operation}/triton.py", "old": old, "new": new}
        asked[operation, name, fault] = ("tests.kernels.mutants", "call", change)
    every = [
        triton_interpreter.Call(module, function, arrays, {**static, **change})
        for key, (module, function, change) in asked.items()
        for arrays, static, _ in calls_of_triton(*key[:2])
    ]
    results = iter(triton_interpreter.run(every))
    return {key: [next(results) for _ in calls_of_triton(*key[:2])] for key in asked}


ALL = [(operation, name) for operation, made in MADE.items() for name in made]
NAMES = [(op, name, way) for op, name in ALL for way in (*IN_PROCESS[op], "triton")]


def assert_all_same(results, made):
    for got, (_, _, want) in zip(results, made, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(("operation", "name", "implementation"), NAMES)
def test_every_implementation_agrees_with_the_model(operation, name, implementation, request):
    if implementation == "triton":
        made = calls_of_triton(operation, name)
        results = request.getfixturevalue("by_triton")[operation, name]
    else:
        made, run = calls(operation, name), IN_PROCESS[operation][implementation]
        results = (run(*arrays, **static) for arrays, static, _ in made)
    assert_all_same(results, made)
    assert name in ALWAYS_ROOM or {want[2] for _, _, want in calls(operation, name)} == {True, False}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_triton_kernel_is_caught(by_triton, fault):
    operation, name, *_ = FAULTS[fault]
    with pytest.raises(AssertionError):
        assert_all_same(by_triton[operation, name, fault], calls_of_triton(operation, name))


@pytest.mark.parametrize("name", EXTEND)
def test_one_compilation_serves_all_lengths(name):
    traces = []

    @jax.jit
    def run(*arrays):
        traces.append(1)
        return EXTEND[name](*arrays, page_size=4, capacity=64)

    stack, outputs = jnp.arange(1, 33, dtype=jnp.int32), set()
    for length in (0, 1, 4, 17, 63, 64):
        loc, _, ok = run(stack, i32(20)[0], i32(0, 2), i32(length, 2), i32(-1, 9))
        assert ok
        outputs.add(int((loc > 0).sum()))
    assert outputs == {0, 1, 4, 17, 63, 64}
    assert len(traces) == 1


NUM_PAGES = 1_000_003  # a number that no other extent of the programs below has


def users_of_the_stack(jaxpr):
    """Names of the operations that take or make an array of the stack's size, wrappers looked through."""
    users = set()
    for eqn in jaxpr.eqns:
        inner = [getattr(p, "jaxpr", p) for v in eqn.params.values() for p in (v if isinstance(v, tuple) else [v])]
        inner = [j for j in inner if hasattr(j, "eqns")] if eqn.primitive.name != "pallas_call" else []
        for sub in inner:
            users |= users_of_the_stack(sub)
        if not inner and any(NUM_PAGES in getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)):
            users.add(eqn.primitive.name)
    return users


def abstract(batch, extend):
    lane = jax.ShapeDtypeStruct((batch,), jnp.int32)
    third = lane if extend else jax.ShapeDtypeStruct((batch,), jnp.bool_)
    stack = jax.ShapeDtypeStruct((NUM_PAGES,), jnp.int32)
    return stack, jax.ShapeDtypeStruct((), jnp.int32), lane, lane, third


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "extend"), [(name, True) for name in EXTEND] + [(name, False) for name in DECODE])
def test_the_size_of_the_pool_does_not_enter(name, extend):
    fn = EXTEND[name] if extend else DECODE[name]
    fn = functools.partial(fn, page_size=16, **({"capacity": 512} if extend else {}))
    users = users_of_the_stack(jax.make_jaxpr(fn)(*abstract(8, extend)).jaxpr)
    # A window below the top of the stack, or a gather.
    assert users
    assert users <= ({"pallas_call"} if name == "pallas_triton" else {"gather", "dynamic_slice"})
    if name != "pallas_triton":  # the interpreter carries its operands through a loop
        report = inspect(compile_for(fn, abstract(8, extend)))
        assert report.large_ops(NUM_PAGES) == []  # a quarter of the stack's bytes
        assert report.temp_bytes < NUM_PAGES


@pytest.mark.compiled
def test_the_check_above_sees_a_program_that_reads_the_whole_stack():
    def sums(stack, *rest):
        return stack.sum(), jax.jit(lambda s: s + 1)(stack)[0]

    assert users_of_the_stack(jax.make_jaxpr(sums)(*abstract(8, False)).jaxpr) >= {"reduce_sum", "add"}
    report = inspect(compile_for(sums, abstract(8, False)))
    assert {op.opcode for op in report.large_ops(NUM_PAGES)} & {"reduce", "reduce-window"}


def test_the_blocks_of_the_kernel_cover_the_output_and_stay_inside():
    # A store past the end is dropped by the interpreter and corrupts memory on a GPU, so it is checked here.
    for batch, capacity in [(1, 1), (3, 50), (5, 77), (64, 8192), (64, 8191), (256, 4097), (1024, 3), (4096, 100)]:
        block = block_size(batch, capacity)
        programs = np.arange(-(-capacity // block))
        begin = np.asarray(first_token(programs, block, capacity))
        assert block & (block - 1) == 0
        assert set((begin[:, None] + np.arange(block)).ravel().tolist()) == set(range(capacity))


def test_vmap_gives_what_separate_calls_give():
    rng = np.random.default_rng(5)
    extend = functools.partial(EXTEND["xla"], page_size=4, capacity=40)
    decode = functools.partial(DECODE["xla"], page_size=4)
    stacks, free = np.stack([make_stack(rng, 30) for _ in range(6)]), np.array([30, 3, 12, 0, 30, 9], np.int32)
    lanes = [np.stack(x) for x in zip(*(lengths(rng, 5, 4, 30) for _ in range(6)), strict=True)]
    active = rng.random((6, 5)) < 0.7
    together = jax.vmap(extend)(stacks, free, *lanes)
    decoded = jax.vmap(decode)(stacks, free, lanes[1], lanes[2], active)
    assert len(set(together[2].tolist())) == 2
    for i in range(6):
        prefix, seq, last = (x[i] for x in lanes)
        assert_same([x[i] for x in together], model_extend(stacks[i], free[i], prefix, seq, last, 4, 40))
        want = model_decode(stacks[i], free[i], seq, last, active[i], 4)
        assert_same([x[i] for x in decoded], want)


def test_scan_threads_the_free_count_through_many_steps():
    stack = jnp.arange(64, 0, -1, dtype=jnp.int32)

    @jax.jit
    def run(free):
        def step(carry, _):
            free, seq, last = carry
            loc, taken, ok = alloc_decode(stack, free, seq + 1, last, jnp.ones(3, bool), page_size=4)
            return (free - taken, seq + 1, loc), (loc, ok)

        return jax.lax.scan(step, (free, i32(0, 0, 0), i32(-1, -1, -1)), length=12)

    (left, seq, _), (locs, oks) = run(i32(64)[0])
    assert oks.all()
    assert (int(left), seq.tolist()) == (64 - 9, [12, 12, 12])
    expected = [[4 * (3 * block + lane + 1) + k for lane in range(3)] for block in range(3) for k in range(4)]
    assert locs.tolist() == expected


def test_none_is_xla_on_a_cpu():
    arrays = i32(1, 2), i32(2)[0], i32(0), i32(3), i32(-1)
    if registry.target_platform() != "cpu":
        pytest.skip("the default device is not a CPU")  # what None takes on a GPU is tested in tests/gpu_aot
    assert "pallas_call" not in str(jax.make_jaxpr(functools.partial(alloc_extend, page_size=4, capacity=4))(*arrays))
    interpreted = functools.partial(alloc_extend, page_size=4, capacity=4, interpret=True)
    assert "pallas_call" in str(jax.make_jaxpr(interpreted)(*arrays))


@pytest.mark.parametrize(
    ("implementation", "interpret", "reason"),
    [
        ("mosaic", False, "alloc_decode has no 'mosaic'.*'xla'"),
        ("triton", False, "'triton' needs an NVIDIA GPU and the platform is 'cpu'"),
        ("cuda", False, "not one of xla, triton, pallas_triton, mosaic"),
        ("xla", True, "interpret=True is for Pallas kernels"),
        ("pallas_triton", False, "needs an NVIDIA GPU and the platform is 'cpu'"),
    ],
)
def test_a_named_implementation_that_cannot_run_is_refused(implementation, interpret, reason):
    if implementation in ("triton", "pallas_triton") and not interpret and registry.target_platform() == "gpu":
        pytest.skip("runs here")
    arrays = i32(1, 2), i32(2)[0], i32(3), i32(6), jnp.ones(1, bool)
    with pytest.raises(ValueError, match=reason):
        alloc_decode(*arrays, page_size=4, implementation=implementation, interpret=interpret)


def test_more_lanes_than_registers_hold_are_refused_or_left_to_xla():
    lanes = np.zeros(4097, np.int32)
    arrays = np.ones(3, np.int32), np.int32(3), lanes, lanes
    extend = functools.partial(alloc_extend, *arrays, lanes, page_size=4, capacity=8)
    decode = functools.partial(alloc_decode, *arrays, lanes > 0, page_size=4)
    for call in (extend, decode):
        with traced_for("NVIDIA H200", 132, "cuda"):
            for name in ("triton", "pallas_triton")[jax_triton_adapter.why_not() is not None :]:
                with pytest.raises(ValueError, match=f"{name}' cannot be used: .*at most 4096 lanes, and this one has"):
                    call(implementation=name)
            text = str(jax.make_jaxpr(call)())
        assert "pallas_call" not in text
        assert "triton" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 0}, "page_size must be a Python int of at least 1, got 0"),
        ({"capacity": 0}, "capacity must be a Python int of at least 1"),
        ({"stack": np.zeros(0, np.int32)}, "at least one page"),
        ({"stack": np.zeros(3, np.int16)}, "stack must be int32"),
        ({"seq_lens": np.zeros(3, np.int32)}, r"seq_lens must be int32\[2\], got int32\[3\]"),
        ({"last_loc": np.zeros((2, 1), np.int32)}, "last_loc"),
        ({"prefix_lens": np.zeros(2, np.float32)}, "prefix_lens"),
        ({"free_count": np.zeros(1, np.int32)}, "free_count"),
        ({"free_count": 2}, "free_count must be an array"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(change, reason):
    two = np.array([4, 4], np.int32)
    good = {"stack": np.array([1, 2], np.int32), "free_count": np.int32(2), "prefix_lens": two, "seq_lens": two}
    good |= {"last_loc": two, "page_size": 4, "capacity": 8}
    assert bool(alloc_extend(**good)[2])
    with pytest.raises(ValueError, match=reason):
        alloc_extend(**(good | change))
