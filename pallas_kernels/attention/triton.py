"""Split-KV attention over a paged pool as Triton kernels: attention, and a merge of splits.

This is the launch; the kernels stand in `triton_attention.py` and `triton_merge.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton_adapter
from pallas_kernels.arguments import power_of_two
from pallas_kernels.attention import plan as plans
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.plan import Piece, make_plan
from pallas_kernels.attention.triton_attention import attention
from pallas_kernels.attention.triton_merge import merge

# What the words of a pool are turned into; 0: nothing, they are values already. fp8 is always read as bytes.
KINDS = {"float8_e4m3fn": 1, "float8_e5m2": 2, "bfloat16": 3, "float16": 4, "float32": 5}


def attend(q, k, req_to_token, rows, kv_lens, *extras, options: Options) -> jax.Array:
    """What `attention.reference.attend` computes, in one kernel, or two where keys are split."""
    given = dict(zip(options.extras, extras, strict=True))
    decode = q.ndim == 3
    tall = q[:, None] if decode else q
    plan = make_plan(tall, k, req_to_token, given, options, "triton")
    config, heads = plan.config, q.shape[-2]
    queries = (plan.batch, plan.tokens, heads)
    out = jax.ShapeDtypeStruct((*queries, plan.v_dim), q.dtype)
    if config.splits > 1:
        stat = jax.ShapeDtypeStruct((*queries, config.splits), jnp.float32)
        shapes = (jax.ShapeDtypeStruct((*queries, config.splits, plan.v_dim), jnp.float32), stat, stat)
    else:
        unused = jax.ShapeDtypeStruct((1,), jnp.float32)
        shapes = (out, unused, unused)
    ends: dict[str, Any] = {
        "SINKS": "sinks" in given,
        "V_SCALE": 1.0 if options.v_scale is None else options.v_scale,
        "V_SCALED": "v_scale" in given,
        "SPLITS": config.splits,
        "V_DIM": plan.v_dim,
        **_columns("V", plan.v_pieces),
    }
    # A kernel has a fixed number of pointers; `rows` and `k` stand where there is nothing to point to.
    v = given.get("v", k)
    k_scale, v_scale, sinks = (given.get(name, rows) for name in ("k_scale", "v_scale", "sinks"))
    result = jax_triton_adapter.call(
        attention,
        (tall, k, v, req_to_token, rows, kv_lens, given.get("positions", rows), k_scale, v_scale, sinks),
        grid=plan.grid,
        out_shapes=shapes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        DECODE=decode,
        LATENT=options.rank is not None,
        KIND=0 if k.dtype == options.dtype and k.dtype.itemsize > 1 else KINDS[options.dtype.name],
        SCALE=options.scale,
        K_SCALE=1.0 if options.k_scale is None else options.k_scale,
        K_SCALED="k_scale" in given,
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap or 0.0,
        EXACT=options.exact,
        TABLE_ROWS=plan.table_rows,
        COLUMNS=plan.columns,
        SLOTS=plan.slots,
        TOKENS=plan.tokens,
        KV_HEADS=plan.kv_heads,
        GROUP=plan.group,
        Q_DIM=q.shape[-1],
        K_DIM=k.shape[-1],
        TILE_HEADS=plan.tile_heads,
        TILE_TOKENS=plan.tile_tokens,
        HEAD_TILES=plan.head_tiles,
        TOKEN_TILES=plan.token_tiles,
        BLOCK=config.block_n,
        **_columns("K", plan.k_pieces),
        **ends,
    )
    if config.splits > 1:
        result = jax_triton_adapter.call(
            merge,
            (*result, v_scale, sinks),
            grid=(plan.batch * plan.tokens * heads,),
            out_shapes=(out,),
            num_warps=4,
            num_stages=1,
            HEADS=heads,
            SPLITS_PADDED=power_of_two(config.splits),
            **ends,
        )
    return result[0].reshape((plan.batch, heads, plan.v_dim) if decode else out.shape)


def unsupported(*_: jax.Array, options: Options) -> str | None:
    """See `registry`."""
    return plans.unsupported(options)


def _columns(name: str, pieces: tuple[Piece, ...]) -> dict[str, int]:
    """The one or two pieces as constants; a width of 0: there is no second one."""
    first, second = (*pieces, Piece(0, 0, 0))[:2]
    return {
        f"{name}0": first.width,
        f"{name}0_USED": first.used,
        f"{name}1": second.width,
        f"{name}1_USED": second.used,
        f"{name}1_START": second.start,
    }
