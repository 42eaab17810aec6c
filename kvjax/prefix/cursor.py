"""Cursor: how much of a waiting request's prefix is cached, kept up to date at almost no cost.

A scheduler asks this of every waiting request in every step. A node's end never moves (a split cuts off its upper
part), and only leaves are evicted; so the last fully matched node stays a valid place to walk on from while it lives.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvjax.prefix.radix import Node, RadixCache


class Cursor:
    """A remembered `peek` of one key. For window and recurrent trees it peeks anew after every change."""

    __slots__ = ("_anchor", "_depth", "_length", "_version", "extra_key", "key", "tree")

    def __init__(self, tree: RadixCache, key: np.ndarray, extra_key: Hashable = None):
        self.tree, self.key, self.extra_key = tree, key, extra_key
        self._anchor: Node | None = None
        self._depth = self._length = 0
        self._version = -1

    def length(self) -> int:
        """Cached tokens of the key, what `tree.peek(key).length` says."""
        tree = self.tree
        if self._version == tree.version:
            return self._length
        if tree.window or tree.recurrent:
            self._length = tree.peek(self.key, self.extra_key).length
        else:
            if self._anchor is None or self._anchor.parent is None:
                self._anchor, self._depth = None, 0
            self._anchor, self._depth, self._length = tree.walk_on(self.key, self.extra_key, self._anchor, self._depth)
        self._version = tree.version
        return self._length
