"""kv_write: every implementation, the same calls, bit for bit against the pools' meaning written with NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.compiled import compile_for
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from kvjax.pools.dtypes import SUPPORTED
from pallas_kernels import registry
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.plan import Config, default_config
from tests.kernels import triton_interpreter

SLOTS = 24
DTYPES = {d.name: d for d in SUPPORTED}
# name: (dtype, values' dtype, per leaf (heads, width, parts), scales)
SHAPES = {
    "Llama-3-8B bf16": ("bfloat16", "bfloat16", [(8, 128, [128]), (8, 128, [128])], None),
    "Qwen3-32B e4m3 from bf16": ("float8_e4m3fn", "bfloat16", [(8, 128, [128]), (8, 128, [128])], (0.37, 1.7)),
    "SmolLM2-135M f16": ("float16", "float16", [(3, 64, [64]), (3, 64, [64])], None),
    "DeepSeek-V3 latent bf16": ("bfloat16", "bfloat16", [(1, 576, [512, 64])], None),
    "latent in wider rows": ("bfloat16", "float32", [(1, 640, [512, 64])], None),
    "e4m3 latent, whole": ("float8_e4m3fn", "float32", [(1, 576, [576])], None),
    "keys alone": ("float32", "float32", [(2, 128, [128])], None),
    "V narrower than K": ("float32", "bfloat16", [(2, 192, [192]), (2, 128, [128])], None),
    "odd sizes": ("float16", "float32", [(3, 5, [5]), (3, 7, [7])], (1.3, None)),
    "odd latent": ("bfloat16", "float32", [(1, 13, [6, 5])], None),
    "e5m2 from f16": ("float8_e5m2", "float16", [(2, 24, [24]), (2, 40, [40])], (3.0, 0.7)),
    "e5m2 bits as they are": ("float8_e5m2", "float8_e5m2", [(1, 48, [48]), (1, 16, [16])], None),
    "e4m3 from f32, small": ("float8_e4m3fn", "float32", [(1, 16, [16]), (1, 16, [16])], None),
    "long rows": ("float32", "float32", [(9, 128, [128])], None),
}
LOC = np.array([5, 0, -1, 2, SLOTS, 23, 1, -(2**31), 2**31 - 1, 9, 0], np.int32)
DROPPED = [1, 2, 4, 7, 8, 10]  # lanes of LOC: padding, negative, past the end
VALID = np.arange(len(LOC)) != 5


@dataclasses.dataclass(frozen=True)
class Case:
    leaves: tuple
    values: tuple
    scales: tuple
    loc: np.ndarray
    valid: np.ndarray | None
    dtype: np.dtype


def make(name, store="integer", valid=None):
    """Leaves with something in every slot, values that saturate, round and are NaN; NaN in every dropped lane."""
    dtype, given, leaves, scales = SHAPES[name]
    dtype, given = DTYPES[dtype], DTYPES[given]
    rng = np.random.default_rng(len(name))
    kept, written = [], []
    for heads, width, parts in leaves:
        store_dtype = dtype if store == "same" else np.dtype(f"uint{8 * dtype.itemsize}")
        old = rng.integers(0, 256, (SLOTS, heads, width * dtype.itemsize), np.uint8).view(store_dtype)
        old[0] = 0
        kept.append(old)
        row = rng.normal(size=(len(LOC), heads, sum(parts))).astype(np.float32)
        # From below the smallest fp8 number to above the largest of every dtype here but float32 and bfloat16.
        row *= np.float32(10) ** rng.integers(-9, 6, row.shape)
        if given != dtype or dtype.itemsize > 1:
            row[0, 0, :3] = [np.nan, np.inf, -np.inf]
        row[DROPPED] = np.nan
        with np.errstate(over="ignore"):
            row = row.astype(given)
        written.append(tuple(np.split(row, np.cumsum(parts)[:-1], axis=-1)))
    scales = tuple(None if s is None else np.float32(s) for s in scales or (None,) * len(leaves))
    return Case(tuple(kept), tuple(written), scales, LOC, valid, dtype)


def stored(value, dtype, scale):
    """One part as the pool stores it, with NumPy: divide in float32, round to the input's dtype, clamp, cast."""
    if scale is not None:
        with np.errstate(over="ignore"):
            value = (value.astype(np.float32) / scale).astype(value.dtype)
    if value.dtype == dtype:
        return value
    if dtype.itemsize == 1:
        bound = float(ml_dtypes.finfo(dtype).max)
        value = np.clip(value.astype(np.float32), -bound, bound)
    with np.errstate(over="ignore"):
        return value.astype(dtype)


