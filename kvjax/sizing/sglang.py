"""From bytes to pool sizes, as SGLang does it: exact, and blind to the padding page, the tables and the row table.

`kvjax.sizing.plan_pools` counts those too; use it for what you build, and this to compare with SGLang.
"""

from __future__ import annotations

import dataclasses

from kvjax.layout import positive, round_down

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class SwaSplit:
    """Sizes of a model with full and sliding-window layers, tokens."""

    cell_size: int | float  # bytes per token of the full side, the window side's share included
    max_total: int  # tokens that requests may hold
    full: int  # tokens of the full pool; 0 when every layer has a window
    swa: int  # tokens of the window pool


@dataclasses.dataclass(frozen=True)
class StateBudget:
    """Recurrent state slots, and the memory that is left for attention."""

    slots: int  # without the padding slot
    rest_gb_after: float


def default_pool_size(*, available_bytes: int, cell_size: int, page_size: int, fixed_overhead_bytes: int = 0) -> int:
    """Page-aligned tokens of one pool. ValueError when not even one page fits."""
    tokens = round_down((available_bytes - fixed_overhead_bytes) // positive("cell_size", cell_size), page_size)
    if tokens <= 0:
        raise ValueError(
            f"{available_bytes} bytes, {fixed_overhead_bytes} of them taken, hold no page of {page_size} tokens at "
            f"{cell_size} bytes each; at least {fixed_overhead_bytes + cell_size * page_size} bytes are needed."
        )
    return tokens


def hybrid_swa_split(
    *,
    available_bytes: int,
    full_layers: int,
    swa_layers: int,
    full_bytes: int,
    swa_bytes: int,
    ratio: float,
    window: int,
    page_size: int,
    draft_full_layers: int = 0,
    draft_swa_layers: int = 0,
) -> SwaSplit:
    """Sizes of the full and the window pool. full_bytes, swa_bytes: of one token in one layer; ratio: swa / full.

    ValueError when the window pool could not hold a window and a page: then no request would ever be admitted, and
    the server would wait for ever instead of failing.
    """
    full_bytes_all = full_bytes * (full_layers + draft_full_layers)
    swa_bytes_all = swa_bytes * (swa_layers + draft_swa_layers)
    if full_layers == 0:
        cell = swa_bytes_all + full_bytes_all
        swa = round_down(available_bytes // cell, page_size)
        if swa <= 0:
            raise ValueError(
                f"{available_bytes} bytes hold no page of {page_size} tokens at {cell} bytes each; at least "
                f"{cell * page_size} bytes are needed."
            )
        return SwaSplit(cell, swa, 0, swa)
    cell = full_bytes_all + ratio * swa_bytes_all
    full = round_down(int(available_bytes // cell), page_size)
    if full <= 0:
        raise ValueError(
            f"{available_bytes} bytes hold no page of {page_size} tokens at {cell} bytes each; at least "
            f"{int(cell * page_size) + 1} bytes are needed."
        )
    swa = swa_tokens(full, ratio=ratio, window=window, page_size=page_size)
    return SwaSplit(cell, full, full, swa)


def swa_tokens(full: int, *, ratio: float, window: int, page_size: int) -> int:
    """Page-aligned window-side tokens beside `full` tokens. ValueError unless more than a window and a page."""
    swa = round_down(int(full * ratio), page_size)
    if window + page_size >= swa:
        raise ValueError(
            f"the window pool would hold {swa} tokens ({full} x {ratio} in pages of {page_size}), but a request needs "
            f"more than window {window} + page {page_size} = {window + page_size}; raise the ratio or the memory, or "
            "make the page smaller."
        )
    return swa


def mamba_slots_per_request(
    *, disable_radix: bool, extra_buffer: bool = False, overlap: bool = False, lazy: bool = False
) -> int:
    """State slots per request: 1 without a prefix cache; with one a working, a cached and a spare one, and the
    tracking slots (two when steps overlap, unless they are taken lazily)."""
    if disable_radix:
        return 1
    tracking = (2 if overlap and not lazy else 1) if extra_buffer else 0
    return 3 + tracking


def mamba_budget(
    *,
    rest_gb: float,
    per_request_bytes: int,
    max_running_requests: int,
    full_memory_ratio: float,
    slots_per_request: int,
    explicit_cache_size: int | None = None,
    draft_tokens: int | None = None,
    disable_radix: bool = False,
) -> StateBudget:
    """How many state slots, and what is left (GiB). full_memory_ratio: state bytes : attention bytes.

    ValueError when not one slot fits.
    """
    drafts, per = draft_tokens or 0, per_request_bytes
    if explicit_cache_size is not None:
        slots = explicit_cache_size
    elif disable_radix:
        slots = max_running_requests
    else:
        budget = rest_gb * full_memory_ratio / (1 + full_memory_ratio) * GIB
        # One slot is padding; with speculation each request also keeps a state per draft token.
        slots = int((budget - per * (1 + drafts)) // (per * (1 + drafts / slots_per_request)))
    if slots <= 0:
        raise ValueError(
            f"{rest_gb} GiB hold no state slot of {per} bytes beside attention at ratio {full_memory_ratio}; give more "
            "memory, a larger ratio, or an explicit number of slots."
        )
    used = (slots + 1) * per
    if drafts:
        no_radix = disable_radix and explicit_cache_size is None
        requests = slots if no_radix else min(max_running_requests, slots // slots_per_request)
        used += per * (requests + 1) * drafts
    return StateBudget(slots, rest_gb - used / GIB)


def max_num_reqs(
    *,
    token_capacity: int,
    context_len: int,
    max_running_requests: int | None = None,
    dp_size: int = 1,
    mamba_cache_size: int | None = None,
    mamba_ratio: int | None = None,
) -> int:
    """Rows of the request table: the caller's number, or 2,048 to 4,096 by the pool's size; never more than the pool
    or the state slots can serve."""
    if max_running_requests is not None:
        rows = max_running_requests // dp_size
    else:
        rows = min(max(int(token_capacity / context_len * 512), 2048), 4096)
    rows = min(rows, token_capacity // 2)
    if mamba_cache_size is not None:
        rows = min(rows, mamba_cache_size // (mamba_ratio or 1))
    return rows


def host_pool_size(*, device_tokens: int, ratio: float, page_size: int) -> tuple[int, int]:
    """(tokens, pages) of the host tier: a multiple of the device's pool, always rounded up past it."""
    pages = int(device_tokens * ratio) // page_size + 1
    return pages * page_size, pages
