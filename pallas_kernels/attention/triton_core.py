"""Split-KV attention over a paged pool as Triton kernels: attention, and a merge of splits.

The same programs as `pallas_core.py`, which says how padding is kept out. Offsets into pools are 64-bit.
"""

# Inside a kernel everything is a Triton value, whatever the annotations of the language say.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.arguments import power_of_two
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.plan import Piece, make_plan

LOG2E = tl.constexpr(1.4426950408889634)  # scores are kept in units of log 2: exp2 is one instruction
NOTHING_SEEN = tl.constexpr(-1e30)  # finite, so that exp2(-inf - maximum) is 0 and never NaN

# What the words of a pool are turned into; 0: nothing, they are values already. fp8 is always read as bytes.
KINDS = {"float8_e4m3fn": 1, "float8_e5m2": 2, "bfloat16": 3, "float16": 4, "float32": 5}


def attend(q, k, req_to_token, rows, kv_lens, *extras, options: Options) -> jax.Array:
    """What `attention.reference.attend` computes, in one kernel, or two where keys are split."""
    given = dict(zip(options.extras, extras, strict=True))
    decode = q.ndim == 3
    tall = q[:, None] if decode else q
    plan = make_plan(tall, k, req_to_token, given, options)
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
        _attention,
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
            _merge,
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


@triton.jit
def _read(
    pool,
    slot,
    kv_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    USED: tl.constexpr,
    KIND: tl.constexpr,
    TO: tl.constexpr,
):
    """[slots, WIDTH] of the slots' rows in dtype TO; columns from USED on are 0: times 0, infinity is NaN."""
    column = tl.arange(0, WIDTH)
    at = pool + slot[:, None] * (HEADS * DIM) + (kv_head * DIM + START) + column[None, :]
    if KIND == 1 or KIND == 2:
        at = at.to(tl.pointer_type(tl.uint8), bitcast=True)
    if USED < WIDTH:
        found = tl.load(at, mask=(column < USED)[None, :], other=0)
    else:
        found = tl.load(at)
    if KIND == 1:
        found = found.to(tl.float8e4nv, bitcast=True)
    elif KIND == 2:
        found = found.to(tl.float8e5, bitcast=True)
    elif KIND == 3:
        found = found.to(tl.bfloat16, bitcast=True)
    elif KIND == 4:
        found = found.to(tl.float16, bitcast=True)
    elif KIND == 5:
        found = found.to(tl.float32, bitcast=True)
    return found.to(TO)


