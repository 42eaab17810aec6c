"""paged_extend: several queries per row over a paged prefix and their own chunk (prefill, verification of drafts)."""

from typing import Any

import jax

from pallas_kernels.attention.options import Config, call


def paged_extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    req_to_token: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    rank: int | None = None,
    dtype: Any = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    precision: Any = None,
    block: int | None = None,
    config: Config | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k^T * scale) v of every query over the keys of its own row at positions <= its own.

    q: [b, t, Hq, D], f32, bf16 or f16. positions: i32[b, t], rising along a lane; the pool holds the chunk already.
        Padding queries stand behind a lane's real ones, at position 0; what comes out for them is finite, no more.
    k, v: [slots, Hkv, D] and [slots, Hkv, Dv], one layer of an MHA pool, whole. v None: a pool of latents (MLA), of
        whose first `rank` columns the values are; see paged_decode_mla.
    req_to_token: i32[table_rows, max_context_len], slot of each token of each row; row 0 is padding.
    rows: i32[b], table row of each lane; 0 or outside the table: lane not in use.
    kv_lens: i32[b], tokens in the row, the new ones included; 0: lane not in use.
    scale: of the scores. k_scale, v_scale: scalars that the stored keys and values are multiplied with (fp8).
    dtype: what the pool's words mean, where they are unsigned integers (kvjax `store_dtype`); None: what they are.
    window: a query at position p sees p - window + 1 .. p only, and no block before is read.
    sinks: [Hq], one more score per head, which takes its part of the softmax and adds no value (gpt_oss).
    softcap: scores become softcap * tanh(score / softcap) before the mask.
    precision: of the matmuls, which run in q's dtype and accumulate in float32.
    block: table columns per turn of "xla"; config: `attention.options.Config` of the kernels; None: a default.
    implementation, interpret: see `registry.call`.

    Returns [b, t, Hq, Dv or rank] in q's dtype; 0 for lanes that are not in use.
    Slots past a row's length and page 0 are never read for a lane in use, so NaN in them reaches nobody.
    Raises ValueError for shapes, dtypes and implementation names that do not fit.
    """
    static = {"window": window, "softcap": softcap, "precision": precision, "block": block, "config": config}
    scales = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "dtype": dtype, "rank": rank}
    extras = {"v": v, "positions": positions, "sinks": sinks}
    return call(
        "paged_extend", implementation, interpret, q, k, req_to_token, rows, kv_lens, **extras, **scales, **static
    )
