"""paged_decode_gqa, paged_decode_mla and paged_extend: every implementation on named shapes, against a dense oracle.

Pools hold NaN wherever no row has a token, and tables hold anything behind a row's end, in every case (B41).
"""

import dataclasses
import functools
import inspect
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compat import traced_for
from pallas_kernels import jax_triton_adapter, registry
from pallas_kernels.attention import pallas_triton
from pallas_kernels.attention.options import Config, Options, prepare
from pallas_kernels.paged_decode_gqa import paged_decode_gqa
from pallas_kernels.paged_decode_mla import paged_decode_mla
from pallas_kernels.paged_extend import paged_extend
from tests.kernels import triton_interpreter
from tests.kernels.attention_cases import CASES, F32, Case, Made, arguments, check, make

prepared: Any = prepare  # takes NumPy arrays and shapes too
OPERATIONS: dict[str, Any] = {f.__name__: f for f in (paged_decode_gqa, paged_decode_mla, paged_extend)}
JAX_RUNS = {
    "xla": {"implementation": "xla"},
    "pallas_triton": {"implementation": "pallas_triton", "interpret": True},
}
IMPLEMENTATIONS = (*JAX_RUNS, "triton")
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here
EXACT = ("SmolLM2", "Qwen3-32B, fp8", "latents 40 + 8 of 64", "window chunk")  # run twice, bit for bit
PARTIAL = ("SmolLM2", "DeepSeek-V2-Lite")  # a row ends inside a page
FAR = "Qwen3-32B, fp8"  # one-byte entries: 32-bit offsets end first there


@functools.cache
def compiled(implementation: str, name: str):
    """The case's operation, jitted; everything but the arrays of `Made` is static."""
    case = CASES[name]

    def run(q, k, v, table, rows, lens, positions, sinks):
        made = Made(q, k, v, table, rows, lens, positions, sinks, [])
        given, how = arguments(case, made)
        return OPERATIONS[case.operation](*given, **how, **JAX_RUNS[implementation])

    return jax.jit(run, compiler_options=QUICK)


def ran(implementation: str, name: str, made: Made) -> np.ndarray:
    arrays = [getattr(made, f.name) for f in dataclasses.fields(made) if f.name != "kv"]
    return np.asarray(compiled(implementation, name)(*arrays))


def clean(case: Case) -> Made:
    return make(case, poison=0.5)


def longer(made: Made, by: int) -> Made:
    """The fault of a loop that ends one token too late or too early: lanes in use only."""
    return dataclasses.replace(made, lens=np.where(made.lens > 1, made.lens + by, made.lens).astype(np.int32))


def astray(made: Made) -> Made:
    """Rows that the table does not have, before and after it."""
    rows = made.rows.copy()
    rows[1:3] = -1, len(made.table)
    return dataclasses.replace(made, rows=rows)


def triton_call(case: Case, made: Made) -> triton_interpreter.Call:
    given, how = arguments(case, made)
    named: dict[str, Any] = dict(zip(("q", "k", "v", "table", "rows", "lens"), given, strict=False))
    if case.operation == "paged_extend":
        named = dict(zip(("q", "k", "v", "table", "rows", "positions", "lens"), given, strict=True))
    elif case.rank is not None:
        named = dict(zip(("q", "k", "table", "rows", "lens"), given, strict=True))
    plain = [named[n] for n in ("q", "k", "table", "rows", "lens")]
    arrays, options = prepared(*plain, v=named.get("v"), positions=named.get("positions"), **how)
    arrays = tuple(np.asarray(a) for a in arrays)
    return triton_interpreter.Call("pallas_kernels.attention.triton", "attend", arrays, {"options": options})


def valid_table(made: Made) -> np.ndarray:
    """The table with entries that can be shifted without passing int32."""
    return np.clip(made.table, 0, len(made.k) - 1)


