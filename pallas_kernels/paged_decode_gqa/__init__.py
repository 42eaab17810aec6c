"""paged_decode_gqa: one query per row over a paged pool of keys and values (MHA, GQA, MQA)."""

from typing import Any

import jax

from pallas_kernels.attention.options import Config, call


def paged_decode_gqa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    req_to_token: jax.Array,
    rows: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
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
    """softmax(q k^T * scale) v of each lane's newest token over its row (SGLang: decode attention, flash-decoding).

    q: [b, Hq, D], f32, bf16 or f16; Hq a multiple of Hkv: query head h reads KV head h // (Hq / Hkv).
    k, v: [slots, Hkv, D] and [slots, Hkv, Dv], one layer of an MHA pool, whole: nothing of their size is made.
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

    Returns [b, Hq, Dv] in q's dtype; 0 for lanes that are not in use.
    Slots past a row's length and page 0 are never read for a lane in use, so NaN in them reaches nobody.
    Raises ValueError for shapes, dtypes and implementation names that do not fit.
    """
    static = {"window": window, "softcap": softcap, "precision": precision, "block": block, "config": config}
    scales = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "dtype": dtype}
    arrays = (q, k, req_to_token, rows, kv_lens)
    return call("paged_decode_gqa", implementation, interpret, *arrays, v=v, sinks=sinks, **scales, **static)
