"""Capacity of an allocator with a window side, answered on the host for both sides (SGLang: the PrefillBudget's rule).

What a request may hold on the window side is `kvjax.sizing.estimate_swa_kv_tokens`; with a ring it is the ring.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.allocators.capacity import CapacityHooks
from kvjax.layout import positive, round_up

if TYPE_CHECKING:
    from kvjax.prefix import RadixCache


@dataclasses.dataclass(frozen=True)
class SWACapacity(CapacityHooks):
    """What both sides can still give, in tokens, as Python ints: a mirror of the device's counts."""

    full_available: int
    swa_available: int
    page_size: int
    full_size: int  # tokens that the sides hold at most
    swa_size: int
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
        full, page_size = int(allocator.full_available_size()), allocator.page_size
        return cls(full, swa, page_size, allocator.size_full, allocator.size_swa, ring)

    def __post_init__(self) -> None:
        positive("page_size", self.page_size)
        for side, now, size in (
            ("full", self.full_available, self.full_size),
            ("window", self.swa_available, self.swa_size),
        ):
            if not 0 <= now <= size:
                raise ValueError(
                    f"a mirror of {now} available {side} tokens came for a side of {size}; some page was given back "
                    "twice or taken without being there."
                )

    def available_size(self) -> int:
        """Tokens that both sides can take; with a ring the full side alone, for a row has its ring already."""
        return self.full_available if self.ring_cost is not None else min(self.full_available, self.swa_available)

    @property
    def pool_tokens(self) -> int:
        return self.full_size

    def request_slot_reserve(self, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Window slots that a request takes with its row: a ring, once; 0 where they are taken page by page."""
        del prefill_tokens
        return 0 if self.ring_cost is None or has_req_pool_slot else self.ring_cost

    def prealloc_ceiling_fits(self, full: int, swa: int) -> bool:
        """Whether the two sides could ever hold so many tokens."""
        return full <= self.full_size and swa <= self.swa_size

    def evict_to_free_tokens(self, tree: RadixCache | None, tokens: int) -> tuple[SWACapacity, list[np.ndarray]]:
        """As the base says, until both sides have them: a leaf of the tree frees its full slots, and its window slots
        where it still has them."""
        now, pieces = self, []
        while tree is not None and (short := tokens - now.available_size()) > 0 and tree.evictable:
            live, gone = tree.swa_evictable, tree.evict(short)
            pieces += gone
            swa = 0 if self.ring_cost is not None else live - tree.swa_evictable
            now = dataclasses.replace(
                now,
                full_available=now.full_available + sum(map(len, gone)),
                swa_available=now.swa_available + swa,
            )
        return now, pieces

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
