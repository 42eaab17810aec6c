"""The attention kernel of `triton.py`: one lane, one KV head, a tile of queries and one split of the keys a program.

The same program as in `pallas_triton.py`, which says how padding is kept out. Offsets into pools are 64-bit.
"""

# Inside a kernel everything is a Triton value, whatever the annotations of the language say.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from pallas_kernels.attention.triton_merge import LOG2E, NOTHING_SEEN


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
def attention(
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
        if not DECODE:  # padding at the end of a lane may say 0, where the window has long been gone
            first = tl.maximum(first, tl.load(positions + lane * TOKENS))
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
