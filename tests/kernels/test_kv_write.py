"""kv_write: every implementation, the same calls, bit for bit against the pools' meaning written with NumPy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.compat import traced_for
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from kvjax.pools.dtypes import SUPPORTED
from pallas_kernels import jax_triton_adapter, registry
from pallas_kernels.kv_write import kv_write, mosaic, pallas_triton
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
    "e4m3 from bf16, one head": ("float8_e4m3fn", "bfloat16", [(1, 128, [128])], None),
    "e5m2 from f16, one head": ("float8_e5m2", "float16", [(1, 256, [256])], None),
    "bf16 from f16, one head": ("bfloat16", "float16", [(1, 128, [128])], None),
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
        if store == "same":  # XLA's CPU backend converts such a leaf as a whole, and a NaN loses its payload
            old = np.where(np.isnan(old.astype(np.float32)), 1, old).astype(dtype)
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


EVERYWHERE = ("xla", "triton", "pallas_triton")
BY_MOSAIC = [name for name, case in CASES.items() if all(math.prod(leaf.shape[1:]) % 128 == 0 for leaf in case.leaves)]


@pytest.mark.parametrize(
    ("implementation", "name"),
    [*((way, name) for way in EVERYWHERE for name in CASES), *(("mosaic", name) for name in BY_MOSAIC)],
)
def test_every_implementation_writes_the_same_bytes(implementation, name, request):
    """B38: dropped lanes and the last part of a tile; B41, B43: NaN in padding lanes reaches nothing."""
    case = CASES[name]
    if implementation == "triton":
        got = request.getfixturevalue("interpreted")[name]
    else:
        arrays = arrays_of(case)
        if implementation == "mosaic":
            mosaic_or_skip()
        interpret = implementation in registry.PALLAS
        got = run(*arrays, dtype=case.dtype, implementation=implementation, interpret=interpret)
    assert_same(got, case)


def mosaic_or_skip():
    """One known reason to be refused; with another one the test goes on and fails."""
    reason = mosaic.unsupported(*arrays_of(CASES["Llama-3-8B bf16"]), dtype=DTYPES["bfloat16"])
    if reason is not None and "in place from JAX 0.11 on" in reason:
        pytest.skip(reason)  # on JAX 0.10; that it is refused there is a test of its own


def arrays_of(case):
    return case.leaves, case.values, case.scales, case.loc, case.valid


@pytest.mark.parametrize(
    ("version", "device", "name", "reason"),
    [
        ("0.10.2", "NVIDIA H200", "Llama-3-8B bf16", r"with JAX 0\.10\.2 .* in place from JAX 0\.11 on"),
        ("0.11.2", "NVIDIA H200", "DeepSeek-V3 latent bf16", "a row of 1 heads x 576 is no multiple of 128 values"),
        ("0.11.2", "NVIDIA A100", "Llama-3-8B bf16", r"needs compute capability 9\.0 and this GPU has 8\.0"),
    ],
)
def test_mosaic_says_what_it_cannot_do(version, device, name, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with traced_for(device, 132, "cuda"), pytest.raises(ValueError, match=f"'mosaic' cannot be used: .*{reason}"):
        run(*arrays_of(CASES[name]), dtype=CASES[name].dtype, implementation="mosaic", interpret=False)


def test_mosaic_is_taken_where_neither_form_of_triton_can(monkeypatch):
    """Without jax-triton, and for a leaf that Pallas' Triton lowering would address with 32 bits."""
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    value, loc = jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    taken = []
    for slots in (2**20, 2**21 + 64):
        leaf = jax.ShapeDtypeStruct((slots, 8, 128), jnp.uint8)
        with traced_for("NVIDIA H200", 132, "cuda"):
            arrays = (leaf,), ((value,),), (None,), loc, None
            taken.append(registry.best("kv_write", *arrays, dtype=DTYPES["float8_e4m3fn"]))
    assert taken == ["pallas_triton", "mosaic"]


