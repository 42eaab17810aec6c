"""Request: a prompt and how its answer is drawn; and which requests no engine of some size could serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.layout import ceil_div, positive
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
