"""Page arithmetic and the padding constants: the one place where slots, pages and sizes are related.

A slot is one token's place in a pool; a page is `page_size` consecutive slots. Row 0 of a request table,
page 0 of a pool and slot 0 are padding: no allocator hands them out, and they are the legal address of a lane
that is not in use.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np

PAD_SLOT = 0  # location of a padded lane; a write there is dropped
PAD_PAGE = 0
PAD_ROW = 0
NO_LOC = -1  # "no last location": the prefix is empty
NEW_ROW = -1  # "a new row is wanted"

INT32_MAX = int(np.iinfo(np.int32).max)
INT32_MIN = int(np.iinfo(np.int32).min)


def ceil_div(x, d: int):
    """ceil(x / d) for x >= 0, without forming x + d - 1 (which could pass int32)."""
    return x // d + (x % d != 0)


def round_up(x, multiple: int):
    """The smallest multiple of `multiple` that is >= x."""
    return ceil_div(x, multiple) * multiple


def round_down(x, multiple: int):
    """The largest multiple of `multiple` that is <= x."""
    return x // multiple * multiple


def page_of(slot, page_size: int):
    """Page that a slot lies in. Floors, so a negative slot lies in a negative page and stays out of range."""
    if page_size & (page_size - 1) == 0:  # a shift floors too, and XLA's signed division costs ten times as much
        return slot >> (page_size.bit_length() - 1)
    return slot // page_size


def slot_of(page, offset, page_size: int):
    """Slot number of `offset` inside `page`."""
    return page * page_size + offset


def host_int32(name: str, values: Any) -> np.ndarray:
    """i32[n] of a host sequence of token ids or slots. ValueError for another rank, for values that are no integers,
    and for those that int32 does not hold: numpy would cut them without a word."""
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be a flat sequence of integers, got {array.dtype} of shape {array.shape}; convert it first."
        )
    if array.size and not (int(array.min()) >= -INT32_MAX - 1 and int(array.max()) <= INT32_MAX):
        raise ValueError(
            f"{name} reaches from {array.min()} to {array.max()}, which does not fit int32 (at most {INT32_MAX}); "
            "number them anew."
        )
    return array.astype(np.int32, copy=False)


def positive(name: str, value: SupportsIndex) -> int:
    """`value` as a Python int > 0; ValueError otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} must be a whole number, got {value!r} of type {type(value).__name__}; pass a Python int."
        ) from None
    if isinstance(value, bool) or number <= 0:
        raise ValueError(f"{name} must be at least 1, got {value!r}; pass a positive Python int.")
    return number


def pool_slots(size: SupportsIndex, page_size: SupportsIndex) -> int:
    """Rows of a per-token buffer for `size` tokens: size + page_size, page 0 being padding.

    Raises ValueError if a size is not positive or the slot count does not fit an int32 location.
    """
    tokens, page = positive("size", size), positive("page_size", page_size)
    if tokens + page > INT32_MAX:
        raise ValueError(
            f"a pool of {tokens} tokens with pages of {page} needs {tokens + page} slots, but locations are int32 "
            f"and reach {INT32_MAX}; split the pool or store fewer tokens."
        )
    return tokens + page


def capacity_of(value: SupportsIndex) -> int:
    """A number of output lanes as a Python int, 1 .. 2^31 - 1; ValueError otherwise."""
    capacity = positive("capacity", value)
    if capacity > INT32_MAX:
        raise ValueError(f"capacity {capacity} does not fit int32 (at most {INT32_MAX}); ask for fewer tokens a call.")
    return capacity


def check_start_pos(start_pos: SupportsIndex, page_size: int) -> None:
    """ValueError unless start_pos is a whole number >= 0 on a page boundary."""
    try:
        start = operator.index(start_pos)
    except TypeError:
        raise ValueError(f"start_pos must be a Python int, got {start_pos!r}; pass the segment's position.") from None
    if start < 0 or start % page_size:
        raise ValueError(
            f"a segment must start on a page boundary, got start_pos {start} with pages of {page_size}; "
            f"start it at {max(start, 0) // page_size * page_size} or release it with free()."
        )