@pytest.mark.parametrize("config", [Config(1, 2, 1), Config(4, 32, 1)], ids=str)
def test_any_cut_of_the_work_writes_the_same_bytes(config, interpreted):
    assert_same(interpreted[f"odd sizes, {config}"], CASES["odd sizes"])


def test_a_row_past_2_to_the_31_bytes_is_its_own():
    """B45: row 254,201 of 8,448 bytes begins at byte 2,147,490,048, in a leaf that is mapped and hardly touched."""
    call = triton_interpreter.Call("tests.kernels.large_leaf", "rows_written", (np.array([254_201, 3], np.int32),))
    (found,) = triton_interpreter.run([call])
    assert found.tolist() == [3, 254_201]


def test_a_leaf_that_pallas_would_address_with_32_bits_is_refused():
    """B45: Pallas asks only whether a leaf has more than 2^32 bytes."""

    def choice(slots, width, store):
        leaf = jax.ShapeDtypeStruct((slots, 1, width), store)
        value = jax.ShapeDtypeStruct((2, 1, width), jnp.bfloat16)
        loc = jax.ShapeDtypeStruct((2,), jnp.int32)
        return kv_write_refused((leaf,), ((value,),), (None,), loc, None, dtype=jnp.dtype("float8_e4m3fn"))

    kv_write_refused = pallas_triton.unsupported
    assert "addressed with 32 bits" in str(choice(254_300, 8_448, jnp.uint8))
    assert choice(254_200, 8_448, jnp.uint8) is None
    assert choice(2 * 254_300, 8_448, jnp.uint8) is None  # 64 bits


@pytest.mark.parametrize(
    ("values", "dtype", "reason"),
    [
        (((1, 8), (1, 4), (1, 4)), "float32", "one launch writes two parts, and these are 3"),
        (((2, 6),), "float32", "with 2 heads a row has no room behind a part"),
        (((1, 16),), "float8_e5m2", "values of float8_e5m2 are not converted to float32"),
    ],
)
def test_what_a_kernel_cannot_do_is_said(values, dtype, reason):
    parts = tuple(jnp.zeros((2, heads, width), dtype) for heads, width in values)
    leaf = jnp.zeros((8, values[0][0], 16), jnp.float32)
    with pytest.raises(ValueError, match=f"'pallas_triton' cannot be used: {reason}"):
        kv_write((leaf,), (parts,), jnp.zeros(2, jnp.int32), dtype=jnp.float32, interpret=True)


