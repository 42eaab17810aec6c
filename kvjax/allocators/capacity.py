"""Capacity: what an allocator can still give, answered on the host (SGLang: the hooks of BaseTokenToKVPoolAllocator).

The device's free count is the truth; this is its mirror: the last fetched count, plus pages that the host released,
minus pages taken, which the host knows from the lengths. A scheduler asks here and needs no type switch.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvjax.layout import positive
from kvjax.sizing.lengths import max_new_tokens_for_memory

if TYPE_CHECKING:
    from kvjax.prefix import RadixCache


class CapacityHooks(abc.ABC):
    """What a scheduler asks of the capacity of any allocator, with the answers that fit most (SGLang's base class)."""

    page_size: int  # tokens

    @property
    @abc.abstractmethod
    def pool_tokens(self) -> int:
        """Tokens of text that the whole pool holds."""

    @abc.abstractmethod
    def available_size(self) -> int:
        """Tokens that can be taken now."""

    @abc.abstractmethod
    def evict_to_free_tokens(self, tree: RadixCache | None, tokens: int) -> tuple[Self, list[np.ndarray]]:
        """Evict until `tokens` are available, or nothing is left to evict; without a tree nothing happens.

        Returns (mirror with the evicted pages free, evicted slots leaf by leaf: their device release is the caller's).
        """

    def request_slot_reserve(self, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Tokens that a request takes beyond those of its text; 0 for pools without per-request slots."""
        del has_req_pool_slot, prefill_tokens
        return 0

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, token_capacity: int | None = None
    ) -> int:
        """Output tokens that fit, if the request had everything alone: the whole pool, or `token_capacity` tokens."""
        return max_new_tokens_for_memory(
            input_tokens=input_tokens,
            max_new_tokens=max_new_tokens,
            token_capacity=self.pool_tokens if token_capacity is None else token_capacity,
            page_size=self.page_size,
        )

    def prealloc_fits(self, full: int, swa: int, full_budget_tokens: int, swa_budget_tokens: int | None = None) -> bool:
        """Whether a request of `full` and `swa` tokens fits the budgets (None: no window side)."""
        return full <= full_budget_tokens and (swa_budget_tokens is None or swa <= swa_budget_tokens)

    def prealloc_ceiling_fits(self, full: int, swa: int) -> bool | None:
        """Whether the pool could ever hold it; None: the pool sets no ceiling of its own (SGLang's base answer)."""
        del full, swa
        return None

    def translate_kv_indices_for_transfer(self, indices: np.ndarray) -> np.ndarray:
        """Slots as another machine must name them: the same ones, where slots are physical."""
        return indices

    def check_decode_capacity(self, tree: RadixCache | None, tokens: int) -> tuple[Self, list[np.ndarray], bool]:
        """Evict for `tokens`, and whether they are available then. Whole pages: pass pages x page_size."""
        now, pieces = self.evict_to_free_tokens(tree, tokens)
        return now, pieces, now.available_size() >= tokens


@dataclasses.dataclass(frozen=True)
class Capacity(CapacityHooks):
    """Free pages of one allocator, as Python ints. Methods that change it return the new mirror first."""

    num_pages: int
    page_size: int  # tokens
    free_pages: int  # on the free list or staged

    def __post_init__(self) -> None:
        positive("num_pages", self.num_pages)
        positive("page_size", self.page_size)
        if not 0 <= self.free_pages <= self.num_pages:
            raise ValueError(
                f"a mirror of {self.free_pages} free pages came for a pool of {self.num_pages}; some page was given "
                "back twice or taken without being there."
            )

    @classmethod
    def of(cls, allocator: Any) -> Capacity:
        """The mirror of any allocator, fetched from the device."""
        ps = allocator.page_size
        return cls(allocator.num_pages, ps, int(allocator.available_size()) // ps)

    def available_size(self) -> int:
        """Tokens in free pages."""
        return self.free_pages * self.page_size

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    # --- changes: the new mirror first -----------------------------------------------------------------------------

    def took(self, pages: int) -> Capacity:
        """After an allocation. ValueError when it was not there."""
        return dataclasses.replace(self, free_pages=self.free_pages - pages)

    def gave(self, pages: int) -> Capacity:
        """After a release."""
        return self.took(-pages)

    def evict_to_free_tokens(self, tree: RadixCache | None, tokens: int) -> tuple[Capacity, list[np.ndarray]]:
        short = tokens - self.available_size()
        if tree is None or short <= 0:
            return self, []
        pieces = tree.evict(short)
        return self.gave(sum(map(len, pieces)) // self.page_size), pieces
