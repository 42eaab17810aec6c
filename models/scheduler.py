"""What the host decides between two programs: the bucket of a prefill chunk, who is admitted, who is retracted.

Plain Python; nothing here touches the device. The books are the host's mirror of the ledger: they know every count
from lengths alone, and `Books.check` compares them with what each program reports.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from kvjax.layout import ceil_div, positive
from models.lanes import Report
from models.programs import Shapes


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how its answer is drawn. Raises ValueError for settings that mean nothing."""

    prompt: tuple[int, ...]  # token ids, at least one
    max_new_tokens: int = 64  # answer tokens at most, the end-of-sequence token included
    temperature: float = 0.0  # 0: the most likely token each time
    top_k: int = 0  # draw among the k most likely; 0: all
    top_p: float = 1.0  # draw among the most likely whose probability reaches p; 1: all
    seed: int = 0  # with the position of each token, all that the draw depends on
    ignore_eos: bool = False  # go on to max_new_tokens whatever is drawn

    def __post_init__(self):
        object.__setattr__(self, "prompt", tuple(int(token) for token in self.prompt))
        positive("max_new_tokens", self.max_new_tokens)
        if not self.prompt:
            raise ValueError("a prompt has no tokens; give at least one, for example the begin token.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; 1 keeps every token.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or a number of tokens, got {self.top_k}.")
        if not -(2**31) <= self.seed < 2**31:
            raise ValueError(f"seed must fit 32 bits, got {self.seed}; take it modulo 2**31.")

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV is written at most: the last token of an answer never is."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclasses.dataclass
class Running:
    """A request on its way: queued, in prefill, or in decode."""

    index: int  # place of the request in the caller's list; earlier ones are served first
    request: Request
    answer: list[int] = dataclasses.field(default_factory=list)
    row: int = 0  # of the ledger; 0: none yet
    written: int = 0  # tokens whose KV is in the row
    ended: bool = False
    retractions: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far; after a retraction all of them are prefilled again."""
        return [*self.request.prompt, *self.answer]

    @property
    def left_to_prefill(self) -> int:
        """Tokens to write before decode can go on: in decode always one, the last token, which the next step feeds."""
        return len(self.request.prompt) + len(self.answer) - self.written


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


class Books:
    """Host mirror of the ledger's counts."""

    def __init__(self, shapes: Shapes):
        self.page_size, self.total = shapes.page_size, shapes.pages
        self.free_pages, self.free_rows = shapes.pages, shapes.rows

    def pages(self, tokens: int) -> int:
        """Pages that a row of so many tokens holds."""
        return ceil_div(tokens, self.page_size)

    def grow(self, before: int, after: int) -> None:
        """A row went from `before` to `after` tokens."""
        self.free_pages -= self.pages(after) - self.pages(before)

    def give_back(self, tokens: int) -> None:
        """A row of so many tokens was released."""
        self.free_pages += self.pages(tokens)
        self.free_rows += 1

    def check(self, report: Report) -> None:
        """RuntimeError if the device counts differently, which no sound program can bring about."""
        device = (report.free_pages + report.staged_pages, report.free_rows, report.faults)
        mine = (self.free_pages, self.free_rows, 0)
        if device != mine:
            raise RuntimeError(
                f"the ledger has {device[0]} free pages, {device[1]} free rows and {device[2]} faults, but the host "
                f"expected {mine[0]}, {mine[1]} and 0; this is a bug, please report it with the requests that led here."
            )


def refuse_impossible(requests: Sequence[Request], shapes: Shapes, vocab_size: int) -> None:
    """ValueError for the first request that an empty engine of these shapes could not serve to its end."""
    for number, request in enumerate(requests, start=1):
        who, length, wanted = f"prompt {number} of {len(requests)}", len(request.prompt), request.max_new_tokens
        if length + wanted > shapes.max_context_len:
            raise ValueError(
                f"{who} has {length} tokens and asks for {wanted} more, but a row holds {shapes.max_context_len}; "
                "shorten one of them or raise max_context_len."
            )
        pages = ceil_div(request.max_kv_tokens, shapes.page_size)
        if pages > shapes.pages:
            raise ValueError(
                f"{who} may need {pages} pages for its {length} tokens and {wanted} new ones, but the whole pool has "
                f"{shapes.pages} pages of {shapes.page_size}; make the pool larger."
            )
        if not all(0 <= token < vocab_size for token in request.prompt):
            raise ValueError(f"{who} has a token id outside 0 .. {vocab_size - 1}, the vocabulary.")


class Scheduler:
    """Who waits, who runs, and in which order. First come, first served."""

    def __init__(self, shapes: Shapes, books: Books):
        self.shapes, self.books = shapes, books
        self.queue: deque[Running] = deque()
        self.running: list[Running] = []  # in order of admission, so the last is the newest

    def admit(self) -> None:
        """Start queued requests in order while lanes, rows and pages allow.

        Beside the prompt, every running request and the new one must be able to open one more page: otherwise a
        request that was just retracted would come back and be retracted again. Alone, a request always fits.
        """
        # No row is taken before the first chunk, and no page: what was promised to earlier ones counts as gone.
        promised = sum(self.books.pages(len(r.tokens)) - self.books.pages(r.written) for r in self.running)
        rows = self.books.free_rows - sum(r.row == 0 for r in self.running)
        while self.queue and rows > 0 and len(self.running) < self.shapes.batch:
            need = self.books.pages(len(self.queue[0].tokens))
            spare = len(self.running) + 1 if self.running else 0
            if promised + need + spare > self.books.free_pages:
                return
            self.running.append(self.queue.popleft())
            promised, rows = promised + need, rows - 1

    def retract(self) -> Running:
        """Take the newest request out of the running ones and put it at the head of the queue; the caller frees it."""
        if len(self.running) < 2:
            raise RuntimeError("a request that runs alone found no page, though it was checked to fit; this is a bug.")
        newest = self.running.pop()
        newest.retractions += 1
        self.queue.appendleft(newest)
        return newest
