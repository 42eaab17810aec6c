"""How a call is cut into programs: tiles of query rows, pieces of columns, splits of the keys. Python ints only.

A program serves one lane, one KV head, a tile of query rows (tokens x heads of that KV head) and one split of the
tile's keys. Blocks of a kernel have power-of-two extents, so a width of 576 is read as 512 + 64 and one of 80 as
64 + 16, and no bytes beside the pool's own are moved.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp

from pallas_kernels import jax_triton_adapter, tuning
from pallas_kernels.arguments import power_of_two
from pallas_kernels.attention.options import Config, Options

LEAST = 16  # extent of a matmul block, at least
# Splits are made up to so many programs: for each multiprocessor of an H100 or H200 (132) a few that run together, and
# a few that wait, so that a long row does not run alone in the end. Of the large tiles one or two run together.
PROGRAMS, LARGE_PROGRAMS = 132 * 8, 132 * 2
KEYS_PER_SPLIT = 256  # fewer would make the merge as dear as the attention
MOST_SPLITS = 16
# Configs that a search times: each costs seconds of compilation, and far from the default few are any good.
MOST_CANDIDATES = 48
SHARED_BYTES = 227 * 1024  # that a block may have on compute capability 9.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Columns start .. start + width - 1 of a row, of which the first `used` are real."""

    start: int
    width: int  # a power of two >= LEAST
    used: int


def pieces(columns: int, start: int = 0, whole: bool = False) -> tuple[Piece, ...]:
    """One or two pieces that cover `columns`; whole: one, padded."""
    head = max(LEAST, power_of_two(columns) if whole else 1 << (columns.bit_length() - 1))
    if columns <= head:
        return (Piece(start, head, columns),)
    rest = columns - head
    return Piece(start, head, head), Piece(start + head, max(LEAST, power_of_two(rest)), rest)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that the kernels need."""

    batch: int
    tokens: int  # t, queries per lane
    kv_heads: int
    group: int  # query heads per KV head
    v_dim: int  # columns of the result
    table_rows: int
    columns: int  # of the table
    slots: int
    k_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]  # latent: the same as k_pieces[:1], and the keys that were read serve as values
    tile_heads: int  # query heads per tile, padded: a power of two
    tile_tokens: int
    config: Config

    @property
    def head_tiles(self) -> int:
        return -(-self.group // self.tile_heads)

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // self.tile_tokens)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(KV head x head tile x token tile, lane, split)."""
        return self.kv_heads * self.head_tiles * self.token_tiles, self.batch, self.config.splits


def unsupported(options: Options) -> str | None:
    """What no kernel can do on the GPU traced for, as a sentence."""
    try:
        capability = jax_triton_adapter.compute_capability()
    except ValueError:  # interpreted, or a GPU that is not known here
        return None
    if options.dtype == jnp.float8_e4m3fn and capability < 89:
        return f"{options.dtype.name} needs compute capability 8.9 and this GPU has {capability / 10}"
    return None


def make_plan(q, k, table, given, options: Options, by: str) -> Plan:
    """The plan of checked arguments; q: [b, t, Hq, D]; given: extras by name; by: the implementation that asks, for
    what is fastest for one may not even compile with another."""
    b, t, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    k_pieces, v_pieces, v_dim = _pieces_of(q, given, options)
    config = options.config or tuning.chosen(
        tuned_as(by), tuning_key(q, k, table, v_dim, options), default_for(q, k, table, given, options)
    )
    tile_heads = min(power_of_two(group), config.block_m)
    tile_tokens = config.block_m // tile_heads
    if t == 1:  # rows beyond the heads are padding anyway
        tile_heads, tile_tokens = config.block_m, 1
    return Plan(
        batch=b,
        tokens=t,
        kv_heads=kv_heads,
        group=group,
        v_dim=v_dim,
        table_rows=table.shape[0],
        columns=table.shape[1],
        slots=k.shape[0],
        k_pieces=k_pieces,
        v_pieces=v_pieces,
        tile_heads=tile_heads,
        tile_tokens=tile_tokens,
        config=config,
    )


def _pieces_of(q, given, options: Options) -> tuple[tuple[Piece, ...], tuple[Piece, ...], int]:
    """(pieces of the keys, pieces of the values, columns of the result)."""
    q_dim = q.shape[-1]
    if options.rank is None:
        v_dim = given["v"].shape[-1]
        return pieces(q_dim), pieces(v_dim), v_dim
    rope = q_dim - options.rank
    v_pieces = pieces(options.rank, whole=True)
    return v_pieces + (pieces(rope, options.rank, whole=True) if rope else ()), v_pieces, options.rank


