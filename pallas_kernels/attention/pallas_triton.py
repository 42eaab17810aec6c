"""Split-KV attention over a paged pool as Pallas kernels for the Triton lowering: attention, and a merge of splits.

Keys and values are read where they lie, through one table entry per token. (The slots of a page are contiguous, so
one entry per page would do; but a window table begins inside a page, and four bytes a token are nothing beside its
keys and values.) Every entry that a program must not see is redirected to the tile's first visible token before the
read, so what lies in page 0 or behind a row, NaN included, reaches nobody.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arguments import power_of_two
from pallas_kernels.attention import plan as plans
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.plan import Piece, Plan, make_plan
from pallas_kernels.attention.reference import NOTHING_SEEN

LOG2E = 1.4426950408889634  # scores are kept in units of log 2: exp2 is one instruction


def attend(q, k, req_to_token, rows, kv_lens, *extras, options: Options, interpret: bool = False) -> jax.Array:
    """What `attention.reference.attend` computes, in one kernel, or two where keys are split."""
    given = dict(zip(options.extras, extras, strict=True))
    decode = q.ndim == 3
    tall = q[:, None] if decode else q
    plan = make_plan(tall, k, req_to_token, given, options, "pallas_triton")
    b, t, config = plan.batch, plan.tokens, plan.config
    grouped = (b, t, plan.kv_heads, plan.group)
    inputs = {"q": tall.reshape(*grouped, tall.shape[-1]), "k": k, "table": req_to_token, "rows": rows, "lens": kv_lens}
    if "sinks" in given:
        given["sinks"] = given["sinks"].reshape(plan.kv_heads, plan.group)
    last = {name: given.pop(name) for name in ("sinks", "v_scale") if name in given}
    out = jax.ShapeDtypeStruct((*grouped, plan.v_dim), q.dtype)
    split = config.splits > 1
    if split:
        stat = jax.ShapeDtypeStruct((*grouped, config.splits), jnp.float32)
        shapes = [stat, stat, jax.ShapeDtypeStruct((*grouped, config.splits, plan.v_dim), jnp.float32)]
        inputs |= given
    else:
        shapes = [out]
        inputs |= given | last
    result = pl.pallas_call(
        functools.partial(_attention, names=tuple(inputs), plan=plan, options=options, v_dtype=q.dtype),
        out_shape=shapes,
        grid=plan.grid,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(*inputs.values())
    if split:
        result = pl.pallas_call(
            functools.partial(_merge, names=("top", "weight", "total", *last), plan=plan, options=options),
            out_shape=[out],
            grid=(b * t, plan.kv_heads * plan.group),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="paged_attention_merge",
        )(*result, *last.values())
    heads = q.shape[-2]
    return result[0].reshape((b, heads, plan.v_dim) if decode else (b, t, heads, plan.v_dim))


def unsupported(q, k, *arrays, options: Options) -> str | None:
    """See `registry`. Pallas widens its 32-bit offsets by the bytes of an array, not by its entries."""
    v = dict(zip(options.extras, arrays[3:], strict=True)).get("v", k)
    for pool in (k, v):
        if pool.dtype.itemsize == 1 and 2**31 < pool.size <= 2**32:
            return f"a pool of {pool.size} one-byte entries would be addressed with signed 32-bit offsets"
    return plans.unsupported(options)


def _columns(piece: Piece) -> jax.Array:
    return piece.start + jnp.arange(piece.width, dtype=jnp.int32)


def _attention(*refs, names, plan: Plan, options: Options, v_dtype):
    inputs, outputs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    config, i32 = plan.config, jnp.int32
    m, n = plan.tile_heads * plan.tile_tokens, config.block_n
    column, lane, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = lax.rem(column, i32(plan.token_tiles))
    kv_head = lax.div(lax.div(column, i32(plan.token_tiles)), i32(plan.head_tiles))
    head_tile = lax.rem(lax.div(column, i32(plan.token_tiles)), i32(plan.head_tiles))

    row, length = inputs["rows"][lane], inputs["lens"][lane]
    in_use = (row >= 1) & (row < plan.table_rows)
    row = jnp.where(in_use, row, 0)
    length = jnp.where(in_use, jnp.clip(length, 0, plan.columns), 0)

    index = jnp.arange(m, dtype=i32)
    token = tile * plan.tile_tokens + lax.div(index, i32(plan.tile_heads))
    head = head_tile * plan.tile_heads + lax.rem(index, i32(plan.tile_heads))
    real = (token < plan.tokens) & (head < plan.group)
    # Padding rows repeat the last real ones; what they compute is never stored.
    near, mine = jnp.minimum(token, plan.tokens - 1), jnp.minimum(head, plan.group - 1)
    if "positions" in inputs:
        position = plgpu.load(inputs["positions"].at[lane, near])
        first = inputs["positions"][lane, jnp.minimum(tile * plan.tile_tokens, plan.tokens - 1)]
        # Padding at the end of a lane may say 0, where the window has long been gone.
        first = jnp.maximum(first, inputs["positions"][lane, 0])
    else:
        position, first = jnp.full((m,), length - 1), length - 1
    stop = jnp.minimum(jnp.max(position) + 1, length)
    start = jnp.maximum(first - options.window + 1, 0) if options.window is not None else jnp.int32(0)

    q = [
        plgpu.load(
            inputs["q"].at[lane, near[:, None], kv_head, mine[:, None], _clamped(p)[None, :]],
        )
        for p in plan.k_pieces
    ]
    q = [_zero_padding(x, p) for x, p in zip(q, plan.k_pieces, strict=True)]
    factor = options.scale * _scalar(inputs, "k_scale", options.k_scale)

    def turn(i, carry):
        top, weight, *totals = carry
        cols = start + i * n + jnp.arange(n, dtype=i32)
        held = cols < stop
        slot = plgpu.load(inputs["table"].at[row, jnp.where(held, cols, start)])
        slot = jnp.where((slot >= 0) & (slot < plan.slots), slot, 0)
        keys = [_read(inputs["k"], slot, kv_head, p, options.dtype, v_dtype) for p in plan.k_pieces]
        scores = functools.reduce(jnp.add, [_dot(x, k, True, options) for x, k in zip(q, keys, strict=True)]) * factor
        if options.softcap is not None:
            # tanh by the exponential: infinity ends as 1, and no library call is needed.
            scores = options.softcap * (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2E / options.softcap))))
        visible = held[None, :] & (cols[None, :] <= position[:, None])
        if options.window is not None:
            visible &= cols[None, :] > position[:, None] - options.window
        scores = jnp.where(visible, scores * LOG2E, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - new_top)
        probs = jnp.exp2(scores - new_top[:, None])
        weight = weight * shrink + jnp.sum(probs, axis=1)
        if options.rank is not None:
            values = keys[:1]
        else:
            values = [_read(inputs["v"], slot, kv_head, p, options.dtype, v_dtype) for p in plan.v_pieces]
        probs = probs.astype(v_dtype)
        totals = [x * shrink[:, None] + _dot(probs, v, False, options) for x, v in zip(totals, values, strict=True)]
        return new_top, weight, *totals

    blocks = pl.cdiv(jnp.maximum(stop - start, 0), n)
    each = pl.cdiv(blocks, config.splits)
    begin = split * each
    empty = [jnp.zeros((m, p.width), jnp.float32) for p in plan.v_pieces]
    top, weight, *totals = lax.fori_loop(
        begin,
        jnp.minimum(begin + each, blocks),
        turn,
        (jnp.full((m,), NOTHING_SEEN, jnp.float32), jnp.zeros((m,), jnp.float32), *empty),
    )

    if config.splits > 1:
        at = (lane, token, kv_head, head, jnp.full((m,), split))
        plgpu.store(outputs[0].at[at], top, mask=real)
        plgpu.store(outputs[1].at[at], weight, mask=real)
        for total, piece in zip(totals, plan.v_pieces, strict=True):
            _store(outputs[2], (lane, token, kv_head, head, jnp.full((m,), split)), total, piece, real)
        return
    if "sinks" in inputs:
        sink = plgpu.load(inputs["sinks"].at[kv_head, mine]).astype(jnp.float32) * LOG2E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        weight = weight * shrink + jnp.exp2(sink - new_top)
        totals = [total * shrink[:, None] for total in totals]
    last = _scalar(inputs, "v_scale", options.v_scale) / jnp.where(weight > 0, weight, 1)
    for total, piece in zip(totals, plan.v_pieces, strict=True):
        _store(outputs[0], (lane, token, kv_head, head), total * last[:, None], piece, real)


def _merge(*refs, names, plan: Plan, options: Options):
    """One program per query: the splits' sums, weighted by their maxima."""
    inputs, out = dict(zip(names, refs, strict=False)), refs[-1]
    lane, kv_head = lax.div(pl.program_id(0), plan.tokens), lax.div(pl.program_id(1), plan.group)
    token, head = lax.rem(pl.program_id(0), plan.tokens), lax.rem(pl.program_id(1), plan.group)
    split = jnp.arange(power_of_two(plan.config.splits), dtype=jnp.int32)
    there = split < plan.config.splits
    split = jnp.minimum(split, plan.config.splits - 1)
    at = (lane, token, kv_head, head)
    top = jnp.where(there, plgpu.load(inputs["top"].at[(*at, split)]), NOTHING_SEEN)
    weight = jnp.where(there, plgpu.load(inputs["weight"].at[(*at, split)]), 0.0)
    best, sink = jnp.max(top), None
    if "sinks" in inputs:
        sink = inputs["sinks"][kv_head, head].astype(jnp.float32) * LOG2E
        best = jnp.maximum(best, sink)
    share = jnp.where(there, jnp.exp2(top - best), 0.0)
    whole = jnp.sum(share * weight)
    if sink is not None:
        whole = whole + jnp.exp2(sink - best)
    last = _scalar(inputs, "v_scale", options.v_scale) / jnp.where(whole > 0, whole, 1)
    for piece in plan.v_pieces:
        columns = _columns(piece)
        total = plgpu.load(inputs["total"].at[(*at, split[:, None], _clamped(piece)[None, :])])
        value = jnp.sum(total * share[:, None], axis=0) * last
        mask = None if piece.used == piece.width else columns < piece.start + piece.used
        plgpu.store(out.at[(*at, columns)], value.astype(out.dtype), mask=mask)


