"""Runs prompts through a hybrid decoder: rows, pages and slots taken in-graph, chunked prefill, batched decode."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import HybridReqToTokenPool, Ledger, PagedTokenToKVPoolAllocator, alloc_for_decode, release_rows
from kvjax.invariants import report
from kvjax.layout import NEW_ROW, round_up
from models.batch import Batch
from models.recurrent.decoder import HybridDecoder, create_pool
from models.recurrent.programs import extend_program
from tests.quick import FAST_COMPILE


class Server:
    """A hybrid decoder with its ledger and pool, and two jitted programs of `lanes` lanes."""

    def __init__(self, decoder: HybridDecoder, lanes: int, context: int, chunk: int, page_size: int, tracking=False):
        graph, self.weights = nnx.split(decoder)
        self.lanes, self.chunk = lanes, chunk
        per_row = 3 if tracking else 1
        table = HybridReqToTokenPool.create(lanes, context, lanes * per_row + 2, extra_buffer=tracking)
        size = lanes * round_up(context, page_size)
        self.ledger = Ledger.create(table, PagedTokenToKVPoolAllocator.create(size, page_size))
        self.pool = create_pool(decoder.config, size, page_size, table.slots.size)
        self.ledger.check_pool(self.pool)

        def decode(weights, ledger, pool, rows, tokens):
            ledger, _, positions, ok = alloc_for_decode(ledger, rows)
            batch, positions = Batch.create(ledger.table.req_to_token, rows, positions, (rows > 0).astype(jnp.int32), 1)
            slots = ledger.table.working_slots(rows)
            logits, pool = nnx.merge(graph, weights)(tokens[:, None], positions, pool, batch, slots)
            return ledger, pool, logits, ok

        self._extend = jax.jit(extend_program(graph), donate_argnums=(1, 2), compiler_options=FAST_COMPILE)
        self._decode = jax.jit(decode, donate_argnums=(1, 2), compiler_options=FAST_COMPILE)

    def extend(self, rows, prefix, pieces, copy_from=None, prefix_loc=None):
        """One chunk: pieces[i] are lane i's next tokens. Returns (rows, logits of each piece, checkpoints' slots)."""
        lens = np.array([len(p) for p in pieces], np.int32)
        tokens = np.full((self.lanes, self.chunk), 1, np.int32)
        for lane, piece in enumerate(pieces):
            tokens[lane, : len(piece)] = piece
        copy_from = np.zeros(self.lanes, np.int32) if copy_from is None else copy_from
        self.ledger, self.pool, rows, logits, kept, ok = self._extend(
            self.weights, self.ledger, self.pool, rows, prefix, tokens, lens, copy_from, prefix_loc
        )
        assert ok
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        return np.asarray(rows), [logits[lane, :n] for lane, n in enumerate(lens)], np.asarray(kept)

    def prefill(self, prompts, skip=None, copy_from=None, prefix_loc=None):
        """Whole prompts in new rows, in chunks; an empty prompt is a lane not in use. skip: tokens already covered by
        copy_from and prefix_loc. Returns (rows, logits of every prompt token that was run, last checkpoints)."""
        done = np.zeros(self.lanes, np.int32) if skip is None else np.array(skip, np.int32)
        rows = np.array([NEW_ROW if len(p) else 0 for p in prompts], np.int32)
        logits, kept = [[] for _ in prompts], np.zeros(self.lanes, np.int32)
        while any(n < len(p) for n, p in zip(done, prompts, strict=True)):
            pieces = [p[n : n + self.chunk] for n, p in zip(done, prompts, strict=True)]
            lens = np.array([len(piece) for piece in pieces])
            used = np.where(lens > 0, rows, 0).astype(np.int32)
            prefix = np.where(lens > 0, done, 0).astype(np.int32)
            got, out, now = self.extend(used, prefix, pieces, copy_from, prefix_loc)
            rows, kept = np.where(lens > 0, got, rows).astype(np.int32), np.where(lens > 0, now, kept)
            for lane, piece in enumerate(out):
                logits[lane].append(piece)
            done = done + lens.astype(np.int32)
        return rows, [np.concatenate(parts) if parts else np.zeros((0, 0)) for parts in logits], kept

    def decode(self, rows, tokens):
        """One step: logits [lanes, vocab]."""
        self.ledger, self.pool, logits, ok = self._decode(
            self.weights, self.ledger, self.pool, np.asarray(rows, np.int32), np.asarray(tokens, np.int32)
        )
        assert ok
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        return logits

    def release(self, rows):
        self.ledger = release_rows(self.ledger, jnp.asarray(rows, jnp.int32))

    def poison_free_slots(self):
        """NaN in every state slot that nobody holds, and in every KV slot of a free page."""
        slot = np.arange(self.pool.mamba.size + 1)
        free = slot[(slot > 0) & ~np.asarray(self.ledger.table.slots.is_live(jnp.asarray(slot)))]
        states = self.pool.mamba.with_slot_leaves(
            jax.tree.map(lambda leaf: leaf.at[free].set(jnp.nan), self.pool.mamba.slot_leaves())
        )
        self.pool = self.pool.with_mamba(states)

    def check_empty(self):
        """Everything came back, nothing was refused."""
        table, ledger = self.ledger.table, self.ledger
        assert int(table.available_size()) == table.size
        assert int(table.slots.available_size()) == table.slots.size
        assert (int(ledger.allocator.available_size()), int(ledger.faults)) == (ledger.allocator.size, 0)
        assert report(ledger) == ""
