"""What a forward pass has to know about its lanes: rows, lengths, the page table, where the new tokens go."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.indexing import in_range, take2
from kvjax.layout import PAD_ROW, PAD_SLOT
from kvjax.ledger import Ledger
from kvjax.operation import state
from kvjax.pools import KVWriteLoc
from kvjax.window import needed_from, window_loc


@state
class Batch:
    """One chunk of a padded batch: lane i holds up to t new tokens of request row `rows[i]`.

    A lane that is not in use has row 0 and both lengths 0. The q_lens[i] real tokens are the first of a lane's t.
    """

    rows: jax.Array  # i32[b], row of the page table; 0: lane not in use
    q_lens: jax.Array  # i32[b], how many of the lane's t tokens are real
    kv_lens: jax.Array  # i32[b], tokens in the row, this chunk's included; 0: lane not in use
    req_to_token: jax.Array  # i32[rows, max_context_len], slot of each token of each row; row 0 is padding
    write_loc: jax.Array  # i32[b * t], slot of each new token, lane by lane; 0: padding, not written
    # What window layers read: the slots of each lane's tokens from window_start on, as a table of its own whose row
    # i + 1 belongs to lane i. Made once per step, so that a layer reads as few columns as a window has.
    window_table: jax.Array | None = None  # i32[b + 1, window + t - 1]
    window_start: jax.Array | None = None  # i32[b], position of the table's first column
    swa_loc: jax.Array | None = None  # i32[b * t], where window layers write, if they have a pool of their own

    @classmethod
    def create(
        cls,
        req_to_token: jax.Array,
        rows: jax.Array,
        prefix_lens: jax.Array,
        q_lens: jax.Array,
        width: int,
        *,
        window: int | None = None,
        ledger: Ledger | None = None,
    ) -> tuple[Batch, jax.Array]:
        """The batch whose new tokens stand at prefix_lens[i] .. prefix_lens[i] + q_lens[i] - 1, and their positions.

        req_to_token: i32[rows, max_context_len], already holding the new tokens' slots.
        rows, prefix_lens, q_lens: i32[b]; a row 0, or q_lens 0, marks a lane that is not in use.
        width: t, tokens per lane (static); 1 for decode.
        window: tokens that the model's window layers see; None: it has none.
        ledger: the ledger that holds the table, when window layers keep their tokens elsewhere (`Ledger.slides`).
        Returns (batch, positions i32[b, t]); positions of padding tokens are 0. Tokens past the end of the table
        are not real: q_lens is cut there. Whether that happened shows in `batch.q_lens`.
        """
        rows = jnp.where(in_range(rows, req_to_token.shape[0], lower=PAD_ROW + 1), rows, PAD_ROW)
        room = jnp.clip(req_to_token.shape[1] - prefix_lens, 0, width)
        q_lens = jnp.where((rows != PAD_ROW) & (prefix_lens >= 0), jnp.clip(q_lens, 0, room), 0)
        rows = jnp.where(q_lens > 0, rows, PAD_ROW)
        offsets = jnp.arange(width, dtype=jnp.int32)
        positions = jnp.where(offsets < q_lens[:, None], prefix_lens[:, None] + offsets, 0)
        kv_lens = jnp.where(q_lens > 0, prefix_lens + q_lens, 0)
        write_loc = write_locations(req_to_token, rows, positions, q_lens)
        batch = cls(rows, q_lens, kv_lens, req_to_token, write_loc)
        return batch if window is None else batch.with_window(positions, window, ledger), positions

    def with_window(self, positions: jax.Array, window: int, ledger: Ledger | None = None) -> Batch:
        """The same batch for a model with window layers; positions: i32[b, t], see `create` for the rest."""
        b, t = positions.shape
        start = needed_from(self.kv_lens - self.q_lens, window)
        columns = start[:, None] + jnp.arange(min(window + t - 1, self.req_to_token.shape[1]), dtype=jnp.int32)
        # Behind the row's end stands its newest slot: its first one may be released, and somebody else's by now.
        columns = jnp.minimum(columns, jnp.maximum(self.kv_lens - 1, 0)[:, None])
        rows = jnp.broadcast_to(self.rows[:, None], columns.shape)
        table, swa_loc = take2(self.req_to_token, rows, columns), None
        if ledger is not None and ledger.slides:
            table = window_loc(ledger, rows, columns, table)
            # A ring holds nothing of a prefix that was found elsewhere: the lane's table begins behind it.
            missing = jnp.sum(table == PAD_SLOT, axis=1, dtype=jnp.int32)
            behind = missing[:, None] + jnp.arange(table.shape[1], dtype=jnp.int32)
            table = jnp.take_along_axis(table, jnp.minimum(behind, table.shape[1] - 1), axis=1)
            start = start + missing
            lane = jnp.broadcast_to(self.rows[:, None], (b, t))
            swa_loc = window_loc(ledger, lane, positions, self.write_loc.reshape(b, t)).reshape(-1)
            swa_loc = jnp.where(self.write_loc > 0, swa_loc, PAD_SLOT)
        table = jnp.pad(table, ((1, 0), (0, 0)))  # row 0 is padding, as everywhere
        return dataclasses.replace(self, window_table=table, window_start=start, swa_loc=swa_loc)

    @property
    def kv_loc(self) -> jax.Array | KVWriteLoc:
        """Where the new tokens' keys and values go: slots of the one pool, or of both sides."""
        return self.write_loc if self.swa_loc is None else KVWriteLoc(self.write_loc, swa_loc=self.swa_loc)

    def seen_by_window_layers(self, positions: jax.Array) -> tuple[Batch, jax.Array]:
        """The batch and its positions as a window layer reads them: short rows that begin at window_start.

        ValueError for a batch that was made without a window.
        """
        if self.window_table is None or self.window_start is None:
            raise ValueError("a window layer reads a batch without a window; make it with Batch.create(..., window=).")
        lane = jnp.arange(1, self.rows.shape[0] + 1, dtype=jnp.int32)
        rows = jnp.where(self.rows != PAD_ROW, lane, PAD_ROW)
        kv_lens = jnp.where(self.rows != PAD_ROW, self.kv_lens - self.window_start, 0)
        short = Batch(rows, self.q_lens, kv_lens, self.window_table, self.write_loc)
        return short, positions - self.window_start[:, None]


def write_locations(req_to_token: jax.Array, rows: jax.Array, positions: jax.Array, q_lens: jax.Array) -> jax.Array:
    """i32[b * t]: the slot that the table names for each new token, 0 for padding.

    rows, q_lens: i32[b]; positions: i32[b, t].
    """
    t = positions.shape[1]
    real = (jnp.arange(t, dtype=jnp.int32) < q_lens[:, None]) & (rows != PAD_ROW)[:, None]
    slots = take2(req_to_token, jnp.broadcast_to(rows[:, None], positions.shape), positions)
    return jnp.where(real, slots, PAD_SLOT).reshape(-1)
