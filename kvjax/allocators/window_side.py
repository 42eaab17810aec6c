"""What allocators for window layers have in common: questions that several of them answer in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp


class FullSide:
    """Questions about the full side, for an allocator whose `full_attn_allocator` keeps it."""

    if TYPE_CHECKING:
        full_attn_allocator: Any

    @property
    def free_pages(self) -> jax.Array:
        """i32[]: pages of the full side that can be handed out at once."""
        return self.full_attn_allocator.free_pages

    @property
    def staged_pages(self) -> jax.Array:
        """i32[]: freed pages of the full side that wait for a merge."""
        return self.full_attn_allocator.staged_pages

    def is_free(self, pages: jax.Array) -> jax.Array:
        """bool, shape of pages: the full page is free or staged."""
        return self.full_attn_allocator.is_free(pages)

    def owns_free_marks(self) -> tuple[jax.Array, jax.Array]:
        """The full side's, see PagedTokenToKVPoolAllocator."""
        return self.full_attn_allocator.owns_free_marks()


class PagedWindow:
    """Answers to kvjax.window of an allocator that keeps window tokens in pages and translates slots to them."""

    releases_window = True  # pages out of the window go back

    if TYPE_CHECKING:

        def translate(self, loc: jax.Array) -> jax.Array: ...

    def window_loc(self, rows: jax.Array, positions: jax.Array, loc: jax.Array) -> jax.Array:
        """i32, shape of loc: slots of tokens (row, position, full slot) in the window layers' pool."""
        return self.translate(loc)

    def window_there(self, first: jax.Array, window_from: jax.Array, allocated: jax.Array) -> jax.Array:
        """bool[b]: a row that holds [window_from, allocated) still has its tokens from `first` on."""
        return first >= window_from

    def may_begin(self, first_loc: jax.Array) -> jax.Array:
        """bool[b]: a new row may begin with a prefix whose window starts at slot first_loc: it has a partner."""
        return self.translate(first_loc) > 0

    def window_start(self, prefix: jax.Array, edge: jax.Array) -> jax.Array:
        """i32[b]: from where on a new row with a prefix holds its tokens; no page below the edge is needed."""
        return edge

    def overwritten(self, written: jax.Array) -> jax.Array:
        """i32[b]: tokens below are lost once `written` tokens are there: none."""
        return jnp.zeros_like(written)
