"""Admission: who of the waiting requests starts now. Host arithmetic, no state of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice

from kvjax.allocators.capacity import Capacity
from kvjax.layout import round_up
from kvjax.prefix import RadixCache
from kvjax.serving.request import Request

LOOK_AHEAD = 128  # waiting requests that are compared
PATIENCE = 64  # steps after which a passed-over request goes first


@dataclasses.dataclass(frozen=True)
class Rule:
    """How much is kept back for what is admitted. reserve_ratio: of the output still to come, 0 to 1."""

    page_size: int
    reserve_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_ratio <= 1:
            raise ValueError(f"reserve_ratio is {self.reserve_ratio}; a share of the output in [0, 1] was expected.")

    def reserved(self, running: Sequence[Request]) -> int:
        """Tokens kept for the running requests."""
        return sum(r.reserve(self.page_size, self.reserve_ratio) for r in running)

    def fits(
        self, request: Request, running: Sequence[Request], capacity: Capacity, tree: RadixCache | None, finishes: int
    ) -> bool:
        """Whether the request may start beside the running ones.

        Its cached prefix counts as taken out of what can be evicted: a lock will protect it.
        """
        cached, unlocked = (0, 0) if tree is None else tree.peek(request.key(), request.extra_key)
        room = capacity.available_size() + (0 if tree is None else tree.evictable) - unlocked
        extend = round_up(request.length - cached, self.page_size)
        if not running:  # nobody will ever give room: what fits must start
            return extend <= room
        kept = self.reserved(running) + self.page_size
        if request.finishes == finishes:  # retracted, and nobody has finished since: only with all that it may need
            return kept + round_up(request.total - cached, self.page_size) < room
        return kept + extend + int(self.reserve_ratio * request.remaining) < room


def in_order(waiting: Sequence[Request], tree: RadixCache | None) -> list[Request]:
    """The first waiting requests: passed over for long first, then the longest cached prefix, then arrival."""
    first = list(islice(waiting, LOOK_AHEAD))
    rank = {r: i for i, r in enumerate(first)}
    return sorted(first, key=lambda r: (r.passed_over < PATIENCE, -r.cached_now(tree), rank[r]))


def candidates(
    waiting: Sequence[Request], running: Sequence[Request], tree: RadixCache | None, page_size: int
) -> Iterator[Request]:
    """`in_order`, without those whose uncached prefix another request is just prefilling: they wait for it.

    `running` is read as it grows: a request admitted a moment ago is one to wait for, too.
    """
    for r in in_order(waiting, tree):
        cached = r.cached_now(tree)
        if tree is None or not any(p.prefilling and r.shared_with(p, page_size) > cached for p in running):
            yield r
