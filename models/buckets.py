"""Buckets: the few shapes that prefill programs are compiled for, and which of them serves what is left to prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.layout import positive


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes [lanes, tokens] that extend programs are compiled for, and which of them serves a chunk."""

    shapes: tuple[tuple[int, int], ...]
    overhead: int = 24  # what one more program costs beside its tokens (reading the weights), in tokens

    def __post_init__(self):
        for lanes, width in self.shapes:
            positive("lanes of a bucket", lanes)
            positive("tokens of a bucket", width)
        if not self.shapes:
            raise ValueError("an engine needs at least one prefill bucket, (lanes, tokens).")
        object.__setattr__(self, "shapes", tuple(sorted(set(self.shapes))))

    @classmethod
    def default(cls, batch: int, chunk: int) -> Buckets:
        """Long prompts go one by one in chunks of `chunk`, ends and short prompts in quarters of it, alone or together.

        A lane costs its whole chunk, used or not; so the only bucket with many lanes is short.
        """
        short = max(1, chunk // 4)
        return cls(((1, chunk), (1, short), (batch, short)))

    def choose(self, remaining: Sequence[int]) -> tuple[tuple[int, int], list[int]]:
        """The bucket that writes most tokens for its cost, and the lanes (indices of `remaining`) to put into it.

        remaining: tokens that each lane has still to prefill, all at least 1. Lanes with most left go first, since
        all have to be done before decode goes on.
        """
        order = sorted(range(len(remaining)), key=lambda i: -remaining[i])

        def gain(shape: tuple[int, int]) -> float:
            lanes, width = shape
            return sum(min(remaining[i], width) for i in order[:lanes]) / (self.overhead + lanes * width)

        best = max(self.shapes, key=gain)
        return best, order[: best[0]]
