"""Request: what a caller asks for, and where the scheduler stands with it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import numpy as np

from kvjax.layout import ceil_div, host_int32, round_down, round_up
from kvjax.prefix import Cursor, Node, RadixCache

WAITING, RUNNING, FINISHED, ABORTED = "waiting", "running", "finished", "aborted"


class Request:
    """One request. Its key-value entries are there for the first `done` tokens; `goal` of them are to be prefilled.

    prompt: i32[n], token ids. max_new_tokens: output tokens, at least 1. eos: ids that end the output early.
    extra_key: namespace of the prefix cache. info: the caller's own, for its backend. ValueError for an empty prompt or
    no output.
    """

    __slots__ = (
        "_shared", "arrival", "cached", "cached_first", "cursor", "done", "eos", "extra_key", "finishes", "goal", "ids",
        "info", "length", "max_new_tokens", "node", "passed_over", "prompt_len", "retractions", "rid", "row", "state"
    )  # fmt: skip

    def __init__(
        self,
        rid: Hashable,
        prompt: np.ndarray,
        max_new_tokens: int,
        *,
        eos: Collection[int] = (),
        extra_key: Hashable = None,
        info: Any = None,
    ):
        tokens = host_int32(f"the prompt of request {rid}", prompt)
        if not len(tokens) or max_new_tokens < 1:
            raise ValueError(
                f"request {rid} has a prompt of shape {tokens.shape} and {max_new_tokens} output tokens; at least one "
                "of each was expected."
            )
        self.rid, self.extra_key, self.eos, self.info = rid, extra_key, frozenset(eos), info
        self.prompt_len, self.max_new_tokens = len(tokens), int(max_new_tokens)
        self.ids = np.empty(len(tokens) + self.max_new_tokens, np.int32)
        self.ids[: len(tokens)] = tokens
        self.length = len(tokens)  # known tokens: the prompt and what was generated
        self.goal = self.length  # tokens that prefill computes; the next one comes out of it
        self.done = 0  # tokens whose entries are in the pool
        self.cached = 0  # of these, the first ones belong to the prefix tree; a multiple of the page
        self.cached_first = 0  # tokens that did not have to be computed at the first admission
        self.row = 0
        self.node: Node | None = None  # locked in the tree
        self.cursor: Cursor | None = None
        self.state = WAITING
        self.arrival = 0  # rank among all requests
        self.passed_over = 0  # steps that admitted a later one instead
        self.retractions = 0
        self.finishes = -1  # finished requests when it was retracted; -1: never was, or may come back
        self._shared: dict[Request, int] = {}

    @property
    def output(self) -> np.ndarray:
        """i32[...]: generated tokens."""
        return self.ids[self.prompt_len : self.length]

    @property
    def remaining(self) -> int:
        """Output tokens still to come, at most."""
        return self.prompt_len + self.max_new_tokens - self.length

    @property
    def total(self) -> int:
        """Tokens whose entries the request needs at most: the last output token's are never written."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def prefilling(self) -> bool:
        return self.done < self.goal

    def left(self) -> int:
        """Tokens still to prefill."""
        return max(0, self.goal - self.done)  # decoding goes past the goal

    def owned_pages(self, page_size: int) -> int:
        """Pages that go back when the row does."""
        return ceil_div(self.done, page_size) - self.cached // page_size

    def reserve(self, page_size: int, ratio: float) -> int:
        """Tokens that admission keeps for the running request: its prefill, a page, a share of its output."""
        return round_up(self.left(), page_size) + page_size + int(ratio * self.remaining)

    def key(self) -> np.ndarray:
        """What to look up: at least one token must be computed, so the last known one is left out."""
        return self.ids[: self.length - 1]

    def cached_now(self, tree: RadixCache | None) -> int:
        """Tokens of a waiting request that the tree has at this moment; nothing is stamped or split."""
        if tree is None:
            return 0
        if self.cursor is None or len(self.cursor.key) != self.length - 1:
            self.cursor = Cursor(tree, self.key(), self.extra_key)
        return self.cursor.length()

    def shared_with(self, other: Request, page_size: int) -> int:
        """Tokens, in whole pages, that this waiting request could take over once `other` is prefilled."""
        if self.extra_key != other.extra_key:
            return 0
        common = self._shared.get(other)
        if common is None:
            n = min(self.length, other.goal)
            if n < page_size or self.ids[0] != other.ids[0]:
                common = 0
            else:
                same = self.ids[:n] == other.ids[:n]
                common = n if same.all() else int(same.argmin())
            self._shared[other] = common
        return round_down(min(common, self.length - 1, other.goal), page_size)

    def set_back(self, finishes: int) -> None:
        """Forget the row: the request waits again, and prefills its prompt and its output so far."""
        self.state, self.row, self.node = WAITING, 0, None
        self.goal, self.done, self.cached = self.length, 0, 0
        self.finishes, self.retractions = finishes, self.retractions + 1
        self._shared.clear()
