"""Store dtypes, the encoding of values, and the exactness of scaled writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools.dtypes import SUPPORTED, decode, default_store_dtype, encode, pool_dtype, resolve_store_dtype

FP8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]
BOUND = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(UNSIGNED[array.dtype.itemsize])


@pytest.mark.parametrize(
    ("dtype", "cpu", "gpu"),
    [
        ("float32", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "uint16", "bfloat16"),
        ("float8_e4m3fn", "uint8", "uint8"),
        ("float8_e5m2", "uint8", "uint8"),
    ],
)
def test_default_store_dtype_is_what_the_platform_scatters_in_place(dtype, cpu, gpu):
    assert default_store_dtype(dtype, "cpu") == cpu
    assert default_store_dtype(dtype, "gpu") == default_store_dtype(dtype, "cuda") == gpu
    assert default_store_dtype(dtype) == default_store_dtype(dtype, jax.default_backend())


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_store_dtype_may_be_the_dtype_itself_or_an_unsigned_integer_of_its_width(dtype):
    assert resolve_store_dtype(dtype, dtype) == dtype
    assert resolve_store_dtype(dtype, UNSIGNED[dtype.itemsize]) == UNSIGNED[dtype.itemsize]
    other = {1: np.uint16, 2: np.uint8, 4: np.uint16}[dtype.itemsize]
    with pytest.raises(ValueError, match=rf"{np.dtype(other).name} .* cannot hold {dtype.name}"):
        resolve_store_dtype(dtype, other)


def test_store_dtype_of_the_right_width_but_another_meaning_is_refused():
    with pytest.raises(ValueError, match=r"float16 .* cannot hold bfloat16"):
        resolve_store_dtype(jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("dtype", ["int8", "float64", "float8_e4m3fnuz", "nonsense", None])
def test_dtypes_that_pools_do_not_hold_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match="bfloat16"):
        pool_dtype(dtype)


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_values_of_the_pools_dtype_survive_bit_for_bit_nan_payloads_included(dtype):
    width = dtype.itemsize
    patterns = np.arange(2 ** (8 * min(width, 2)), dtype=np.uint32) * (65_521 if width == 4 else 1)
    values = patterns.astype(UNSIGNED[width]).view(dtype)
    store = UNSIGNED[width]

    @jax.jit
    def there_and_back(x):
        stored = encode(x, dtype, store)
        return stored, decode(stored, dtype, store)

    stored, back = there_and_back(values)
    assert stored.dtype == store
    assert back.dtype == dtype
    assert (np.asarray(stored) == bits(values)).all()
    assert (bits(back) == bits(values)).all()


@pytest.mark.parametrize("dtype", FP8, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_fp8_cast_rounds_once_and_saturates_for_every_16_bit_value(dtype, source):
    """B49: every bfloat16 and float16 there is; for float32 a sweep over all exponents."""
    if source == "float32":
        patterns = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
        values = patterns.view(np.float32)
    else:
        values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(source))
    bound = BOUND[jnp.dtype(dtype).name]
    nan = np.isnan(values.astype(np.float32))
    want = np.clip(np.nan_to_num(values.astype(np.float32), posinf=np.inf, neginf=-np.inf), -bound, bound).astype(dtype)
    got = np.asarray(jax.jit(lambda x: encode(x, dtype, jnp.uint8))(values))
    assert (got[~nan] == bits(want)[~nan]).all()
    assert np.isnan(got.view(dtype)[nan].astype(np.float32)).all(), "NaN must stay NaN"


@pytest.mark.parametrize("source", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz])
@pytest.mark.parametrize("dtype", FP8, ids=lambda d: jnp.dtype(d).name)
def test_one_kind_of_fp8_is_stored_as_another(dtype, source):
    """The bound of e5m2 is none of e4m3fn's values."""
    values = jnp.asarray([1, -3, 0.25, 100, 240], source)
    stored = jax.jit(lambda x: encode(x, dtype, jnp.uint8))(values)
    want = values.astype(jnp.float32).astype(dtype).astype(jnp.float32)
    assert decode(stored, dtype, jnp.uint8).astype(jnp.float32).tolist() == want.tolist()
    assert np.isfinite(want).all()


@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
def test_fp8_overflow_saturates_whichever_dtype_it_comes_from(source):
    """B49"""
    values = jnp.asarray([500, -1e4, 465, 1e30, jnp.inf, -jnp.inf], source)
    stored = jax.jit(lambda x: encode(x, jnp.float8_e4m3fn, jnp.uint8))(values)
    read = decode(stored, jnp.float8_e4m3fn, jnp.uint8).astype(jnp.float32)
    assert read.tolist() == [448, -448, 448, 448, 448, -448]
    e5m2 = decode(encode(values, jnp.float8_e5m2, jnp.uint8), jnp.float8_e5m2, jnp.uint8).astype(jnp.float32)
    assert e5m2.tolist() == [512, -10240, 448, 57344, 57344, -57344]


def quotient(values: np.ndarray, scale: float) -> np.ndarray:
    """numpy's own: divide in float32, round to the input's dtype."""
    return (values.astype(np.float32) / np.float32(scale)).astype(values.dtype)


@pytest.mark.parametrize("scale", [0.37, 3.0, 0.05, 1 / 3])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "traced"])
def test_scaled_quotients_equal_numpys_bit_for_bit_inside_jit(source, scale, constant):
    values = (np.random.default_rng(1).normal(size=(512, 64)) * 10).astype(jnp.dtype(source))
    wide = jax.jit(
        (lambda x, _: encode(x, jnp.float32, jnp.float32, scale))
        if constant
        else (lambda x, s: encode(x, jnp.float32, jnp.float32, s))
    )(values, scale)
    assert (bits(wide) == bits(quotient(values, scale).astype(np.float32))).all()
    narrow = jax.jit(lambda x, s: encode(x, jnp.float8_e4m3fn, jnp.uint8, s))(values, scale)
    clipped = np.clip(quotient(values, scale).astype(np.float32), -448, 448).astype(jnp.float8_e4m3fn)
    assert (np.asarray(narrow) == bits(clipped)).all()


def test_quotient_is_rounded_to_the_inputs_dtype_before_the_cast():
    """1.0625 + tiny in float32 lies above a tie of e4m3fn that its bfloat16 rounding falls on."""
    values = np.random.default_rng(2).normal(size=20_000).astype(jnp.bfloat16)
    once = (values.astype(np.float32) / np.float32(0.37)).astype(jnp.float8_e4m3fn)
    twice = quotient(values, 0.37).astype(np.float32).astype(jnp.float8_e4m3fn)
    assert (bits(once) != bits(twice)).any(), "the sample must tell the two apart"
    got = jax.jit(lambda x: encode(x, jnp.float8_e4m3fn, jnp.uint8, 0.37))(values)
    assert (np.asarray(got) == bits(twice)).all()


def test_float16_subnormals_survive_a_scaled_write():
    values = np.asarray([6e-8, 1e-6, 3e-5, 6.1e-5], np.float16)
    got = jax.jit(lambda x: encode(x, jnp.float32, jnp.float32, 2.0))(values)
    assert (bits(got) == bits(quotient(values, 2.0).astype(np.float32))).all()


def test_scaled_encoding_works_under_vmap():
    values = np.random.default_rng(3).normal(size=(3, 8)).astype(np.float32)
    scales = np.asarray([0.37, 3.0, 0.05], np.float32)
    got = jax.vmap(lambda x, s: encode(x, jnp.bfloat16, jnp.uint16, s))(values, scales)
    want = (values / scales[:, None]).astype(jnp.bfloat16)
    assert (np.asarray(got) == bits(want)).all()
