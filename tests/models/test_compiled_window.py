"""The programs of a model with window layers, compiled: pools and mapping in place, and nothing grows with the pool."""

from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import compile_for, h200_available, inspect
from models.config import ModelConfig
from models.decoder import Decoder
from models.programs import Shapes, abstract_state, build_decode, build_extend, split_decoder

LANES, ROWS, CONTEXT, PAGE, CHUNK, SLOTS = 4, 16, 4096, 16, 32, 1 << 18
CONFIG = ModelConfig(
    family="gemma3",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    v_head_dim=32,
    qk_norm=True,
    zero_centred_norms=True,
    sandwich_norms=True,
    tie_word_embeddings=True,
    window=128,
    window_layers=(0, 2),
)


def report(kind: str, mode: str, slots: int, platform: Literal["cpu", "h200"]):
    """(pool, ledger, what XLA says) of a program."""
    graph, weights = split_decoder(Decoder.abstract(CONFIG))
    rows = slots // CONTEXT if mode == "ring" else ROWS
    shapes = Shapes(LANES, rows, CONTEXT, slots, PAGE, 8, CHUNK, mode)
    pool, ledger = abstract_state(CONFIG, shapes, kv_dtype=jnp.float32)
    if kind == "decode":
        program = build_decode(graph, weights, pool, ledger, LANES, 8)
    else:
        program = build_extend(graph, weights, pool, ledger, 2, CHUNK)
    compiled = compile_for(program.function, program.arguments, platform, donate_argnums=program.donated)
    return pool, ledger, inspect(compiled)


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mode", ["dual", "ring"])
@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("platform", ["cpu", pytest.param("h200", marks=pytest.mark.aot)])
def test_pools_and_mapping_stay_in_place_at_every_size(kind, mode, platform):
    if platform == "h200":
        available, why = h200_available()
        assert available, f"`make test` installs the deviceless compiler: {why}"
    found = {}
    for slots in (SLOTS, 4 * SLOTS):
        pool, ledger, account = report(kind, mode, slots, platform)
        assert account.alias_bytes >= nbytes(pool) + nbytes(ledger)
        # The full side's lists and the mapping: one entry per page and more, none of which may be walked or copied.
        smallest = min(leaf.size * 4 for leaf in jax.tree.leaves(ledger.allocator) if leaf.size >= slots // PAGE)
        assert not (moved := account.large_ops(smallest)), "\n".join(map(str, moved))
        found[slots] = account.temp_bytes
    assert found[4 * SLOTS] <= found[SLOTS] + 4096, "temporaries grow neither with slots nor with tokens"
