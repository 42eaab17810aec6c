"""Multi-head and grouped-query attention over an `MHATokenToKVPool`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from models.attention import paged_attention
from models.batch import Batch
from models.config import ModelConfig
from models.layers import Linear, apply_rope, norm_of, split


class GQAttention(nnx.Module):
    """q, k, v and output maps, optional per-head norms of q and k, rotation; k and v live in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, jax.Array],
        layer_id: int,
        *,
        precision: Any = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ):
        self.config = config
        self.layer_id = layer_id
        self.precision = precision
        self.k_scale, self.v_scale = k_scale, v_scale
        self.window = config.window if layer_id in config.window_layers else None
        self.sinks = nnx.Param(weights["sinks"]) if config.attention_sinks else None  # [heads]
        self.qkv = Linear.joined(weights, ("q", "k", "v"), precision=precision)
        self.o = Linear.named(weights, "o", precision=precision)
        self.q_norm = norm_of(config, weights, "q_norm") if config.qk_norm else None
        self.k_norm = norm_of(config, weights, "k_norm") if config.qk_norm else None

    def split_qkv(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x: [b, t, hidden] -> (q [b, t, Hq, D], k [b, t, Hkv, D], v [b, t, Hkv, Dv]), before norms and rotation."""
        c = self.config
        heads = ((c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim), (c.num_kv_heads, c.v_head_dim))
        parts = split(self.qkv(x), *(n * d for n, d in heads))
        q, k, v = (part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, heads, strict=True))
        return q, k, v

    def __call__(self, x, positions, angles, pool, batch: Batch, *, implementation: str | None = None):
        """x: [b, t, hidden]; positions: i32[b, t]; angles: see `rope_angles`. Returns ([b, t, hidden], pool)."""
        c = self.config
        b, t, _ = x.shape
        q, k, v = self.split_qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rope(q, angles, interleaved=c.rope_interleaved)
        k = apply_rope(k, angles, interleaved=c.rope_interleaved).reshape(b * t, c.num_kv_heads, c.head_dim)
        v = v.reshape(b * t, c.num_kv_heads, c.v_head_dim)
        # A pool of k's own dtype stores it as it is and ignores scales; then nothing may be multiplied back either.
        k_scale, v_scale = (None, None) if pool.dtype == k.dtype else (self.k_scale, self.v_scale)
        # Written first and read back with the rest: attending to the new token apart copies the pool on the CPU.
        with jax.named_scope("write_kv"):
            pool = pool.set_kv_buffer(self.layer_id, batch.kv_loc, k, v, k_scale, v_scale, implementation)
        out = paged_attention(
            q,
            pool,
            self.layer_id,
            batch,
            positions,
            c.attention_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            window=self.window,
            sinks=None if self.sinks is None else self.sinks[...],
            softcap=c.attention_softcap,
            precision=self.precision,
            implementation=implementation,
        )
        return self.o(out.reshape(b, t, -1)), pool