def default_for(q, k, table, given, options: Options) -> Config:
    """The default config of a call as `make_plan` takes it."""
    (b, t, heads, q_dim), kv_heads = q.shape, k.shape[1]
    k_pieces, _, v_dim = _pieces_of(q, given, options)
    # A window is all that is read of a long row.
    most_keys = table.shape[1] if options.window is None else min(table.shape[1], options.window + t - 1)
    key_bytes = k.dtype.itemsize * (q_dim if options.rank is not None else q_dim + v_dim)
    return default_config(b * kv_heads, heads // kv_heads * t, most_keys, k_pieces, v_dim, q.dtype.itemsize, key_bytes)


def candidates(q, k, table, given, options: Options) -> list[Config]:
    """What a search times for a call as `make_plan` takes it: the default, then its neighbours, the nearest first.

    At most MOST_CANDIDATES. Blocks, warps and splits are powers of two (but for the default's own splits); no block is
    larger than what it has to hold, and no split has fewer than KEYS_PER_SPLIT keys.
    """
    default = default_for(q, k, table, given, options)
    rows = q.shape[2] // k.shape[1] * q.shape[1]
    most_keys = table.shape[1] if options.window is None else min(table.shape[1], options.window + q.shape[1] - 1)
    most_splits = max(default.splits, min(MOST_SPLITS, power_of_two(most_keys // KEYS_PER_SPLIT + 1) // 2))
    k_pieces, v_pieces, _ = _pieces_of(q, given, options)
    read = k_pieces if options.rank is not None else k_pieces + v_pieces
    key_bytes = sum(piece.width for piece in read) * k.dtype.itemsize
    query_bytes = sum(piece.width for piece in k_pieces) * q.dtype.itemsize

    def fits(config: Config) -> bool:
        """A rough guess, so that what cannot run is not compiled: queries once, and a block of keys per stage."""
        return config.block_m * query_bytes + config.num_stages * config.block_n * key_bytes <= SHARED_BYTES

    near = (
        _near(default.block_m, LEAST, max(default.block_m, min(128, power_of_two(rows)))),
        _near(default.block_n, LEAST, 128),
        _near(default.splits, 1, most_splits),
        _near(default.num_warps, 2, 8),
        {stages: abs(stages - default.num_stages) for stages in (1, 2, 3, 4)},
    )
    found = {
        Config(*values): sum(steps[value] for steps, value in zip(near, values, strict=True))
        for values in itertools.product(*near)
    }
    others = sorted((c for c in found if c != default and fits(c)), key=lambda config: found[config])  # ties: as made
    return [default, *others[: MOST_CANDIDATES - 1]]


def _near(value: int, least: int, most: int) -> dict[int, int]:
    """Neighbour -> steps from `value`: itself, and powers of two up to a fourth and four times of it."""
    below = power_of_two(value + 1) // 2  # value, or the power of two below it
    steps = {
        n: abs(n.bit_length() - value.bit_length()) or 1 for n in (below // 4, below // 2, below, 2 * below, 4 * below)
    }
    return {value: 0} | {n: away for n, away in steps.items() if n != value and least <= n <= most}


def tuned_as(by: str) -> str:
    """The operation under which configs of an implementation stand in a tuning file."""
    return f"paged_attention, {by}"


def tuning_key(q, k, table, v_dim: int, options: Options) -> str:
    """Calls of one key share a config: dtypes, heads and widths; lanes, queries and columns by powers of two."""
    lanes, tokens, columns = (power_of_two(n) for n in (*q.shape[:2], table.shape[1]))
    kinds = f"{q.dtype.name} over {options.dtype.name}" + (" latents" if options.rank is not None else "")
    sizes = f"heads {q.shape[2]}/{k.shape[1]}, widths {q.shape[3]}/{v_dim}"
    window = "" if options.window is None else f", window {power_of_two(options.window)}"
    return f"{kinds}, {sizes}, lanes {lanes}, queries {tokens}, columns {columns}{window}"


def default_config(
    programs: int, rows: int, most_keys: int, k_pieces: tuple[Piece, ...], v_dim: int, itemsize: int, key_bytes: int
) -> Config:
    """A config that compiles for an H200 without spills; what it costs in time was not measured.

    programs: lanes x KV heads. rows: query rows of each (tokens x heads). most_keys: of a row.
    itemsize: of q. key_bytes: what one KV head reads per key.
    """
    wide, whole = max(sum(p.width for p in k_pieces), v_dim), itemsize == 4
    largest = 64 if not whole else 16 if wide > 128 else 32  # float32 takes twice the registers and the shared memory
    block_m = min(largest, max(LEAST, power_of_two(rows)))
    block_n = largest if whole else 32 if wide > 128 else 64
    if whole:
        large = block_m > LEAST or wide > 128
    else:
        large = block_m > LEAST and block_m * wide > 64 * 128
    # Splits cost what they write and the merge reads, 8 bytes per entry of a result: at most an eighth of the keys.
    merged = 8 * min(rows, block_m) * v_dim
    fewest = max(KEYS_PER_SPLIT, 8 * merged // key_bytes)
    most = max(1, min(MOST_SPLITS, most_keys // fewest))
    target = LARGE_PROGRAMS if large else PROGRAMS
    splits = max(1, min(most, target // (programs * -(-rows // block_m))))
    return Config(block_m=block_m, block_n=block_n, splits=splits, num_warps=8 if large else 4, num_stages=2)
