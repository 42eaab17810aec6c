"""Backend: the device side that a scheduler drives. Two programs, and what happens to rows between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from kvjax.serving.request import Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of prefill: tokens [start, end) of a request that has a row."""

    request: Request
    start: int
    end: int

    @property
    def last(self) -> bool:
        """The chunk ends the prefill, so it yields a token."""
        return self.end == self.request.goal


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one program did, fetched once."""

    free_pages: int  # the device's count
    chunk_tokens: np.ndarray  # i32[chunks], the next token of each; read where the chunk was the last
    decode_tokens: np.ndarray  # i32[steps, rows]
    decode_counts: np.ndarray  # i32[rows], tokens of each row; fewer than steps where the row came to its end
    closed: Collection[Request] = ()  # ended ones whose row the program gave back itself, with every page of it


class Backend(Protocol):
    """Rows, pages and programs on the device. The scheduler counts pages; `run` tells what the device counts."""

    page_size: int
    num_pages: int
    num_rows: int
    row_width: int  # tokens

    def open_row(self, request: Request, slots: np.ndarray) -> int:
        """A new row that begins with `slots` (i32[n], whole pages of the prefix tree). Returns the row."""
        ...

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request], steps: int, first_finish: bool) -> Outcome:
        """The chunks, and up to `steps` decode steps of the others.

        first_finish: stop where the first of them ends; otherwise such a row takes no part in later steps. The program
        closes rows that end (and says so in the outcome), or leaves them to the scheduler, as with a prefix tree.
        """
        ...

    def row_slots(self, row: int, n: int) -> np.ndarray:
        """i32[n]: the slots of the row's first n tokens."""
        ...

    def share_row(self, row: int, end: int, start: int, slots: np.ndarray) -> None:
        """The tree owns the row's tokens before `end` from now on; those from `start` lie in `slots` (may be empty)."""
        ...

    def close_row(self, row: int, end: int) -> None:
        """Give the row back, with its pages from token `end` on; those before are the tree's."""
        ...

    def release(self, pages: np.ndarray) -> None:
        """Give back pages (i32[n]) that the tree evicted or did not take over."""
        ...