@triton.jit
def _dot(x, y, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    else:
        return tl.dot(x, y)


@triton.jit
def _put(out, base, values, real, WIDTH: tl.constexpr, USED: tl.constexpr):
    """out[base + column] = values, where the row is real; base: i64[rows]."""
    column = tl.arange(0, WIDTH)
    mask = real[:, None] & (column < USED)[None, :]
    tl.store(out + base[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attention(
    q,
    k,
    v,
    table,
    rows,
    lens,
    positions,
    k_scale,
    v_scale,
    sinks,
    out,
    tops,
    weights,
    DECODE: tl.constexpr,
    LATENT: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_DIM: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K0: tl.constexpr,
    K0_USED: tl.constexpr,
    K1: tl.constexpr,
    K1_USED: tl.constexpr,
    K1_START: tl.constexpr,
    V0: tl.constexpr,
    V0_USED: tl.constexpr,
    V1: tl.constexpr,
    V1_USED: tl.constexpr,
    V1_START: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    M: tl.constexpr = TILE_HEADS * TILE_TOKENS
    TO: tl.constexpr = q.dtype.element_ty
    column = tl.program_id(0)
    lane = tl.program_id(1)
    split = tl.program_id(2)
    tile = column % TOKEN_TILES
    head_tile = (column // TOKEN_TILES) % HEAD_TILES
    kv_head = column // (TOKEN_TILES * HEAD_TILES)

    row = tl.load(rows + lane)
    length = tl.load(lens + lane)
    in_use = (row >= 1) & (row < TABLE_ROWS)
    row = tl.where(in_use, row, 0)
    length = tl.where(in_use, tl.minimum(tl.maximum(length, 0), COLUMNS), 0)

    index = tl.arange(0, M)
    token = tile * TILE_TOKENS + index // TILE_HEADS
    head = head_tile * TILE_HEADS + index % TILE_HEADS
    real = (token < TOKENS) & (head < GROUP)
    # Padding rows repeat the last real ones; what they compute is never stored.
    near = tl.minimum(token, TOKENS - 1)
    mine = kv_head * GROUP + tl.minimum(head, GROUP - 1)
    if DECODE:
        first = length - 1
        position = tl.full([M], 0, tl.int32) + first
    else:
        first = tl.load(positions + lane * TOKENS + tl.minimum(tile * TILE_TOKENS, TOKENS - 1))
        position = tl.load(positions + lane * TOKENS + near)
    stop = tl.minimum(tl.max(position, axis=0) + 1, length)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0)

    query = lane.to(tl.int64) * TOKENS + near
    q_at = q + (query * (KV_HEADS * GROUP) + mine) * Q_DIM
    column0 = tl.arange(0, K0)
    q0 = tl.load(q_at[:, None] + column0[None, :], mask=(column0 < K0_USED)[None, :], other=0.0)
    if K1 > 0:
        column1 = tl.arange(0, K1)
        q1 = tl.load(q_at[:, None] + K1_START + column1[None, :], mask=(column1 < K1_USED)[None, :], other=0.0)
    factor = SCALE * K_SCALE
    if K_SCALED:
        factor = factor * tl.load(k_scale)

    top = tl.full([M], NOTHING_SEEN, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total0 = tl.zeros([M, V0], tl.float32)
    if V1 > 0:
        total1 = tl.zeros([M, V1], tl.float32)
    entries = table + row.to(tl.int64) * COLUMNS
    blocks = tl.cdiv(tl.maximum(stop - start, 0), BLOCK)
    each = tl.cdiv(blocks, SPLITS)
    begin = split * each
    for i in range(begin, tl.minimum(begin + each, blocks)):
        cols = start + i * BLOCK + tl.arange(0, BLOCK)
        held = cols < stop
        # Redirected before the read: a mask on the scores alone would leave 0 * NaN in the value sum.
        slot = tl.load(entries + tl.where(held, cols, start))
        slot = tl.where((slot >= 0) & (slot < SLOTS), slot, 0).to(tl.int64)
        key0 = _read(k, slot, kv_head, KV_HEADS, K_DIM, 0, K0, K0_USED, KIND, TO)
        scores = _dot(q0, tl.trans(key0), EXACT)
        if K1 > 0:
            key1 = _read(k, slot, kv_head, KV_HEADS, K_DIM, K1_START, K1, K1_USED, KIND, TO)
            scores += _dot(q1, tl.trans(key1), EXACT)
        scores = scores * factor
        if SOFTCAP > 0:
            # tanh by the exponential: infinity ends as 1, and no library call is needed.
            scores = SOFTCAP * (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2E / SOFTCAP))))
        visible = held[None, :] & (cols[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (cols[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        probs = tl.exp2(scores - new_top[:, None])
        weight = weight * shrink + tl.sum(probs, axis=1)
        top = new_top
        probs = probs.to(TO)
        if LATENT:
            total0 = total0 * shrink[:, None] + _dot(probs, key0, EXACT)
        else:
            value0 = _read(v, slot, kv_head, KV_HEADS, V_DIM, 0, V0, V0_USED, KIND, TO)
            total0 = total0 * shrink[:, None] + _dot(probs, value0, EXACT)
            if V1 > 0:
                value1 = _read(v, slot, kv_head, KV_HEADS, V_DIM, V1_START, V1, V1_USED, KIND, TO)
                total1 = total1 * shrink[:, None] + _dot(probs, value1, EXACT)

    answer = (lane.to(tl.int64) * TOKENS + token) * (KV_HEADS * GROUP) + kv_head * GROUP + head
    if SPLITS > 1:
        part = answer * SPLITS + split
        tl.store(tops + part, top, mask=real)
        tl.store(weights + part, weight, mask=real)
        _put(out, part * V_DIM, total0, real, V0, V0_USED)
        if V1 > 0:
            _put(out, part * V_DIM + V1_START, total1, real, V1, V1_USED)
    else:
        if SINKS:
            sink = tl.load(sinks + mine).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            weight = weight * shrink + tl.exp2(sink - new_top)
            total0 = total0 * shrink[:, None]
            if V1 > 0:
                total1 = total1 * shrink[:, None]
        last = V_SCALE / tl.where(weight > 0, weight, 1.0)
        if V_SCALED:
            last = last * tl.load(v_scale)
        _put(out, answer * V_DIM, total0 * last[:, None], real, V0, V0_USED)
        if V1 > 0:
            _put(out, answer * V_DIM + V1_START, total1 * last[:, None], real, V1, V1_USED)


@triton.jit
def _merge(
    parts,
    tops,
    weights,
    v_scale,
    sinks,
    out,
    V_SCALE: tl.constexpr,
    V_SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    V0: tl.constexpr,
    V0_USED: tl.constexpr,
    V1: tl.constexpr,
    V1_USED: tl.constexpr,
    V1_START: tl.constexpr,
):
    """One program per query: the splits' sums, weighted by their maxima."""
    query = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    there = split < SPLITS
    top = tl.load(tops + query * SPLITS + split, mask=there, other=NOTHING_SEEN)
    weight = tl.load(weights + query * SPLITS + split, mask=there, other=0.0)
    best = tl.max(top, axis=0)
    if SINKS:
        sink = tl.load(sinks + query % HEADS).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink)
    share = tl.where(there, tl.exp2(top - best), 0.0)
    whole = tl.sum(share * weight, axis=0)
    if SINKS:
        whole += tl.exp2(sink - best)
    last = V_SCALE / tl.where(whole > 0, whole, 1.0)
    if V_SCALED:
        last = last * tl.load(v_scale)
    _merge_columns(parts, out, query, split, there, share * last, SPLITS, V_DIM, 0, V0, V0_USED)
    if V1 > 0:
        _merge_columns(parts, out, query, split, there, share * last, SPLITS, V_DIM, V1_START, V1, V1_USED)


@triton.jit
def _merge_columns(
    parts,
    out,
    query,
    split,
    there,
    share,
    SPLITS: tl.constexpr,
    V_DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    USED: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    here = column < USED
    at = parts + ((query * SPLITS + split) * V_DIM)[:, None] + START + column[None, :]
    total = tl.load(at, mask=there[:, None] & here[None, :], other=0.0)
    value = tl.sum(total * share[:, None], axis=0)
    tl.store(out + query * V_DIM + START + column, value.to(out.dtype.element_ty), mask=here)
