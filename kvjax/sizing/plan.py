"""plan_pools: from a memory budget to the sizes of everything that is built, counted to the byte.

Unlike SGLang's rule it counts the padding page, the allocators' lists, the request table, padded widths and state
slots: what is built from a plan never exceeds the budget, and misses it by less than one page of every pool together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.layout import INT32_MAX, ceil_div, positive, round_down
from kvjax.sizing.model import FULL, STATE, WINDOW, ModelShape
from kvjax.sizing.sglang import max_num_reqs, swa_tokens

TABLE_SHARE = 20  # at most 1 / 20 of the budget goes to rows whose number the caller left open
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Sizes to build, in tokens, rows and slots, and what they take on one rank."""

    budget: int  # bytes
    page_size: int
    dtype: str
    tp: int
    window: int
    full_tokens: int  # size of the full pool; 0 when every layer has a window
    swa_tokens: int  # size of the window pool; 0 without one
    rows: int  # rows of the request table, the padding row not counted
    row_width: int  # tokens per row
    state_slots: int  # recurrent state slots, the padding slot not counted
    bytes: Mapping[str, int]  # of every part that is built
    step_bytes: int  # what one page more of every pool would add

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is built; at most the budget."""
        return sum(self.bytes.values())

    @property
    def tokens(self) -> int:
        """Tokens that requests may hold together."""
        return self.full_tokens or self.swa_tokens

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size

    def concurrent(self, context_len: int) -> int:
        """Requests of `context_len` tokens that fit at once, prefixes not shared."""
        need = ceil_div(context_len, self.page_size)
        fits = [self.rows]
        if self.full_tokens:
            fits.append(self.full_tokens // self.page_size // need)
        if self.swa_tokens:  # a window may begin and end inside a page
            fits.append(self.swa_tokens // self.page_size // min(need, ceil_div(self.window, self.page_size) + 1))
        if self.state_slots:
            fits.append(self.state_slots)
        return min(fits)


def budget_bytes(budget: int | float, free_bytes: int | None = None) -> int:
    """`budget` in bytes: an int as it is, a float in (0, 1] as a share of the device's free memory.

    free_bytes: that memory; None asks the first device. ValueError for a budget of 0 or below, a share above 1, or a
    device that does not tell its memory (the CPU backend).
    """
    if isinstance(budget, int) and not isinstance(budget, bool):
        if budget <= 0:
            raise ValueError(f"the budget is {budget} bytes; pass a positive number of bytes.")
        return budget
    if not isinstance(budget, float) or not 0 < budget <= 1:
        raise ValueError(f"the budget is {budget!r}; pass bytes as an int, or a share of free memory in (0, 1].")
    free = free_bytes
    if free is None:
        import jax

        device = jax.devices()[0]
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"{device} does not tell its memory, so a share of {budget} means nothing; pass the budget in bytes."
            )
        free = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return int(budget * free)


def plan_pools(
    budget: int | float,
    model: ModelShape,
    *,
    page_size: int = 16,
    dtype: Any = "bfloat16",
    max_context_len: int | None = None,
    max_running: int | None = None,
    tp: int = 1,
    swa_ratio: float = 0.8,
    state_slots: int | None = None,
    slots_per_request: int = 1,
    state_ratio: float = 0.9,
    need_sort: bool = False,
    width_align: int = 1,
    extra_columns: int = 0,
    free_bytes: int | None = None,
) -> PoolPlan:
    """The largest pools that `budget` holds (see `budget_bytes`), on one of `tp` tensor-parallel ranks.

    max_context_len: tokens of a request (None: the model's); extra_columns: row columns beyond it
    (`req_to_token_extra_context_len`). max_running: rows of the request table (None: SGLang's rule, but never more
    than a twentieth of the budget). swa_ratio: window-side tokens per full token. state_slots: recurrent slots (None:
    state bytes : attention bytes = state_ratio, at most slots_per_request for each row). need_sort, width_align: as
    the allocator and the pools will be created.
    ValueError when not one request could be served: no page at all, or a window pool below window + page.
    """
    given = budget_bytes(budget, free_bytes)
    page, ranks = positive("page_size", page_size), positive("tp", tp)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or dtype.__name__
    if name not in ITEMSIZE:
        raise ValueError(f"dtype {name!r} came; pools hold {', '.join(ITEMSIZE)}.")
    size = ITEMSIZE[name]
    full_cell, swa_cell = (
        sum(g.bytes_per_token(size, ranks, width_align) for g in model.of(k)) for k in (FULL, WINDOW)
    )
    slot_bytes = sum(g.bytes_per_slot(size, ranks) for g in model.of(STATE))
    ratio = 1.0 if not full_cell else swa_ratio if swa_cell else 0.0
    if not 0 <= ratio <= 1 or not 0 <= swa_ratio <= 1:
        raise ValueError(f"swa_ratio is {swa_ratio}; a window pool of 0 to 1 tokens per full token was expected.")
    width = positive("max_context_len", model.context_len if max_context_len is None else max_context_len)
    width += extra_columns

    def parts(pages: int, rows: int, slots: int) -> dict[str, int]:
        """Bytes of everything, for `pages` pages of the main pool."""
        tokens = pages * page
        out: dict[str, int] = {}
        if full_cell:
            out["full pool"] = (tokens + page) * full_cell
            out["allocator"] = allocator_bytes(pages, page, need_sort)
        if swa_cell:
            swa = round_down(int(tokens * ratio), page)
            out["window pool"] = (swa + page) * swa_cell
            out["window allocator"] = allocator_bytes(swa // page, page, need_sort)
            if full_cell:
                out["window mapping"] = 4 * (tokens + page + 1)
        out["request table"] = request_table_bytes(rows, width)
        if slot_bytes:
            out["state slots"] = (slots + 1) * slot_bytes
            out["state allocator"] = allocator_bytes(slots, 1, False) + 4 * (rows + 1)
        return out

    def largest(rows: int, slots: int) -> int:
        """Pages of the main pool: the most that the budget holds, 0 when not one fits."""
        low, high = 0, min(given // max(1, (full_cell or swa_cell) * page), INT32_MAX // page - 1) + 1
        while high - low > 1:  # parts() grows with pages, so a binary search finds the last that fits
            mid = (low + high) // 2
            low, high = (mid, high) if sum(parts(mid, rows, slots).values()) <= given else (low, mid)
        return low

    rows = _rows(max_running, given, width, lambda: largest(1, 0) * page)
    slots = 0
    if slot_bytes:
        share = int(given * state_ratio / (1 + state_ratio)) // slot_bytes - 1
        slots = state_slots if state_slots is not None else min(share, rows * slots_per_request)
        if slots < slots_per_request:
            raise ValueError(
                f"{given} bytes hold {max(slots, 0)} state slots of {slot_bytes} bytes, but a request needs "
                f"{slots_per_request}; give more memory, or state_slots."
            )
        rows = min(rows, slots // slots_per_request)
    pages = largest(rows, slots)
    if pages < 1:
        least = sum(parts(1, rows, slots).values())
        raise ValueError(
            f"a budget of {given} bytes holds no page: {rows} rows of {width} tokens and one page of {page} take "
            f"{least}; give more memory, fewer rows (max_running), or a shorter context (max_context_len)."
        )
    swa = 0
    if swa_cell:
        swa = swa_tokens(pages * page, ratio=ratio, window=model.window, page_size=page)
    built, more = parts(pages, rows, slots), parts(pages + 1, rows, slots)
    return PoolPlan(
        budget=given,
        page_size=page,
        dtype=name,
        tp=ranks,
        window=model.window,
        full_tokens=pages * page if full_cell else 0,
        swa_tokens=swa,
        rows=rows,
        row_width=width,
        state_slots=slots,
        bytes=built,
        step_bytes=sum(more.values()) - sum(built.values()),
    )


def allocator_bytes(pages: int, page_size: int, need_sort: bool = False) -> int:
    """Bytes of an allocator's leaves: free list, witness, staged list, counters, all int32."""
    counters = 4 if page_size == 1 else 3  # the token allocator's ring has a head
    return 4 * (pages + (pages + 1) + (pages if need_sort else 0) + counters)


def request_table_bytes(rows: int, width: int) -> int:
    """Bytes of a ledger without its allocator: table, free list, witness, generations, counters, lengths."""
    return 4 * ((rows + 1) * width + rows + 2 * (rows + 1) + 2 + 3 * (rows + 1))


def _rows(max_running: int | None, budget: int, width: int, tokens_alone) -> int:
    if max_running is not None:
        return positive("max_running", max_running)
    affordable = max(1, budget // TABLE_SHARE // (4 * width))
    return max(1, min(max_num_reqs(token_capacity=tokens_alone(), context_len=width), affordable))
