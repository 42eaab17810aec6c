"""The second kernel of `triton.py`, where the keys of a lane were split: the splits' sums become one result."""

# Inside a kernel everything is a Triton value, whatever the annotations of the language say.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # scores are kept in units of log 2: exp2 is one instruction
NOTHING_SEEN = tl.constexpr(-1e30)  # finite, so that exp2(-inf - maximum) is 0 and never NaN


@triton.jit
def merge(
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