@pytest.fixture(scope="module")
def by_triton() -> dict[tuple[str, str], np.ndarray]:
    """(case, variant) -> result, from one process of Triton's interpreter."""
    wanted = {(name, ""): make(case) for name, case in CASES.items()}
    wanted |= {(name, "clean"): clean(CASES[name]) for name in EXACT}
    wanted |= {(name, f"{by}"): longer(make(CASES[name]), by) for name in PARTIAL for by in (-1, 1)}
    wanted |= {(name, "astray"): astray(make(CASES[name])) for name in PARTIAL}
    calls = [triton_call(CASES[name], made) for (name, _), made in wanted.items()]
    far = triton_call(CASES[FAR], dataclasses.replace(wanted[FAR, ""], table=valid_table(wanted[FAR, ""])))
    calls.append(dataclasses.replace(far, module="tests.kernels.attention_far", function="attend_far"))
    return dict(zip((*wanted, (FAR, "far")), triton_interpreter.run(calls), strict=True))


def result(implementation: str, name: str, made: Made, variant: str, request) -> np.ndarray:
    if implementation == "triton":
        return request.getfixturevalue("by_triton")[name, variant]
    return ran(implementation, name, made)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_agrees_with_dense_attention(implementation, name, request):
    made = make(CASES[name])
    check(CASES[name], made, result(implementation, name, made, "", request))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_that_nobody_holds_changes_no_bit(implementation, name, request):
    spoilt, whole = make(CASES[name]), clean(CASES[name])
    before = result(implementation, name, whole, "clean", request)
    np.testing.assert_array_equal(result(implementation, name, spoilt, "", request), before)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_end_that_is_off_by_one_is_caught(implementation, name, by, request):
    """The checks above fail when the last partial page is read one token too far or not far enough."""
    made = make(CASES[name])
    wrong = result(implementation, name, longer(made, by), f"{by}", request)
    with pytest.raises(AssertionError):
        check(CASES[name], made, wrong)


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_outside_the_table_are_lanes_not_in_use(implementation, name, request):
    made = make(CASES[name])
    out = result(implementation, name, astray(made), "astray", request)
    assert not out[1:3].any()
    np.testing.assert_array_equal(out[0], result(implementation, name, made, "", request)[0])


def test_offsets_beyond_32_bits_reach_their_rows(by_triton):
    """B45: every slot of the pool lies more than 2^32 bytes behind the pointer that the kernel gets."""
    np.testing.assert_array_equal(by_triton[FAR, "far"], by_triton[FAR, ""])


@pytest.mark.parametrize("fault", ["cols <= stop", "cols < stop - 1"])
def test_a_kernel_with_a_fault_in_its_last_block_is_caught(fault):
    """The Pallas kernel with one line changed, in a module of its own."""
    source = inspect.getsource(pallas_triton)
    assert source.count("held = cols < stop\n") == 1
    faulty = types.ModuleType("faulty")
    exec(source.replace("held = cols < stop\n", f"held = {fault}\n"), faulty.__dict__)
    case = CASES["SmolLM2 drafts"]
    made = make(case)
    call = triton_call(case, made)
    run = jax.jit(functools.partial(faulty.attend, **call.static, interpret=True), compiler_options=QUICK)
    with pytest.raises(AssertionError):
        check(case, made, np.asarray(run(*call.arguments)))


def test_offsets_that_pallas_would_cut_are_refused_or_passed_over():
    """B45: one-byte entries beyond 2^31 need wider offsets than Pallas gives; None takes another implementation."""
    for slots, fits in ((2**20, True), (2**21 + 64, False), (2**22 + 64, True)):
        pool = jax.ShapeDtypeStruct((slots, 8, 128), jnp.uint8)
        arrays, options = prepared(
            *(jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16), pool, jax.ShapeDtypeStruct((3, 64), jnp.int32)),
            *(jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)),
            v=pool,
            scale=1.0,
            dtype=jnp.float8_e4m3fn,
        )
        reason = pallas_triton.unsupported(*arrays, options=options)
        assert (reason is None) == fits
        with traced_for("NVIDIA H200", 132, "cuda"):
            without_triton = "pallas_triton" if fits else "xla"
            best = without_triton if jax_triton_adapter.why_not() else "triton"
            assert registry.best("paged_decode_gqa", *arrays, options=options) == best


