"""Attention over a paged pool in jax.numpy: decode (t == 1) and causal chunks in one form. It defines the meaning.

Online softmax over blocks of table columns, as many as the longest live row has, so that the cost of a step follows
the lengths and not the width of the table, and a block's keys and values are still in the cache when they are used.
On a CPU a decode step takes one lane after the other, each as far as its own row goes: there are no lanes to fill
there, and a batch of one long and many short rows reads what it holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import ceil_div
from pallas_kernels.attention.options import Options
from pallas_kernels.indexing import in_range, take, take2
from pallas_kernels.registry import target_platform

# Table columns per turn of the loop: enough for efficient matmuls and few turns, and what a turn gathers for one lane
# still fits the second-level cache of a CPU.
BLOCK = 128

NOTHING_SEEN = -1e30  # running maximum before the first key: finite, so that exp(-inf - maximum) is 0 and never NaN


def attend(q, k, req_to_token, rows, kv_lens, *extras, options: Options) -> jax.Array:
    """See `pallas_kernels.paged_decode_gqa` and its siblings, which check the arguments.

    q: [b, t, Hq, D] with positions among the extras, or [b, Hq, D], one query at the end of each row.
    """
    given = dict(zip(options.extras, extras, strict=True))
    if q.ndim == 3:
        return _blockwise(q[:, None], k, req_to_token, rows, kv_lens, (kv_lens - 1)[:, None], given, options)[:, 0]
    return _blockwise(q, k, req_to_token, rows, kv_lens, given["positions"], given, options)


def _blockwise(q, k_pool, table, rows, kv_lens, positions, given, options: Options) -> jax.Array:
    b, t, q_heads, q_dim = q.shape
    rank, window, precision = options.rank, options.window, options.precision
    block = min(BLOCK if options.block is None else options.block, table.shape[1])
    in_use = in_range(rows, table.shape[0], lower=1)
    rows = jnp.where(in_use, rows, 0)[:, None]
    lens = jnp.where(in_use, jnp.clip(kv_lens, 0, table.shape[1]), 0)
    keys_seen = jnp.minimum(positions + 1, lens[:, None])  # i32[b, t]
    begin = None if window is None else _first_seen(positions, lens, window)  # i32[b]
    # i32[b, 1], a slot that the row certainly holds
    first = take2(table, rows, jnp.zeros_like(rows) if begin is None else begin[:, None])

    kv_heads = k_pool.shape[1]
    v_dim = given["v"].shape[-1] if rank is None else q_dim
    # Grouped queries [b, Hkv, t, G, D]: KV heads are never repeated. For t == 1 the transpose moves nothing.
    groups = q.reshape(b, t, kv_heads, q_heads // kv_heads, q_dim).transpose(0, 2, 1, 3, 4)
    k_scale, v_scale = given.get("k_scale", options.k_scale), given.get("v_scale", options.v_scale)
    factor = options.scale if k_scale is None else options.scale * k_scale

    def attend_lanes(lanes):
        groups, rows, first, begin, lens, keys_seen, positions = lanes

        def turn(i, carry):
            top, weight, total = carry
            cols = i * block + jnp.arange(block, dtype=jnp.int32)
            held = cols < lens[:, None]  # bool[b, block]
            if begin is not None:
                held &= cols >= begin[:, None]
            # Redirected before the gather, on int32: a mask on the scores alone would leave 0 * NaN in the value sum.
            loc = jnp.where(held, take2(table, *jnp.broadcast_arrays(rows, cols)), first)
            k = _rows(k_pool, loc, options.dtype)[..., :q_dim].astype(q.dtype)
            v = k if rank is not None else _rows(given["v"], loc, options.dtype).astype(q.dtype)
            scores = factor * jnp.einsum(
                "bhtgd,bshd->bhtgs", groups, k, precision=precision, preferred_element_type=jnp.float32
            )
            if options.softcap is not None:
                scores = options.softcap * jnp.tanh(scores / options.softcap)
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
            jnp.full(heads, NOTHING_SEEN, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            jnp.zeros((*heads, v_dim), jnp.float32),
        )
        start = 0 if begin is None else jnp.min(begin) // block
        return lax.fori_loop(start, ceil_div(jnp.max(lens), block), turn, empty)

    lanes = (groups, rows, first, begin, lens, keys_seen, positions)
    if t == 1 and target_platform() == "cpu":
        one_by_one = lax.map(attend_lanes, jax.tree.map(lambda a: a[:, None], lanes))
        top, weight, total = jax.tree.map(lambda a: a[:, 0], one_by_one)
    else:
        top, weight, total = attend_lanes(lanes)
    if "sinks" in given:
        sink = given["sinks"].astype(jnp.float32).reshape(1, kv_heads, 1, -1)
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp(top - new_top)
        weight, total = weight * shrink + jnp.exp(sink - new_top), total * shrink[..., None]
    out = total[..., :rank] / jnp.where(weight > 0, weight, 1)[..., None]
    if v_scale is not None:
        out = out * v_scale
    # A lane that is not in use read page 0, whatever lies there.
    out = jnp.where((lens > 0)[:, None, None, None, None], out, 0)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, q_heads, -1).astype(q.dtype)


def _first_seen(positions: jax.Array, lens: jax.Array, window: int) -> jax.Array:
    """i32[b]: the first column that a query of the lane sees; positions rise along a lane, padding behind them.

    What is before it has left the window: its slots may be another row's by now, or nobody's.
    """
    return jnp.maximum(jnp.minimum(positions[:, 0], lens - 1) - window + 1, 0)


def _rows(pool: jax.Array, loc: jax.Array, dtype) -> jax.Array:
    """pool[loc] as `dtype`; the padding row where a location is outside."""
    found = take(pool, loc)
    return found if found.dtype == dtype else lax.bitcast_convert_type(found, dtype)
