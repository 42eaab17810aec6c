"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in absorbed form over an `MLATokenToKVPool`.

One latent vector and one rotated key per token are stored; all heads share them. The key map kv_b_k is applied to the
query and the value map kv_b_v to the result, so that the stored latent is read as it lies, as in grouped-query
attention with one KV head: q_latent . latent + q_rope . k_rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import paged_attention
from models.batch import Batch
from models.config import ModelConfig
from models.layers import Linear, RMSNorm, apply_rope

INNER_NORM_EPS = 1e-6  # of the q_a and kv_a norms, whatever the model's own eps is


class MLAttention(nnx.Module):
    """With or without a compressed query; the latent and the rotated key live in the pool."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array], layer_id: int, *, precision: Any = None):
        self.config = config
        self.layer_id = layer_id
        self.precision = precision
        if config.q_lora_rank is None:
            self.q_a = self.q_a_norm = None
            self.q = Linear.named(weights, "q", precision=precision)
        else:
            self.q_a = Linear.named(weights, "q_a", precision=precision)
            self.q_a_norm = RMSNorm(weights["q_a_norm"], INNER_NORM_EPS)
            self.q = Linear.named(weights, "q_b", precision=precision)
        self.kv_a = Linear.named(weights, "kv_a", precision=precision)
        self.kv_a_norm = RMSNorm(weights["kv_a_norm"], INNER_NORM_EPS)
        self.kv_b_k = nnx.Param(weights["kv_b_k"])  # [heads, nope, rank]
        self.kv_b_v = nnx.Param(weights["kv_b_v"])  # [heads, Dv, rank]
        self.o = Linear.named(weights, "o", precision=precision)

    def __call__(self, x, positions, angles, pool, batch: Batch, *, implementation: str | None = None):
        """x: [b, t, hidden]; positions: i32[b, t]; angles: see `rope_angles`. Returns ([b, t, hidden], pool)."""
        c = self.config
        b, t, _ = x.shape
        nope, rank = c.qk_nope_head_dim or 0, c.kv_lora_rank or 0
        compressed = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        q_nope, q_rope = jnp.split(self.q(compressed).reshape(b, t, c.num_heads, -1), [nope], axis=-1)
        latent, k_rope = jnp.split(self.kv_a(x), [rank], axis=-1)
        latent = self.kv_a_norm(latent)
        k_rope = apply_rope(k_rope[:, :, None, :], angles, interleaved=c.rope_interleaved)
        with jax.named_scope("write_kv"):
            pool = pool.set_mla_kv_buffer(
                self.layer_id,
                batch.write_loc,
                latent.reshape(b * t, 1, rank),
                k_rope.reshape(b * t, 1, -1),
                implementation=implementation,
            )
        with jax.named_scope("absorb_q"):
            q_latent = jnp.einsum("bthn,hnr->bthr", q_nope, self.kv_b_k[...], precision=self.precision)
            q_rope = apply_rope(q_rope, angles, interleaved=c.rope_interleaved)
        out = paged_attention(
            jnp.concatenate((q_latent, q_rope), axis=-1),
            pool,
            self.layer_id,
            batch,
            positions,
            c.attention_scale,
            latent_rank=rank,
            precision=self.precision,
            implementation=implementation,
        )
        with jax.named_scope("absorb_v"):
            out = jnp.einsum("bthr,hvr->bthv", out, self.kv_b_v[...], precision=self.precision)
        return self.o(out.reshape(b, t, -1)), pool
