"""The two programs of a hybrid decoder as plain functions, to be jitted with ledger and pool donated.

implementation: of the kernels, see `pallas_kernels.registry`; None: the best of the platform. It chooses for what there
are kernels for: attention over the KV pool, the write of keys and values, and the pages that the ledger hands out. The
rest is XLA whatever is named: rows and state slots, the release of rows, states handed over, read, written and
checkpointed, and the recurrences themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvjax import Ledger, alloc_for_decode, checkpoint, extend_with_state, release_rows
from kvjax.operation import state
from kvjax.recurrent import HybridLinearKVPool, hybrid_table
from models.batch import Batch
from models.programs import books_implementation


def extend_program(graph: Any, *, implementation: str | None = None) -> Callable[..., Any]:
    """extend(weights, ledger, pool, rows, prefix, tokens, lens, copy_from=None, prefix_loc=None).

    One chunk of prefill: rows, pages and state slots taken and handed over, the model run, and a checkpoint of the
    state behind the chunk where the row has a tracking slot. rows: i32[b], -1 for a new one; prefix, lens: i32[b],
    tokens before and in the chunk; tokens: i32[b, t]; copy_from, prefix_loc: see `extend_with_state`.
    Returns (ledger, pool, rows, logits f32[b, t, vocab], checkpoint slots i32[b], ok). When traced, raises ValueError
    for an implementation that cannot run.
    """
    books = books_implementation(implementation)

    def extend(weights, ledger, pool, rows, prefix, tokens, lens, copy_from=None, prefix_loc=None):
        ledger, states, rows, slots, _, ok = extend_with_state(
            ledger,
            pool.mamba,
            rows,
            prefix,
            prefix + lens,
            capacity=tokens.size,
            copy_from=copy_from,
            prefix_loc=prefix_loc,
            implementation=books,
        )
        batch, positions = Batch.create(ledger.table.req_to_token, rows, prefix, lens, tokens.shape[1])
        pool = pool.with_mamba(states)
        model = nnx.merge(graph, weights)
        logits, pool = model(tokens, positions, pool, batch, slots, logits="all", implementation=implementation)
        ledger, states, kept = checkpoint(ledger, pool.mamba, rows, (lens > 0) & ok)
        return ledger, pool.with_mamba(states), rows, logits, kept, ok

    return extend


@state
class _Loop:
    ledger: Ledger
    pool: HybridLinearKVPool
    rows: jax.Array  # i32[b]; 0 once the lane is finished
    tokens: jax.Array  # i32[b], fed by the next step
    ok: jax.Array  # bool[], the last step had its pages
    step: jax.Array  # i32[]
    out: jax.Array  # i32[b, steps]


def decode_program(
    graph: Any, steps: int, eos_ids: tuple[int, ...] = (), *, implementation: str | None = None
) -> Callable[..., Any]:
    """decode(weights, ledger, pool, rows i32[b], tokens i32[b], limit i32[b]): up to `steps` greedy steps, in-graph.

    A lane ends with one of eos_ids or after `limit` tokens; its row, pages and state slots go back before the next
    step, and from then on it reads and writes the sink. The loop ends when no lane is left, or with ok == False when
    a step can not have its pages; that step changes nothing.
    Returns (ledger, pool, rows, out i32[b, steps], 0 behind a lane's end, steps done, ok). When traced, raises
    ValueError for an implementation that cannot run.
    """
    books = books_implementation(implementation)

    def decode(weights, ledger: Ledger, pool: HybridLinearKVPool, rows, tokens, limit):
        def turn(c: _Loop) -> _Loop:
            ledger, _, positions, ok = alloc_for_decode(c.ledger, c.rows, implementation=books)
            active = (c.rows > 0) & ok
            batch, positions = Batch.create(ledger.table.req_to_token, c.rows, positions, active.astype(jnp.int32), 1)
            slots = hybrid_table(ledger).working_slots(jnp.where(active, c.rows, 0))
            model, tokens = nnx.merge(graph, weights), c.tokens[:, None]
            logits, pool = model(tokens, positions, c.pool, batch, slots, implementation=implementation)
            token = jnp.where(active, jnp.argmax(logits, axis=-1).astype(jnp.int32), 0)
            ended = active & (jnp.isin(token, jnp.array(eos_ids, jnp.int32)) | (c.step + 1 >= limit))
            ledger = release_rows(ledger, jnp.where(ended, c.rows, 0), implementation=books)
            out = lax.dynamic_update_slice_in_dim(c.out, token[:, None], c.step, axis=1)
            return _Loop(ledger, pool, jnp.where(ended, 0, c.rows), token, ok, c.step + ok, out)

        first = _Loop(
            ledger,
            pool,
            jnp.where(limit > 0, rows, 0),
            tokens,
            jnp.ones((), bool),
            jnp.zeros((), jnp.int32),
            jnp.zeros((rows.shape[0], steps), jnp.int32),
        )
        end = lax.while_loop(lambda c: c.ok & (c.step < steps) & jnp.any(c.rows > 0), turn, first)
        return end.ledger, end.pool, end.rows, end.out, end.step, end.ok

    return decode