def _scalar(inputs, name: str, default: float | None):
    return inputs[name][()] if name in inputs else 1.0 if default is None else default


def _clamped(piece: Piece) -> jax.Array:
    """The piece's columns; padding repeats the last real one."""
    columns = _columns(piece)
    return columns if piece.used == piece.width else jnp.minimum(columns, piece.start + piece.used - 1)


def _zero_padding(x: jax.Array, piece: Piece) -> jax.Array:
    if piece.used == piece.width:
        return x
    return jnp.where((_columns(piece) < piece.start + piece.used)[None, :], x, jnp.zeros_like(x))


def _read(pool, slot: jax.Array, kv_head: jax.Array, piece: Piece, dtype, wanted) -> jax.Array:
    """[n, width] of the slots' rows in the dtype of the matmuls. Padding columns are 0: times 0, infinity is NaN."""
    found = plgpu.load(pool.at[slot[:, None], kv_head, _clamped(piece)[None, :]])
    if found.dtype != dtype:
        found = lax.bitcast_convert_type(found, dtype)
    return _zero_padding(found.astype(wanted), piece)


def _dot(x: jax.Array, y: jax.Array, transposed: bool, options: Options) -> jax.Array:
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if options.exact else None  # None: TF32 for float32
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _store(out, at, values: jax.Array, piece: Piece, real: jax.Array) -> None:
    """out[at, columns] = values where the row and the column are real."""
    columns = _columns(piece)
    mask = real[:, None] & (columns < piece.start + piece.used)[None, :]
    at = tuple(i[:, None] if jnp.ndim(i) else i for i in at)
    plgpu.store(out.at[(*at, columns[None, :])], values.astype(out.dtype), mask=mask)
