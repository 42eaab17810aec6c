"""Hybrid decoders: the decode program compiled, and what it does with lanes that finish inside it."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import HybridReqToTokenPool, Ledger, PagedTokenToKVPoolAllocator, release_rows
from kvjax.compat import traced_for
from kvjax.compiled import compile_for, h200_available, inspect
from kvjax.compiled.report import launches
from kvjax.invariants import report
from models.recurrent.config import GatedDelta, HybridConfig, Mamba2, ShortConv
from models.recurrent.decoder import HybridDecoder, create_pool
from models.recurrent.programs import decode_program, extend_program
from models.recurrent.weights import expected_tensors
from pallas_kernels import jax_triton_adapter

CELLS = {
    "lfm2": ShortConv(32, 3, False),
    "qwen3_next": GatedDelta(2, 4, 8, 8, 4),
    "falcon_h1": Mamba2(4, 8, 1, 8, 4, True, False, False, (0.0, float("inf"))),
    "bamba": Mamba2(4, 8, 2, 8, 4, True, False, True, (0.0, float("inf"))),
}
PAGE, LANES = 4, 4
IN_XLA = {"implementation": "xla"}


def config_of(family):
    side_by_side = family == "falcon_h1"
    return HybridConfig(
        family=family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        attention_layers=(0, 1) if side_by_side else (1,),
        recurrent_layers=(0, 1) if side_by_side else (0,),
        recurrent=CELLS[family],
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        rope_theta=1e4,
        norm_eps=1e-5,
        qk_norm=family == "qwen3_next",
        output_gate=family == "qwen3_next",
        tie_word_embeddings=True,
        max_context_len=64,
    )


def state(config, slots, tokens):
    table = HybridReqToTokenPool.create(LANES, 64, slots, extra_buffer=True)
    ledger = Ledger.create(table, PagedTokenToKVPoolAllocator.create(tokens, PAGE))
    return ledger, create_pool(config, tokens, PAGE, slots)


@pytest.mark.compiled
@pytest.mark.parametrize("platform", ["cpu", "h200"])
@pytest.mark.parametrize("family", CELLS)
def test_no_leaf_is_copied_and_temporaries_grow_neither_with_slots_nor_with_tokens(family, platform):
    if platform == "h200":
        available, why = h200_available()
        assert available, f"`make test` installs the deviceless compiler: {why}"
    config, size = config_of(family), 2**16
    graph, weights = nnx.split(HybridDecoder.abstract(config))
    decode, lanes = decode_program(graph, 8, (2,)), jax.ShapeDtypeStruct((LANES,), jnp.int32)

    def compiled(slots, tokens):
        books = jax.eval_shape(lambda: state(config, slots, tokens))
        program = compile_for(decode, (weights, *books, lanes, lanes, lanes), platform, donate_argnums=(1, 2))
        return books, inspect(program)

    books, small = compiled(size, size)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(books))
    smallest = 4 * size // PAGE  # the list of free pages; slot lists and pool leaves are larger
    assert small.alias_bytes >= held
    assert not (moved := small.large_ops(smallest * PAGE)), "\n".join(map(str, moved))
    if platform == "h200":  # one launch writes a layer, and one reads it: rows are too short for splits
        layers = len(config.attention_layers)
        assert attention_kernels(small) == (layers, layers)
    _, large = compiled(4 * size, 4 * size)  # a temporary that grew with either would show
    assert not large.large_ops(smallest * PAGE)
    assert large.temp_bytes <= small.temp_bytes + 4096, "the same at four times the size"


@pytest.mark.parametrize("family", CELLS)
def test_lanes_that_finish_inside_the_program_give_everything_back_and_write_nowhere(family):
    config, rng = config_of(family), np.random.default_rng(0)
    weights = {n: rng.normal(size=s).astype(np.float32) / 6 for n, s in expected_tensors(config).items()}
    graph, weights = nnx.split(HybridDecoder.from_weights(config, weights))
    ledger, pool = state(config, 12, 256)
    extend = jax.jit(extend_program(graph))
    decode = jax.jit(decode_program(graph, 8), donate_argnums=(1, 2))
    tokens, lens = rng.integers(0, 64, (LANES, 5)).astype(np.int32), np.array([5, 3, 4, 0], np.int32)
    rows, none = np.array([-1, -1, -1, 0], np.int32), np.zeros(LANES, np.int32)
    ledger, pool, rows, _, kept, ok = extend(weights, ledger, pool, rows, none, tokens, lens)
    assert ok
    assert (np.asarray(kept) > 0).tolist() == [True, True, True, False]
    long = np.array([8, 8, 8, 0], np.int32)
    _, _, _, every, _, _ = decode(weights, *jax.tree.map(jnp.copy, (ledger, pool)), rows, none, long)
    _, briefly, *_ = decode(weights, *jax.tree.map(jnp.copy, (ledger, pool)), rows, none, long // 4)
    slots = np.asarray(ledger.table.working_slots(rows))
    ledger, pool, after, out, done, ok = decode(weights, ledger, pool, rows, none, np.array([2, 8, 5, 0], np.int32))
    assert (int(done), bool(ok), after.tolist()) == (8, True, [0, 0, 0, 0])
    np.testing.assert_array_equal(out[1], every[1])
    np.testing.assert_array_equal(out[0], [*every[0, :2].tolist(), *[0] * 6])
    assert int(ledger.table.slots.available_size()) == 12
    assert int(ledger.allocator.available_size()) == 256
    assert report(ledger) == ""
    for now, then in zip(
        jax.tree.leaves(pool.mamba.slot_leaves()), jax.tree.leaves(briefly.mamba.slot_leaves()), strict=True
    ):
        np.testing.assert_array_equal(now[slots[0]], then[slots[0]], "nothing wrote through the stale slot")
        assert not np.asarray(now[0]).any(), "the sink stays zero"


def test_xla_is_what_a_cpu_runs_and_a_kernel_is_refused_there():
    config = config_of("lfm2")
    graph, weights = nnx.split(HybridDecoder.abstract(config))
    lane, chunk = jax.ShapeDtypeStruct((LANES,), jnp.int32), jax.ShapeDtypeStruct((LANES, 5), jnp.int32)
    books = jax.eval_shape(lambda: state(config, 64, 256))
    for build, lanes in (
        (lambda **how: decode_program(graph, 4, **how), (lane, lane, lane)),
        (lambda **how: extend_program(graph, **how), (lane, lane, chunk, lane)),
    ):
        texts = [jax.jit(build(**how)).lower(weights, *books, *lanes).as_text() for how in ({}, IN_XLA)]
        assert texts[0] == texts[1]
        with pytest.raises(ValueError, match="'triton' needs an NVIDIA GPU and the platform is 'cpu'"):
            jax.eval_shape(build(implementation="triton"), weights, *books, *lanes)


def test_xla_is_all_xla_on_a_gpu():
    config = config_of("lfm2")
    graph, weights = nnx.split(HybridDecoder.abstract(config))
    lane, books = jax.ShapeDtypeStruct((LANES,), jnp.int32), jax.eval_shape(lambda: state(config, 64, 256))
    with traced_for("NVIDIA H200", 132, "cuda"):
        kernels = {
            name: str(jax.make_jaxpr(decode_program(graph, 4, implementation=name))(weights, *books, lane, lane, lane))
            for name in (None, "xla")
        }
    found = {name: text.count("triton_kernel_call") + text.count("pallas_call") for name, text in kernels.items()}
    assert found["xla"] == 0 < found[None]


def attention_kernels(facts):
    """(launches that write keys and values, launches that read them) of a turn of the decode loop."""
    body = max(facts.loop_kernels, key=lambda name: facts.loop_kernels[name])
    of_scope = [
        [i for i in launches(facts.module, body) if scope in i.attributes]
        for scope in ("/write_kv/", "/paged_attention/")
    ]
    target = "triton_kernel_call" if jax_triton_adapter.why_not() is None else "triton"
    for i in (*of_scope[0], *of_scope[1]):
        assert i.opcode == "custom-call", i
        assert target in i.attributes
    return tuple(map(len, of_scope))


def test_one_compilation_serves_any_mixture_of_lanes():
    """Random admissions, lengths, limits and retractions: each program is traced once."""
    config, rng = config_of("lfm2"), np.random.default_rng(1)
    weights = {n: rng.normal(size=s).astype(np.float32) / 6 for n, s in expected_tensors(config).items()}
    graph, weights = nnx.split(HybridDecoder.from_weights(config, weights))
    traced = {"extend": 0, "decode": 0, "release": 0}

    def counted(name, function):
        def program(*args):
            traced[name] += 1
            return function(*args)

        return jax.jit(program, donate_argnums=(0,) if name == "release" else (1, 2))

    extend, release = counted("extend", extend_program(graph)), counted("release", release_rows)
    decode = counted("decode", decode_program(graph, 4, (3,)))
    ledger, pool = state(config, 12, 256)
    rows, lens = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    for _ in range(60):
        new = (rows == 0) & (rng.random(LANES) < 0.6)
        going = (rows > 0) & (rng.random(LANES) < 0.3) & (lens < 40)
        chunk = np.where(new | going, rng.integers(1, 6, LANES), 0).astype(np.int32)
        tokens = rng.integers(0, 64, (LANES, 5)).astype(np.int32)
        asked = np.where(new, -1, np.where(going, rows, 0)).astype(np.int32)
        ledger, pool, taken, _, _, ok = extend(weights, ledger, pool, asked, np.where(going, lens, 0), tokens, chunk)
        assert ok
        rows = np.where(new, np.asarray(taken), rows)
        lens = np.where(new, chunk, lens + chunk)
        limit = np.where(lens < 50, rng.integers(0, 5, LANES), 0).astype(np.int32)
        ledger, pool, left, _, done, ok = decode(weights, ledger, pool, rows, tokens[:, 0], limit)
        assert ok
        lens = np.where(np.asarray(left) > 0, lens + int(done), lens)
        # A lane with limit 0 stood aside: its row is as it was.
        rows = np.where(limit > 0, np.asarray(left), rows)
        back = np.where(rng.random(LANES) < 0.2, rows, 0).astype(np.int32)
        ledger = release(ledger, back)
        rows = np.where(back > 0, 0, rows)
    assert traced == {"extend": 1, "decode": 1, "release": 1}
    assert report(ledger) == ""
