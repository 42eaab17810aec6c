"""How the kernels of kv_write see a call: flat rows, their parts, and how the work is cut. Shapes only, no kernel."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import jax_triton_adapter, tuning
from pallas_kernels.arguments import power_of_two

# The lowest slot that a write may reach. Only slot 0 is closed, as in SGLang's GPU writers, and not all of page 0:
# a replay of SGLang's own traces writes slots 1 .. page_size - 1 too. No allocator hands those out.
FIRST_WRITABLE = 1
MOST_WARPS, MOST_ENTRIES = 32, 1 << 16  # of a program: above, it would not compile, or not in a sensible time
VECTOR = 16  # bytes that a thread of a GPU moves at once
MOST_CANDIDATES = 48  # that a search times
FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


class Part(NamedTuple):
    """Where a part of the values goes in the flat rows [slots, row] of its leaf; all in columns."""

    offset: int
    width: int  # of the part
    room: int  # what is written: the part, and zeros to the end of the row behind the last one
    row: int  # columns of a row of the leaf
    scaled: bool  # whether the values are divided by a scale


def parts_of(leaf: Any, values: tuple[Any, ...], scale: Any) -> list[Part]:
    """The parts of one leaf. Their heads are one run of columns: several parts have one head each."""
    row, offset, found = math.prod(leaf.shape[1:]), 0, []
    for part in values:
        width = math.prod(part.shape[1:])
        found.append(Part(offset, width, width, row, scale is not None))
        offset += width
    found[-1] = found[-1]._replace(room=row - found[-1].offset)
    return found


def bound(dtype: Any) -> float:
    """The value at which fp8 saturates; 0 for the dtypes that do not."""
    return float(jnp.finfo(dtype).max) if dtype.itemsize == 1 else 0.0


def unsupported(leaves: tuple[Any, ...], values: tuple[tuple[Any, ...], ...], loc: Any, dtype: Any) -> str | None:
    """What no kernel of kv_write can do, as a sentence; None for a call that one launch serves."""
    flat = [part for parts in values for part in parts]
    if len(flat) > 2:
        return f"one launch writes two parts, and these are {len(flat)}"
    for leaf, parts in zip(leaves, values, strict=True):
        if leaf.shape[1] > 1 and any(part.shape[-1] != leaf.shape[-1] for part in parts):
            return f"with {leaf.shape[1]} heads a row has no room behind a part: {parts[0].shape} in {leaf.shape}"
    for part in flat:
        if part.dtype not in (*FLOATS, dtype):
            return f"values of {part.dtype} are not converted to {dtype}; cast them to float32 first"
    if dtype == jnp.float8_e4m3fn and capability() < 89:
        return f"{dtype} needs compute capability 8.9 and this GPU has {capability() / 10}"
    return None if loc.shape[0] else "there are no rows to write"


def capability() -> int:
    """Compute capability of the GPU traced for, the newest where there is none (interpreted) or none that is known."""
    try:
        return jax_triton_adapter.compute_capability()
    except ValueError:
        return 999


@dataclasses.dataclass(frozen=True)
class Config:
    """How the Triton kernel cuts the work: a program writes a tile of tokens x columns. Powers of two."""

    tokens: int
    columns: int
    num_warps: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            most = MOST_WARPS if name == "num_warps" else MOST_ENTRIES
            if not 1 <= value <= most or value & (value - 1):
                raise ValueError(f"{name} is {value}; a power of two up to {most} was expected.")
        if self.tokens * self.columns > MOST_ENTRIES:
            raise ValueError(
                f"a tile of {self.tokens} tokens x {self.columns} columns has more than {MOST_ENTRIES} entries."
            )


def default_config(leaves: tuple[Any, ...], values: tuple[tuple[Any, ...], ...], loc: Any) -> Config:
    """16 bytes a thread and at most 128 threads, over as many programs as a small batch can give a GPU."""
    vector = VECTOR // leaves[0].dtype.itemsize
    widest = max(math.prod(part.shape[1:]) for parts in values for part in parts)
    columns = min(power_of_two(widest), 128 * vector)
    rows = power_of_two(loc.shape[0])
    tokens = max(1, min(128 * vector // columns, rows // 64))
    return Config(tokens, columns, max(1, min(4, tokens * columns // (32 * vector))))


def chosen_config(leaves: tuple[Any, ...], values: tuple[tuple[Any, ...], ...], loc: Any) -> Config:
    """The config that a search on this kind of device found, else the default."""
    return tuning.chosen("kv_write", tuning_key(leaves, values, loc), default_config(leaves, values, loc))


def candidates(leaves: tuple[Any, ...], values: tuple[tuple[Any, ...], ...], loc: Any) -> list[Config]:
    """What a search times: the default, then tiles of another shape or size, the nearest first.

    At most MOST_CANDIDATES, powers of two all. No tile is larger than the rows and columns that there are, and a thread
    has from one value to eight vectors.
    """
    default = default_config(leaves, values, loc)
    widest = max(math.prod(part.shape[1:]) for parts in values for part in parts)
    vector = VECTOR // leaves[0].dtype.itemsize
    near = (
        _near(default.tokens, power_of_two(loc.shape[0])),
        _near(default.columns, power_of_two(widest)),
        _near(default.num_warps, 8),
    )
    found = {
        Config(*sizes): sum(steps[size] for steps, size in zip(near, sizes, strict=True))
        for sizes in itertools.product(*near)
    }

    def useful(config: Config) -> bool:
        return 1 <= config.tokens * config.columns / (32 * config.num_warps) <= 8 * vector

    others = sorted((c for c in found if c != default and useful(c)), key=lambda config: found[config])  # ties: as made
    return [default, *others[: MOST_CANDIDATES - 1]]


def _near(value: int, most: int) -> dict[int, int]:
    """Neighbour -> doublings or halvings from `value`, at most three, within 1 .. most (or `value`)."""
    first = value.bit_length() - 1
    return {2**n: abs(n - first) for n in range(max(0, first - 3), first + 4) if n == first or 2**n <= most}


def tuning_key(leaves: tuple[Any, ...], values: tuple[tuple[Any, ...], ...], loc: Any) -> str:
    """Calls of one key share a config: dtypes, widths, and the rows rounded up to a power of two."""
    widths = "+".join(f"{part.dtype.name}x{math.prod(part.shape[1:])}" for parts in values for part in parts)
    return f"{leaves[0].dtype.name}, {widths}, rows {power_of_two(loc.shape[0])}"
