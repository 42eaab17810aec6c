"""What a forward pass has to know about its lanes: rows, lengths, the page table, where the new tokens go."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.indexing import in_range, take2
from kvjax.layout import PAD_ROW, PAD_SLOT
from kvjax.operation import state


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

    @classmethod
    def create(
        cls, req_to_token: jax.Array, rows: jax.Array, prefix_lens: jax.Array, q_lens: jax.Array, width: int
    ) -> tuple[Batch, jax.Array]:
        """The batch whose new tokens stand at prefix_lens[i] .. prefix_lens[i] + q_lens[i] - 1, and their positions.

        req_to_token: i32[rows, max_context_len], already holding the new tokens' slots.
        rows, prefix_lens, q_lens: i32[b]; a row 0, or q_lens 0, marks a lane that is not in use.
        width: t, tokens per lane (static); 1 for decode.
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
        return cls(rows, q_lens, kv_lens, req_to_token, write_loc), positions


def write_locations(req_to_token: jax.Array, rows: jax.Array, positions: jax.Array, q_lens: jax.Array) -> jax.Array:
    """i32[b * t]: the slot that the table names for each new token, 0 for padding.

    rows, q_lens: i32[b]; positions: i32[b, t].
    """
    t = positions.shape[1]
    real = (jnp.arange(t, dtype=jnp.int32) < q_lens[:, None]) & (rows != PAD_ROW)[:, None]
    slots = take2(req_to_token, jnp.broadcast_to(rows[:, None], positions.shape), positions)
    return jnp.where(real, slots, PAD_SLOT).reshape(-1)
