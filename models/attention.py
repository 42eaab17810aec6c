"""Attention over a pool of the decoder: which of `pallas_kernels`' operations reads it, and with which arrays."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.batch import Batch
from pallas_kernels.paged_decode_gqa import paged_decode_gqa
from pallas_kernels.paged_decode_mla import paged_decode_mla
from pallas_kernels.paged_extend import paged_extend


class ReadablePool(Protocol):
    """What attention needs of a KV pool."""

    @property
    def dtype(self) -> np.dtype:
        """What the stored words mean."""
        ...

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The layer's keys or latents, [slots, Hkv, D] in store_dtype."""
        ...


def paged_attention(
    q: jax.Array,
    pool: ReadablePool,
    layer_id: int,
    batch: Batch,
    positions: jax.Array,
    scale: float,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    latent_rank: int | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    precision: Any = None,
    block: int | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k^T * scale) v of every query over the keys of its own row at positions <= its own.

    q: [b, t, Hq, D], Hq a multiple of the pool's Hkv; query head h reads KV head h // (Hq / Hkv).
    positions: i32[b, t], position of each query, as `Batch.create` gives them; the pool must hold this chunk already.
    latent_rank: MLA; the values are the first `latent_rank` entries of the keys, which are then read once. None: the
        pool has a `get_value_buffer` too.
    window: a query at position p sees p - window + 1 .. p only, and nothing before is read; None: the whole row. The
        batch must have been made for it (`Batch.create(..., window=)`).
    All else: see `pallas_kernels.paged_extend`, and for t == 1 `paged_decode_gqa` and `paged_decode_mla`.
    Returns [b, t, Hq, Dv] in q's dtype; 0 for lanes that are not in use (row 0 or kv_lens 0).
    """
    with jax.named_scope("paged_attention"):
        if window is not None:
            batch, positions = batch.seen_by_window_layers(positions)
        k, where = pool.get_key_buffer(layer_id), (batch.req_to_token, batch.rows)
        how: dict[str, Any] = {
            "scale": scale,
            "dtype": pool.dtype,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "window": window,
            "sinks": sinks,
            "softcap": softcap,
            "precision": precision,
            "block": block,
            "implementation": implementation,
            "interpret": interpret,
        }
        if q.shape[1] > 1:
            v = _values(pool, layer_id) if latent_rank is None else None
            return paged_extend(q, k, v, *where, positions, batch.kv_lens, rank=latent_rank, **how)
        if latent_rank is not None:
            return paged_decode_mla(q[:, 0], k, *where, batch.kv_lens, rank=latent_rank, **how)[:, None]
        return paged_decode_gqa(q[:, 0], k, _values(pool, layer_id), *where, batch.kv_lens, **how)[:, None]


def _values(pool: Any, layer_id: int) -> jax.Array:
    return pool.get_value_buffer(layer_id)


def refuse_implementation(implementation: str | None) -> None:
    """ValueError, before a model is read or compiled, for an implementation that cannot run here."""

    def trace() -> jax.Array:
        q, pool = jnp.zeros((1, 1, 16)), jnp.zeros((2, 1, 16))
        table, lane = jnp.zeros((2, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        return paged_decode_gqa(q, pool, pool, table, lane, lane, scale=1.0, implementation=implementation)

    jax.eval_shape(trace)
