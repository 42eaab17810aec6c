"""kv_write as one Triton kernel: each program moves a tile of tokens x columns of one part, wide and in place.

Rows are contiguous, [slots, heads * width], and so are the values. With widths that are multiples of 16 bytes every
thread loads and stores 16 bytes at a time. The slot becomes 64-bit before it is multiplied: a leaf may pass 2^31
elements.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import jax_triton_adapter
from pallas_kernels.kv_write import plan
from pallas_kernels.kv_write.plan import FIRST_WRITABLE, Config, bound, chosen_config, parts_of

TYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
}
BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}


@triton.jit
def _encoded(value, scale, DTYPE: tl.constexpr, BOUND: tl.constexpr, SCALED: tl.constexpr):
    """What `encoding.encode` makes of a tile, in DTYPE."""
    if SCALED:
        divisor = tl.load(scale) + tl.zeros(value.shape, tl.float32)
        # div_rn, because `/` is an approximation; the quotient is rounded to the dtype of the values.
        value = tl.div_rn(value.to(tl.float32), divisor).to(value.dtype)
    if value.dtype != DTYPE:
        value = value.to(tl.float32)
        if BOUND > 0:  # comparisons with NaN are false, so NaN stays
            value = tl.where(value > BOUND, BOUND, value)
            value = tl.where(value < -BOUND, -BOUND, value)
        value = value.to(DTYPE)
    return value


@triton.jit
def _part(
    leaf,
    values,
    scale,
    loc,
    block,
    OFFSET: tl.constexpr,  # first column of the part in a row of the leaf
    WIDTH: tl.constexpr,  # columns of the part
    ROOM: tl.constexpr,  # columns written: WIDTH, and zeros behind it
    ROW: tl.constexpr,  # columns of a row of the leaf
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,  # the unsigned integer of DTYPE's width
    BOUND: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Block `block` of the part's columns, of the tokens of this program."""
    lane = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(loc + lane, mask=lane < ROWS, other=0)
    kept = ((slot >= FIRST) & (slot < SLOTS))[:, None]
    column = (block * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    source = values + lane.to(tl.int64)[:, None] * WIDTH + column
    # Triton compiles this text and BITS is a type there; read as Python, it is a constexpr.
    bits_of_leaf = leaf.to(tl.pointer_type(BITS))  # pyright: ignore[reportArgumentType]
    target = bits_of_leaf + slot.to(tl.int64)[:, None] * ROW + OFFSET + column
    value = _encoded(tl.load(source, mask=kept & (column < WIDTH)), scale, DTYPE, BOUND, SCALED)
    bits = value.to(BITS, bitcast=True)
    if ROOM > WIDTH:  # a masked load leaves anything in the columns behind the part
        bits = tl.where(column < WIDTH, bits, tl.zeros(bits.shape, BITS))
    tl.store(target, bits, mask=kept & (column < ROOM))


@triton.jit
def _two_leaves(
    k_leaf,
    v_leaf,
    k,
    v,
    k_scale,
    v_scale,
    loc,
    _k_again,
    _v_again,
    FIRST_PART: tl.constexpr,  # a plan.Part
    SECOND_PART: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    COMMON: tl.constexpr,  # the other constants of _part
):
    block = tl.program_id(1)
    if block < FIRST_BLOCKS:
        _part(k_leaf, k, k_scale, loc, block, *FIRST_PART, *COMMON)
    else:
        _part(v_leaf, v, v_scale, loc, block - FIRST_BLOCKS, *SECOND_PART, *COMMON)


@triton.jit
def _one_leaf(
    leaf,
    first,
    second,
    scale,
    loc,
    _again,
    FIRST_PART: tl.constexpr,
    SECOND_PART: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    COMMON: tl.constexpr,
):
    block = tl.program_id(1)
    if block < FIRST_BLOCKS:
        _part(leaf, first, scale, loc, block, *FIRST_PART, *COMMON)
    else:
        _part(leaf, second, scale, loc, block - FIRST_BLOCKS, *SECOND_PART, *COMMON)


def kv_write(leaves, values, scales, loc, valid, *, dtype, config: Config | None = None) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.kv_write`, which checks the arguments. config: None for the tuned or the default one."""
    rows, slots = loc.shape[0], leaves[0].shape[0]
    config = chosen_config(leaves, values, loc) if config is None else config
    if valid is not None:
        loc = jnp.where(valid, loc, 0)
    flat = [part for of_leaf in values for part in of_leaf]
    parts = [part for one in zip(leaves, values, scales, strict=True) for part in parts_of(*one)]
    if len(flat) == 1:  # the second part is empty: no program of the grid writes it
        flat, parts = flat * 2, [*parts, parts[0]._replace(room=0)]
    blocks = [-(-part.room // config.columns) for part in parts]
    # A leaf without a scale gets `loc` in its place, which is not read.
    scales = [loc if scale is None else scale.astype(jnp.float32) for scale in scales]
    common = (rows, slots, FIRST_WRITABLE, TYPES[dtype.name], BITS[dtype.itemsize], bound(dtype))
    return jax_triton_adapter.call(
        _two_leaves if len(leaves) == 2 else _one_leaf,
        (*leaves, *flat, *scales, loc),
        grid=(-(-rows // config.tokens), sum(blocks)),
        in_place=range(len(leaves)),
        num_warps=config.num_warps,
        FIRST_PART=tuple(parts[0]),
        SECOND_PART=tuple(parts[1]),
        FIRST_BLOCKS=blocks[0],
        COMMON=(*common, config.tokens, config.columns),
    )


def unsupported(leaves, values, scales, loc, valid, *, dtype) -> str | None:
    """See `registry`."""
    del scales, valid
    return plan.unsupported(leaves, values, loc, dtype)
