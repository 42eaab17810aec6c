"""Attention over a paged pool, read through the page table: decode (t == 1) and extend (causal chunks) in one form.

Online softmax over blocks of table columns, as many as the longest live row has, so that the cost of a step follows
the lengths and not the width of the table, and a block's keys and values are still in the cache when they are used.
On a CPU a decode step takes one lane after the other, each as far as its own row goes: there are no lanes to fill
there, and a batch of one long and many short rows reads what it holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.indexing import in_range, take2
from kvjax.layout import PAD_ROW, ceil_div
from models.batch import Batch
from pallas_kernels.registry import target_platform

IMPLEMENTATIONS = ("xla",)
# Table columns per turn of the loop: enough for efficient matmuls and few turns, and what a turn gathers for one lane
# still fits the second-level cache of a CPU.
BLOCK = 128

_NOTHING_SEEN = -1e30  # running maximum before the first key: finite, so that exp(-inf - maximum) is 0 and never NaN


class ReadablePool(Protocol):
    """What attention needs of a KV pool."""

    def read(self, layer_id: int, loc: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(k loc.shape + [Hkv, D], v loc.shape + [Hkv, Dv]) of the slots `loc`, in the pool's dtype."""
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
) -> jax.Array:
    """softmax(q k^T * scale) v of every query over the keys of its own row at positions <= its own.

    q: [b, t, Hq, D], Hq a multiple of the pool's Hkv; query head h reads KV head h // (Hq / Hkv).
    positions: i32[b, t], position of each query; the pool must hold this chunk already.
    k_scale, v_scale: per-tensor factors that the stored keys and values are multiplied with (fp8 pools).
    latent_rank: MLA; the values are the first `latent_rank` entries of the keys, which are then read once.
    window: a query at position p sees p - window + 1 .. p only, and nothing before is read; None: the whole row. The
        batch must have been made for it (`Batch.create(..., window=)`).
    sinks: f32[Hq], one more score per head, which takes its part of the softmax and adds no value (gpt_oss).
    softcap: scores become softcap * tanh(score / softcap) before the mask.
    precision: of the two matmuls, which run in q's dtype and accumulate in float32.
    block: table columns per turn; None: what suits the platform and t.
    implementation: "xla", or None for the best one here; ValueError for another name.
    Returns [b, t, Hq, Dv] in q's dtype; 0 for lanes that are not in use (row 0 or kv_lens 0).

    Slots past a row's length and page 0 are never read for a lane in use, so NaN in them reaches nobody.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"unknown attention implementation {implementation!r}; {', '.join(IMPLEMENTATIONS)} or None (the best "
            "one for the platform) can be chosen."
        )
    if block is None:
        block = BLOCK
    if block < 1:
        raise ValueError(f"block must be at least 1 table column, got {block}.")
    with jax.named_scope("paged_attention"):
        if window is not None:
            batch, positions = batch.seen_by_window_layers(positions)
        masks = (window, sinks, softcap)
        return _xla(q, pool, layer_id, batch, positions, scale, k_scale, v_scale, latent_rank, masks, precision, block)


def _xla(q, pool, layer_id, batch, positions, scale, k_scale, v_scale, latent_rank, masks, precision, block):
    window, sinks, softcap = masks
    b, t, q_heads, _ = q.shape
    table = batch.req_to_token
    block = min(block, table.shape[1])
    in_use = in_range(batch.rows, table.shape[0], lower=PAD_ROW + 1)
    rows = jnp.where(in_use, batch.rows, PAD_ROW)[:, None]
    lens = jnp.where(in_use, jnp.clip(batch.kv_lens, 0, table.shape[1]), 0)
    keys_seen = jnp.minimum(positions + 1, lens[:, None])  # i32[b, t]
    first = take2(table, rows, jnp.zeros_like(rows))  # i32[b, 1], the row's own first slot

    kv_shape, v_shape = jax.eval_shape(lambda loc: pool.read(layer_id, loc), jax.ShapeDtypeStruct((1,), jnp.int32))
    kv_heads = kv_shape.shape[-2]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads do not divide into {kv_heads} KV heads; a multiple is needed.")
    if q.shape[-1] != kv_shape.shape[-1]:
        raise ValueError(f"queries have head size {q.shape[-1]}, keys {kv_shape.shape[-1]}; they must be equal.")
    v_dim = v_shape.shape[-1] if latent_rank is None else kv_shape.shape[-1]
    # Grouped queries [b, Hkv, t, G, D]: KV heads are never repeated. For t == 1 the transpose moves nothing.
    groups = q.reshape(b, t, kv_heads, q_heads // kv_heads, q.shape[-1]).transpose(0, 2, 1, 3, 4)
    factor = scale if k_scale is None else scale * k_scale

    def attend(lanes):
        groups, rows, first, lens, keys_seen, positions = lanes

        def turn(i, carry):
            top, weight, total = carry
            cols = i * block + jnp.arange(block, dtype=jnp.int32)
            held = cols < lens[:, None]  # bool[b, block]
            # Redirected before the gather, on int32: a mask on the scores alone would leave 0 * NaN in the value sum.
            loc = jnp.where(held, take2(table, *jnp.broadcast_arrays(rows, cols)), first)
            k, v = pool.read(layer_id, loc)
            k = k.astype(q.dtype)
            v = k if latent_rank is not None else v.astype(q.dtype)
            scores = factor * jnp.einsum(
                "bhtgd,bshd->bhtgs", groups, k, precision=precision, preferred_element_type=jnp.float32
            )
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            visible = cols < keys_seen[..., None]  # bool[b, t, block]
            if window is not None:
                visible &= cols > positions[..., None] - window
            scores = jnp.where(visible[:, None, :, None, :], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            probs = jnp.exp(scores - new_top[..., None])
            read = jnp.einsum(
                "bhtgs,bshd->bhtgd", probs.astype(q.dtype), v, precision=precision, preferred_element_type=jnp.float32
            )
            return new_top, weight * shrink + probs.sum(-1), total * shrink[..., None] + read

        heads = groups.shape[:-1]
        empty = (
            jnp.full(heads, _NOTHING_SEEN, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            jnp.zeros((*heads, v_dim), jnp.float32),
        )
        return lax.fori_loop(0, ceil_div(jnp.max(lens), block), turn, empty)

    lanes = (groups, rows, first, lens, keys_seen, positions)
    if t == 1 and target_platform() == "cpu":
        one_by_one = lax.map(attend, jax.tree.map(lambda a: a[:, None], lanes))
        top, weight, total = jax.tree.map(lambda a: a[:, 0], one_by_one)
    else:
        top, weight, total = attend(lanes)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1)
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp(top - new_top)
        weight, total = weight * shrink + jnp.exp(sink - new_top), total * shrink[..., None]
    out = total[..., :latent_rank] / jnp.where(weight > 0, weight, 1)[..., None]
    if v_scale is not None:
        out = out * v_scale
    # A lane that is not in use read page 0, whatever lies there.
    out = jnp.where((lens > 0)[:, None, None, None, None], out, 0)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, q_heads, -1).astype(q.dtype)
