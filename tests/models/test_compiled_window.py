"""The programs of a model with window layers, compiled: pools and mapping in place, and nothing grows with the pool."""

from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from kvjax.compiled import compile_for, h200_available, inspect
from models.config import ModelConfig
from models.decoder import Decoder
from models.programs import Shapes, abstract_state, build_decode, build_extend, split_decoder

pytestmark = pytest.mark.compiled

LANES, ROWS, CONTEXT, PAGE, CHUNK, SLOTS = 4, 16, 1024, 16, 32, 1 << 18
CONFIG = ModelConfig(
    family="gemma3",
    vocab_size=64,
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
    shapes = Shapes(LANES, ROWS, CONTEXT, slots, PAGE, 8, CHUNK, mode)
    pool, ledger = abstract_state(CONFIG, shapes, kv_dtype=jnp.float32)
    if kind == "decode":
        program = build_decode(graph, weights, pool, ledger, LANES, 8)
    else:
        program = build_extend(graph, weights, pool, ledger, 2, CHUNK)
    compiled = compile_for(program.function, program.arguments, platform, donate_argnums=program.donated)
    return pool, ledger, inspect(compiled)


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def walked(account, pool, ledger, slots: int) -> list:
    """Operations over something as large as a layer's buffer or a list of pages, and copies of any leaf of the books.

    Not those of row-sized leaves: the programs of every model read lengths before the loop that then updates them.
    """
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    lists = [leaf for leaf in jax.tree.leaves(ledger) if leaf.size > ledger.lens.size]
    pages = min(leaf.size * 4 for leaf in lists if leaf.size >= slots // PAGE)
    shapes = {f"s32[{','.join(map(str, leaf.shape))}]" for leaf in lists}
    return [
        op
        for op in account.large_ops(1)
        if op.nbytes >= smallest
        or (op.shape.startswith("s32") and op.nbytes >= pages)  # activations may be as long as a list of pages
        or (op.opcode == "copy" and op.shape in shapes)
    ]


CASES = [(kind, mode, "cpu") for kind in ("decode", "extend") for mode in ("dual", "ring")]


@pytest.mark.parametrize(
    ("kind", "mode", "platform"), [*CASES, pytest.param("decode", "dual", "h200", marks=pytest.mark.aot)]
)
def test_pools_and_mapping_stay_in_place_at_every_size(kind, mode, platform):
    if platform == "h200":
        available, why = h200_available()
        assert available, f"`make test` installs the deviceless compiler: {why}"
    found = {}
    for slots in (SLOTS, 4 * SLOTS):
        pool, ledger, account = report(kind, mode, slots, platform)
        assert account.alias_bytes >= nbytes(pool) + nbytes(ledger)
        assert not (moved := walked(account, pool, ledger, slots)), "\n".join(map(str, moved))
        found[slots] = account.temp_bytes
    assert found[4 * SLOTS] <= found[SLOTS] + 4096, "temporaries grow neither with slots nor with tokens"
