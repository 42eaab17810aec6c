"""The baseline of the `decode` benchmark: the same decoder on a contiguous cache, in two layouts.

"plain" is [batch, sequence, heads, width], what one writes first, with the same einsums as the paged read; "best" is
[batch, heads, sequence, width], the fastest contiguous form found on the CPU. Both attend over the whole cache.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from models.decoder import Decoder
from models.gqa import GQAttention
from models.layers import apply_rope, rope_angles
from models.matmul import project
from models.rope import rope_inv_freq

Layout = Literal["plain", "best"]
Cache = tuple[tuple[jax.Array, jax.Array], ...]


def create(layout: Layout, layers: int, batch: int, length: int, heads: int, width: int) -> Cache:
    """Zeros: (k, v) of each layer, f32."""
    shape = (batch, length, heads, width) if layout == "plain" else (batch, heads, length, width)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(layers))


def decode_step(
    decoder: Decoder, layout: Layout, tokens: jax.Array, positions: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Logits f32[b, vocab] of tokens i32[b] at positions i32[b], and the cache with their keys and values."""
    c = decoder.config
    x = decoder.embed[...][tokens][:, None]
    angles = rope_angles(positions[:, None], jnp.asarray(rope_inv_freq(c)))
    out = []
    for block, (k_cache, v_cache) in zip(decoder.layers, cache, strict=True):
        a, normed = block.attention, block.input_norm(x)
        if not isinstance(a, GQAttention):
            raise ValueError("the contiguous baseline is written for MHA and GQA decoders, not for MLA.")
        b = x.shape[0]
        q, k, v = a.split_qkv(normed)
        q = apply_rope(q, angles, interleaved=False)
        k, v = apply_rope(k, angles, interleaved=False)[:, 0], v[:, 0]
        lane = jnp.arange(b)
        at = (lane, positions) if layout == "plain" else (lane, slice(None), positions)
        k_cache = k_cache.at[at].set(k, unique_indices=True)
        v_cache = v_cache.at[at].set(v, unique_indices=True)
        out.append((k_cache, v_cache))
        x = x + a.o(_attend(q, k_cache, v_cache, positions, c.attention_scale, layout))
        x = x + block.mlp(block.post_norm(x))
    x = decoder.norm(x)[:, 0]
    logits = project(x, decoder.embed[...]) if decoder.head is None else decoder.head(x)
    return logits.astype(jnp.float32), tuple(out)


def _attend(q, k, v, positions, scale: float, layout: Layout) -> jax.Array:
    b, _, heads, width = q.shape
    kv_heads, length = (k.shape[2], k.shape[1]) if layout == "plain" else (k.shape[1], k.shape[2])
    keys = "bshd" if layout == "plain" else "bhsd"
    groups = q.reshape(b, 1, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    scores = scale * jnp.einsum(f"bhtgd,{keys}->bhtgs", groups, k)
    seen = jnp.arange(length) <= positions[:, None]
    probs = jax.nn.softmax(jnp.where(seen[:, None, None, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum(f"bhtgs,{keys}->bthgd", probs, v).reshape(b, 1, -1)
