"""Capacity of an allocator with a window side, answered on the host for both sides (SGLang: the PrefillBudget's rule).

What a request may hold on the window side is `kvjax.sizing.estimate_swa_kv_tokens`; with a ring it is the ring.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.layout import positive, round_up


@dataclasses.dataclass(frozen=True)
class SWACapacity:
    """What both sides can still give, in tokens, as Python ints: a mirror of the device's counts."""

    full_available: int
    swa_available: int
    page_size: int
    ring_cost: int | None = None  # window slots that every row costs; None: they are taken page by page

    @classmethod
    def of(cls, allocator: Any, free_rows: int | None = None) -> SWACapacity:
        """The mirror of an allocator, fetched from the device; free_rows: of the request table, with a ring.

        ValueError for a ring without free_rows: its capacity is counted in rows.
        """
        ring = getattr(allocator, "ring", None)
        if ring is None:
            swa = int(allocator.swa_available_size())
        elif free_rows is None:
            raise ValueError("a ring's capacity is counted in rows: pass free_rows=table.available_size().")
        else:
            swa = int(free_rows) * ring
        return cls(int(allocator.full_available_size()), swa, allocator.page_size, ring)

    def __post_init__(self) -> None:
        positive("page_size", self.page_size)
        if self.full_available < 0 or self.swa_available < 0:
            raise ValueError(
                f"a mirror of {self.full_available} full and {self.swa_available} window tokens is short of something; "
                "a page was taken that was not there."
            )

    def available_size(self) -> int:
        """Tokens that both sides can take; with a ring the full side alone, for a row has its ring already."""
        return self.full_available if self.ring_cost is not None else min(self.full_available, self.swa_available)

    def admits(
        self,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_evictable: int = 0,
        swa_evictable: int = 0,
        full_kept: int = 0,
        swa_kept: int = 0,
        new_row: bool = True,
    ) -> bool:
        """Whether a request may start that can come to hold so many tokens on each side.

        evictable: what the prefix tree would give; kept: what is promised to others. Strictly less than what is there
        (SGLang's rule), except that a ring is charged whole, once, to a new row, and may be the last one.
        """
        full = full_tokens < self.full_available + full_evictable - full_kept
        if self.ring_cost is not None:
            return full and (self.ring_cost if new_row else 0) <= self.swa_available - swa_kept
        return full and swa_tokens < self.swa_available + swa_evictable - swa_kept

    def decodes(self, opened: int) -> bool:
        """Whether a step that opens so many pages finds them, whatever it releases first."""
        return round_up(opened * self.page_size, self.page_size) <= self.available_size()