def test_a_gpu_without_e4m3_gets_xla_and_others_the_kernel():
    def best(device, name):
        case = CASES[name]
        arrays = arrays_of(case)
        with traced_for(device, 100, "cuda"):
            return registry.best("kv_write", *arrays, dtype=case.dtype)

    e4m3, bf16 = "Qwen3-32B e4m3 from bf16", "Llama-3-8B bf16"
    kernel = "pallas_triton" if jax_triton_adapter.why_not() else "triton"
    assert [best("NVIDIA A100", name) for name in (e4m3, bf16)] == ["xla", kernel]
    assert [best("NVIDIA H200", name) for name in (e4m3, bf16)] == [kernel, kernel]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"leaves": ()}, "0 leaves, 1 values and 0 scales"),
        ({"loc": jnp.zeros(3, jnp.float32)}, "loc must be int32"),
        ({"loc": jnp.zeros(2, jnp.int32)}, r"values must be float32\[2, 2, any\], got float32\[3, 2, 4\]"),
        ({"valid": jnp.ones(2, bool)}, r"valid must be bool\[3\]"),
        ({"dtype": jnp.bfloat16}, "a leaf of float32 cannot hold bfloat16; make it bfloat16 or uint16"),
        ({"values": ((jnp.zeros((3, 2, 4), jnp.int32),),)}, "values must be floating, got int32"),
        ({"values": ((jnp.zeros((3, 2, 5)),),)}, r"parts of widths \[5\] do not fit a row of 2 heads x 4"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(change, reason):
    good = {"leaves": (jnp.zeros((8, 2, 4)),), "values": ((jnp.ones((3, 2, 4)),),), "loc": jnp.arange(3)}
    good |= {"dtype": jnp.float32}
    assert kv_write(**good)[0].sum() == 16  # slots 1 and 2
    with pytest.raises(ValueError, match=reason):
        kv_write(**(good | change))


def test_the_default_cut_covers_every_shape_with_powers_of_two():
    for case in CASES.values():
        for rows in (1, 3, 64, 256, 8192):
            loc = jax.ShapeDtypeStruct((rows,), jnp.int32)
            config = default_config(case.leaves, case.values, loc)
            for number in dataclasses.astuple(config):
                assert number >= 1
                assert number & (number - 1) == 0
            assert config.tokens * config.columns <= 8 * 128 * 16


def test_the_pools_write_through_it_under_vmap_too():
    pool = MHATokenToKVPool.create(8, 4, 2, 2, 4, dtype=jnp.float32)
    k = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4) + 1
    written = pool.set_kv_buffer(1, [4, 0, 6], k, -k, implementation="xla")
    assert written.read(1, [4, 0, 6])[0].tolist() == [k[0].tolist(), np.zeros((2, 4)).tolist(), k[2].tolist()]
    with pytest.raises(ValueError, match="kv_write: 'triton' needs an NVIDIA GPU and the platform is 'cpu'"):
        pool.set_kv_buffer(1, [4, 0, 6], k, -k, implementation="triton")
    latents = MLATokenToKVPool.create(8, 4, 1, 4, 2, dtype=jnp.float32)
    with pytest.raises(ValueError, match="'nothing' is not one of xla, triton"):
        latents.set_mla_kv_buffer(0, [4], np.ones((1, 1, 4)), np.ones((1, 1, 2)), implementation="nothing")
    many = jax.vmap(lambda loc: pool.set_kv_buffer(1, loc, k, k).k[1])(jnp.array([[4, 5, 6], [7, 8, 9]]))
    assert [np.nonzero(np.asarray(leaf).any((1, 2)))[0].tolist() for leaf in many] == [[4, 5, 6], [7, 8, 9]]


def test_mosaic_writes_many_pools_under_vmap():
    mosaic_or_skip()
    rng, kind = np.random.default_rng(0), jnp.float32
    leaves, values = (rng.normal(size=(3, n, 1, 128)).astype(kind) for n in (9, 4))
    loc = np.array([[1, 0, 3, 8], [2, -1, 9, 4], [7, 6, 5, 1]], np.int32)

    def write(implementation, interpret, leaf, value, loc):
        how = {"dtype": kind, "implementation": implementation, "interpret": interpret}
        return kv_write((leaf,), ((value,),), loc, **how)[0]

    want, got = (
        jax.vmap(functools.partial(write, *how))(leaves, values, loc) for how in (("xla", False), ("mosaic", True))
    )
    np.testing.assert_array_equal(got, want)


def test_fp8_values_are_divided_as_float32():
    leaf = jnp.zeros((4, 1, 8), jnp.float8_e4m3fn)
    values = jnp.arange(8, dtype=jnp.float32).reshape(1, 1, 8)
    (got,) = kv_write(
        (leaf,), ((values.astype(leaf.dtype),),), jnp.array([2], jnp.int32), dtype=leaf.dtype, scales=(0.5,)
    )
    assert got[2].astype(jnp.float32).tolist() == (values[0] * 2).tolist()
    for scale in (jnp.ones(2), jnp.ones(1)):
        with pytest.raises(ValueError, match=r"a scale has shape .*; one scalar for a whole leaf was expected"):
            kv_write((leaf,), ((values,),), jnp.array([2], jnp.int32), dtype=leaf.dtype, scales=(scale,))