def expected(case):
    out = []
    for old, parts, scale in zip(case.leaves, case.values, case.scales, strict=True):
        new = old.copy()
        row = np.concatenate([stored(part, case.dtype, scale) for part in parts], axis=-1)
        pad = old.shape[-1] - row.shape[-1]
        row = np.concatenate([row, np.zeros((*row.shape[:-1], pad), case.dtype)], axis=-1)
        for lane, slot in enumerate(case.loc):
            if 0 < slot < SLOTS and (case.valid is None or case.valid[lane]):
                new[slot] = row[lane].view(old.dtype)
        out.append(new)
    return out


def assert_same(got, case):
    """Equal bits; NaN may have another sign or payload."""
    for new, old, want in zip(got, case.leaves, expected(case), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        a, b = np.asarray(new).view(case.dtype), want.view(case.dtype)
        nan = np.isnan(b.astype(np.float32))
        touched = np.zeros(len(old), bool)
        touched[[s for s in case.loc if 0 < s < SLOTS]] = True
        assert np.asarray(new)[~touched].tobytes() == old[~touched].tobytes(), "a slot that nobody named has changed"
        bits = np.dtype(f"uint{8 * case.dtype.itemsize}")
        np.testing.assert_array_equal(np.where(nan, 0, a.view(bits)), np.where(nan, 0, b.view(bits)))
        assert np.isnan(a.astype(np.float32))[nan].all()


CASES = {name: make(name) for name in SHAPES}
CASES["with lanes that are not valid"] = make("Llama-3-8B bf16", valid=VALID)
CASES["stored as bf16"] = make("DeepSeek-V3 latent bf16", store="same")
CASES["stored as fp8"] = make("e5m2 from f16", store="same")


@functools.partial(jax.jit, static_argnames=("dtype", "implementation", "interpret"))
def run(leaves, values, scales, loc, valid, **static):
    return kv_write(leaves, values, loc, scales=scales, valid=valid, **static)


@pytest.fixture(scope="module")
def interpreted():
    """Every case by the Triton kernel, in one process: name -> new leaves."""
    calls = {
        name: triton_interpreter.Call(
            "pallas_kernels.kv_write.triton",
            "kv_write",
            (case.leaves, case.values, case.scales, case.loc, case.valid),
            {"dtype": case.dtype},
        )
        for name, case in CASES.items()
    }
    first = CASES["odd sizes"]
    for config in (Config(1, 2, 1), Config(4, 32, 1)):
        calls[f"odd sizes, {config}"] = dataclasses.replace(
            calls["odd sizes"], static={"dtype": first.dtype, "config": config}
        )
    results = triton_interpreter.run(list(calls.values()))
    return dict(zip(calls, results, strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas_triton"])
def test_every_implementation_writes_the_same_bytes(implementation, name, request):
    """B38: dropped lanes and the last part of a tile; B41, B43: NaN in padding lanes reaches nothing."""
    case = CASES[name]
    if implementation == "triton":
        got = request.getfixturevalue("interpreted")[name]
    else:
        arrays = (case.leaves, case.values, case.scales, case.loc, case.valid)
        interpret = implementation == "pallas_triton"
        got = run(*arrays, dtype=case.dtype, implementation=implementation, interpret=interpret)
    assert_same(got, case)