@pytest.mark.parametrize("implementation", ["triton", "pallas_triton"])
def test_a_gpu_without_fp8_is_passed_over(implementation):
    made = make(CASES[FAR])
    given, how = arguments(CASES[FAR], made)
    with traced_for("NVIDIA A100-SXM4-80GB", 108, "cuda"):
        call = triton_call(CASES[FAR], made)
        assert registry.best("paged_decode_gqa", *call.arguments, **call.static) == "xla"
        off = jax_triton_adapter.why_not() if implementation == "triton" else None
        with pytest.raises(
            ValueError,
            match=re.escape(off) if off else r"float8_e4m3fn needs compute capability 8\.9 and this GPU has 8\.0",
        ):
            OPERATIONS["paged_decode_gqa"](*given, **how, implementation=implementation)


def test_mistakes_are_refused_with_a_reason():
    made = make(CASES["SmolLM2"])
    good, how = arguments(CASES["SmolLM2"], made)
    call: Any = functools.partial(paged_decode_gqa, *good, **how)
    for change, message in (
        ({"dtype": jnp.bfloat16}, "k holds float32 words for values of dtype bfloat16"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 2.5}, "window must be a whole number that is known when the program is compiled, got 2.5"),
        ({"softcap": np.inf}, "softcap must be above 0 and finite"),
        ({"softcap": "a"}, "softcap must be a number that is known"),
        ({"scale": None}, "scale must be a number that is known"),
        ({"k_scale": "x"}, "k_scale must be an array, got 'x'"),
        ({"dtype": "hello"}, "dtype 'hello' is none that JAX knows"),
        ({"config": {}}, r"config must be an attention.options.Config or None, got \{\}"),
        ({"implementation": ""}, "implementation='' is not one of xla, triton"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\)"),
        ({"k_scale": np.ones(3, np.float32)}, r"k_scale has shape \(3,\)"),
        ({"implementation": "mosaic"}, "has no 'mosaic' implementation"),
        ({"implementation": "triton"}, "needs an NVIDIA GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**change)
    with pytest.raises(ValueError, match="rank <= query columns <= stored columns"):
        OPERATIONS["paged_decode_mla"](made.q, made.k, *good[3:], rank=8, **how)
    with pytest.raises(ValueError, match=r"\[b, t, heads, head_dim\] for a chunk"):
        OPERATIONS["paged_extend"](*good[:5], made.rows[:, None], good[5], **how)
    for name, size in (("block_m", 16384), ("splits", 10**9), ("num_warps", 64)):
        with pytest.raises(ValueError, match=f"{name} is {size}; "):
            Config(**{name: size})
    with pytest.raises(ValueError, match="q must be an array, got list"):
        paged_decode_gqa([1.0], *good[1:], **how)  # pyright: ignore[reportArgumentType]: that is the mistake
    with pytest.raises(ValueError, match="scale must be a number that is known when the program is compiled"):
        jax.jit(lambda s: paged_decode_gqa(*good, **how | {"scale": s}))(1.0)
    with pytest.raises(ValueError, match="block_n is 24; a power of two from 16 to 256"):
        Config(block_n=24)
    assert Options(1.0, jnp.dtype(F32), precision=jax.lax.Precision.HIGHEST).exact
    assert not Options(1.0, jnp.dtype(F32)).exact


def test_numbers_of_numpy_and_jax_are_numbers():
    made = make(CASES["Gemma-3 window layer"])
    good, how = arguments(CASES["Gemma-3 window layer"], made)
    plain = paged_decode_gqa(*good, **how)
    for window, cap in ((np.int32(7), np.float32(2.0)), (jnp.int32(7), jnp.float32(2.0))):
        same = jax.jit(lambda *a, w=window, c=cap: paged_decode_gqa(*a, **how | {"window": w, "softcap": c}))(*good)
        np.testing.assert_array_equal(same, plain)
