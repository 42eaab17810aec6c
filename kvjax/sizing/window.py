"""Sliding windows: how many slots a request holds on the window's side, and which of them are out of it."""

from __future__ import annotations

from collections.abc import Iterable

from kvjax.layout import round_down, round_up


def estimate_swa_kv_tokens(
    *,
    extend_input_len: int,
    max_new_tokens: int,
    sliding_window_size: int | None,
    page_size: int,
    allocation_limit: int | None = None,
    host_hit_length: int = 0,
) -> int:
    """Window-side tokens that a request may hold at once (SGLang: estimate_swa_kv_tokens).

    allocation_limit: longest chunk that is prefilled at once; host_hit_length: tokens that come from the host tier.
    Without a window (None or 0): everything, like the full side.
    """
    host = round_up(host_hit_length, page_size)
    if not sliding_window_size or sliding_window_size <= 0:
        return extend_input_len + max_new_tokens + page_size + host
    chunk = extend_input_len if allocation_limit is None else min(extend_input_len, allocation_limit)
    beyond = max(chunk - sliding_window_size, 0)
    return beyond + min(extend_input_len + max_new_tokens, sliding_window_size) + page_size + host


def swa_out_of_window(
    *,
    pre_len: int,
    evicted_seqlen: int,
    sliding_window_size: int,
    page_size: int,
    dead_lo: int = 0,
    prefix_sharing: bool = False,
    retain_floor: int | None = None,
    eviction_interval: int = 1,
    protected_len: int = 0,
) -> tuple[list[tuple[int, int]], int]:
    """(token ranges whose window-side slots may go back, new evicted length) of a row of `pre_len` tokens.

    dead_lo: tokens before it have no window-side slots of this row. retain_floor: with prefix sharing, tokens from
    here on stay for the tree. eviction_interval: nothing happens until that many tokens have left the window.
    protected_len is part of SGLang's signature and plays no part in the rule.

    Whole pages only, and never the last window: the edge is rounded down, and under prefix sharing the window is
    rounded up first, so that what the tree takes over ends with a whole window of mapped pages.
    """
    del protected_len
    if pre_len - sliding_window_size < evicted_seqlen + eviction_interval:
        return [], evicted_seqlen
    window = round_up(sliding_window_size, page_size) if prefix_sharing else sliding_window_size
    edge = pre_len - window
    if prefix_sharing and retain_floor is not None:
        edge = min(edge, retain_floor)
    start = max(evicted_seqlen, dead_lo)
    end = round_down(max(start, edge), page_size)
    return ([(start, end)] if end > start else []), end


def coalesce_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent [start, end) ranges joined; they come sorted and do not overlap."""
    out: list[tuple[int, int]] = []
    for start, end in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out
