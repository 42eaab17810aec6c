"""A donated pool is written in place, at the same cost however large it is: read off the compiled programs."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools import MHATokenToKOnlyPool, MHATokenToKVPool, MLATokenToKVPool, leaves
from kvjax.pools.dtypes import SUPPORTED

pytestmark = pytest.mark.compiled

TOKENS, HEADS, DIM, LAYERS, PAGE = 16, 2, 64, 2, 16
LOC = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
SIZES = (1_000, 1_000_000)


def abstract(make):
    return jax.eval_shape(make)


def mha(size, dtype):
    return abstract(lambda: MHATokenToKVPool.create(size, PAGE, LAYERS, HEADS, DIM, dtype=dtype))


def mla(size, dtype):
    return abstract(lambda: MLATokenToKVPool.create(size, PAGE, LAYERS, 96, 16, dtype=dtype, width=128))


def k_only(size, dtype):
    return abstract(lambda: MHATokenToKOnlyPool.create(size, PAGE, LAYERS, HEADS, DIM, dtype=dtype))


def rows(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


KV = rows(TOKENS, HEADS, DIM)
SCALE = rows()


def write(pool, loc, k, scale):
    return pool.set_kv_buffer(1, loc, k, k, scale, scale)


def prefix(pool, loc, k):
    return pool.set_kv_buffer_prefix_valid(0, loc.reshape(4, -1), loc[:4], k, k)


def move(pool, dst, src):
    return pool.move_kv_cache(dst, src)


def latent(pool, loc, nope, rope):
    return pool.set_mla_kv_buffer(1, loc, nope, rope)


def whole_latent(pool, loc, k):
    return pool.set_kv_buffer(0, loc, k)


def keys(pool, loc, k):
    return pool.set_k_buffer(1, loc, k)


def write_then_read(pool, loc, k, scale):
    """The order of a decode step: the new token is written, then read with the others."""
    pool = write(pool, loc, k, scale)
    k_read, v_read = pool.read(1, loc)
    return pool.set_kv_buffer(0, loc, k_read.astype(k.dtype), v_read.astype(k.dtype))


def looped(pool, loc, k, scale):
    def body(carry):
        i, p = carry
        return i + 1, write_then_read(p, (loc + i) % 100, k * i, scale)

    return jax.lax.while_loop(lambda c: c[0] < loc[0], body, (jnp.int32(0), pool))[1]


def scanned(pool, loc, k, scale):
    def body(p, x):
        p = move(write(p, loc + x, k, scale), loc, (loc + x) % 100)
        return p, p.read(1, loc)[0].astype(jnp.float32).sum()

    return jax.lax.scan(body, pool, loc)


PROGRAMS = {
    "mha write": (mha, write, (LOC, KV, SCALE)),
    "mha write in a while_loop": (mha, looped, (LOC, KV, SCALE)),
    "mha write, move and read in a scan": (mha, scanned, (LOC, KV, SCALE)),
    "mha prefix": (mha, prefix, (LOC, KV)),
    "mha move": (mha, move, (LOC, LOC)),
    "mla parts": (mla, latent, (LOC, rows(TOKENS, 1, 96), rows(TOKENS, 1, 16))),
    "mla whole": (mla, whole_latent, (LOC, rows(TOKENS, 1, 112))),
    "mla move": (mla, move, (LOC, LOC)),
    "k_only write": (k_only, keys, (LOC, KV)),
}


def compiled(make, program, args, size, dtype):
    pool = make(size, dtype)
    return pool, jax.jit(program, donate_argnums=0).lower(pool, *args).compile()


LOOPS = [name for name in PROGRAMS if " in a " in name]
STORED_APART = [jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)]  # one of each store width


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name in PROGRAMS for d in (STORED_APART if name in LOOPS else SUPPORTED)], ids=str
)
def test_a_program_that_writes_holds_no_copy_of_the_pool(name, dtype):
    make, program, args = PROGRAMS[name]
    temporary = []
    for size in SIZES:
        pool, executable = compiled(make, program, args, size, dtype)
        memory = executable.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool.nbytes, "every leaf must be updated in place"
        temporary.append(memory.temp_size_in_bytes)
        text = executable.as_text() or ""
        slots = pool.slots
        moved = re.findall(rf"= \w+\[(?:\d+,)*{slots},[\d,]*\]\S* (?:copy|convert|copy-start|broadcast)\(", text)
        assert not moved, moved
        assert f"[{slots}," in text, "the check must look at the leaves"
    assert temporary[0] == temporary[1], "a larger pool must not cost more"
    values = TOKENS * HEADS * DIM * 4
    assert temporary[1] < 64 * values < mha(SIZES[1], dtype).nbytes // 100


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_a_read_costs_what_it_gathers(dtype):
    temporary = []
    for size in SIZES:
        pool = mha(size, dtype)
        memory = jax.jit(lambda p, loc: p.read(0, loc)).lower(pool, LOC).compile().memory_analysis()
        assert memory is not None
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1] < 16 * TOKENS * HEADS * DIM * 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what the CPU backend does")
def test_a_bfloat16_leaf_stored_as_integers_is_why_the_write_is_in_place():
    """The fault that store_dtype avoids, where the installed JAX has it: fp8 leaves, converted as a whole."""

    def cost(store_dtype):
        pool = abstract(
            lambda: MHATokenToKVPool.create(
                1_000_000, PAGE, 1, HEADS, DIM, dtype=jnp.float8_e4m3fn, store_dtype=store_dtype
            )
        )
        memory = jax.jit(write_layer_0, donate_argnums=0).lower(pool, LOC, KV).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    def write_layer_0(pool, loc, k):
        return pool.set_kv_buffer(0, loc, k, k)

    assert cost(None) == cost("uint8") < 100_000 < cost("float8_e4m3fn")


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_three_donated_steps_keep_the_buffers_and_warn_of_nothing(dtype):
    """B53: only the pool is donated; its buffers are the same ones afterwards and the old state is gone."""
    step = jax.jit(lambda p, loc, k: p.set_kv_buffer(0, loc, k, k).move_kv_cache(loc, loc[::-1]), donate_argnums=0)
    pool = MHATokenToKVPool.create(32, 4, LAYERS, HEADS, DIM, dtype=dtype)
    loc, k = jnp.arange(4, 4 + TOKENS, dtype=jnp.int32), jnp.ones((TOKENS, HEADS, DIM), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            before, pointers = pool, [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
            pool = step(pool, loc, k)
            assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)] == pointers
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
            assert not loc.is_deleted()
            assert not k.is_deleted()


def test_no_operation_donates_anything_by_itself():
    """B56: whoever keeps an old state, or the rows that were written, can still read them."""
    k = jnp.ones((2, 1, 4))
    loc, lens = jnp.asarray([4, 5]), jnp.asarray([1, 0])
    table = loc[:, None]
    latents = jnp.ones((2, 1, 6))
    mha_pool = MHATokenToKVPool.create(8, 4, 1, 1, 4, dtype=jnp.float32)
    mla_pool = MLATokenToKVPool.create(8, 4, 1, 4, 2, dtype=jnp.float32)
    k_pool = MHATokenToKOnlyPool.create(8, 4, 1, 1, 4, dtype=jnp.float32)
    after = [
        mha_pool.set_kv_buffer(0, loc, k, k),
        mha_pool.set_kv_buffer_prefix_valid(0, table, lens, k, k),
        mha_pool.move_kv_cache(loc, loc),
        mla_pool.set_kv_buffer(0, loc, latents),
        mla_pool.set_mla_kv_buffer(0, loc, latents[..., :4], latents[..., 4:]),
        mla_pool.move_kv_cache(loc, loc),
        k_pool.set_k_buffer(0, loc, k),
        k_pool.move_kv_cache(loc, loc),
    ]
    sources = jax.tree.leaves([mha_pool, mla_pool, k_pool, k, loc, lens, table, latents])
    assert not any(leaf.is_deleted() for leaf in sources + jax.tree.leaves(after))
    assert not any(leaf.any() for leaf in jax.tree.leaves([mha_pool, mla_pool, k_pool]))
    assert (k == 1).all()


# Pools past 2^31 elements.


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_slots_are_addressed_without_a_product_that_could_pass_int32():
    """B45: page 254,201 of 8,448 bytes starts at byte 2,147,490,048; the index of it stays (slot, head, column)."""
    slot, width = 254_201, 8_448
    assert slot * width == 2_147_490_048 > 2**31
    pool = abstract(lambda: MHATokenToKOnlyPool.create(254_300, 1, 1, 1, width, dtype=jnp.float8_e4m3fn))
    assert pool.nbytes == 254_301 * width > 2**31

    def program(p, loc, k):
        p = p.set_k_buffer(0, loc, k).move_kv_cache(loc, loc[::-1])
        return p, p.read(0, loc)

    found = list(equations(jax.make_jaxpr(program)(pool, LOC, rows(TOKENS, 1, width)).jaxpr))
    indexed = [eqn for eqn in found if eqn.primitive.name in ("gather", "scatter")]
    assert sorted(eqn.primitive.name for eqn in indexed) == ["gather", "gather", "scatter", "scatter"]
    for eqn in indexed:
        assert eqn.invars[1].aval.shape == (TOKENS, 1), "one index, the slot, for each row"
        assert eqn.params["dimension_numbers"] is not None
    products = [e for e in found if e.primitive.name == "mul" and jnp.issubdtype(e.outvars[0].aval.dtype, jnp.integer)]
    assert not products
    jax.jit(program, donate_argnums=0).lower(pool, LOC, rows(TOKENS, 1, width)).compile()


@pytest.mark.heavy
def test_a_slot_past_2_to_the_31_bytes_is_its_own():
    """B45, in a real buffer of 2 GiB."""
    slot, width = 254_201, 8_448
    pool = MHATokenToKOnlyPool.create(254_300, 1, 1, 1, width, dtype=jnp.float8_e4m3fn)
    k = np.full((2, 1, width), 2.0, np.float32)
    pool = jax.jit(lambda p, k: p.set_k_buffer(0, jnp.asarray([slot, 1]), k), donate_argnums=0)(pool, k)
    assert np.nonzero(np.asarray(pool.k[0])[:, 0, :].any(axis=1))[0].tolist() == [1, slot]
    moved = jax.jit(lambda p: p.move_kv_cache([slot - 1], [slot]), donate_argnums=0)(pool)
    assert (moved.read(0, [slot - 1, slot]) == 2).all()
    assert np.nonzero(np.asarray(moved.k[0])[:, 0, :].any(axis=1))[0].tolist() == [1, slot - 1, slot]


def test_a_batch_that_leaves_no_indices_for_dropped_lanes_is_refused():
    """Dropped lanes need distinct indices past the leaf's end, which must fit int32 too."""
    leaf = jax.ShapeDtypeStruct((2**31 - 10, 1, 1), jnp.uint8)
    with pytest.raises(ValueError, match=r"2147483638 .* 16 dropped lanes"):
        jax.eval_shape(leaves.write_rows, leaf, LOC, rows(TOKENS, 1, 1, dtype=jnp.uint8))
