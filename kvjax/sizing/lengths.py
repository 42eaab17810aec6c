"""Lengths per decode step: how many slots a step may write, how far a row may grow, how many pages that opens.

SGLang's rules (speculative decoding writes draft tokens ahead of the committed ones), as host integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvjax.layout import ceil_div, positive, round_up


def alloc_len_per_decode(
    *,
    page_size: int,
    speculative: bool = False,
    has_draft_kv: bool = False,
    steps: int = 0,
    topk: int = 1,
    draft_tokens: int = 0,
    uno: bool = False,
    dcp_size: int = 1,
) -> int:
    """Slots that one decode step of one request may write (SGLang: get_alloc_len_per_decode).

    steps, topk: depth and width of the draft tree; draft_tokens: tokens verified per step; has_draft_kv: the draft
    model keeps a KV cache of its own. uno: SGLang's UNO speculation, one token more than drafted. dcp_size:
    context-parallel ranks; the allocator's page is page_size * dcp_size. 1 without speculation.
    """
    page = positive("page_size", page_size) * positive("dcp_size", dcp_size)
    if not speculative:
        return 1
    if uno:
        return draft_tokens + 1
    if page == 1 or topk == 1 or not has_draft_kv:
        return max(steps * topk, draft_tokens)
    # Every branch of the tree but the first starts with a copy of the last, partly filled page.
    return max(round_up(page - 1 + steps, page) * topk, draft_tokens)


def alloc_reserve_per_decode(**how: int | bool) -> int:
    """Slots kept ahead of the committed tokens: two steps' worth, for a step that overlaps the next one."""
    # `how` is handed on as it is: the callee names and checks each argument, which pyright can not see.
    return 2 * alloc_len_per_decode(**how)  # pyright: ignore[reportArgumentType]


def req_to_token_extra_context_len(
    *, page_size: int, speculative: bool = False, draft_tokens: int = 0, uno: bool = False, dcp_size: int = 1, **how
) -> int:
    """Columns that a row of the request table needs beyond the context length."""
    extra = 4 + draft_tokens
    page = page_size * dcp_size
    if speculative and (page > 1 or uno):
        reserve = alloc_reserve_per_decode(
            page_size=page_size, speculative=True, draft_tokens=draft_tokens, uno=uno, dcp_size=dcp_size, **how
        )
        extra = max(extra, reserve + page - 1)
    return extra


def spec_decode_alloc_len_per_request(
    *,
    page_size: int,
    speculative_num_steps: int,
    speculative_eagle_topk: int,
    speculative_num_draft_tokens: int,
) -> int:
    """Slots that a speculating request holds beyond its tokens, for admission; not the same as a step's length."""
    steps, topk, draft, page = (
        speculative_num_steps,
        speculative_eagle_topk,
        speculative_num_draft_tokens,
        positive("page_size", page_size),
    )
    if page == 1:
        return max(steps * topk, draft)
    branch = round_up(steps if topk == 1 else steps + page, page) * topk
    return max(branch, round_up(draft, page))


def page_aligned_decode_alloc_lens(
    committed: Sequence[int], allocated: Sequence[int], *, reserve: int, page_size: int
) -> tuple[list[int], list[int], int]:
    """(allocated tokens now, allocated tokens after, new tokens in all) of a decode that keeps `reserve` slots ahead.

    Whole pages are recorded, because whole pages are taken: a length that ends inside a page would leave its tail to
    no record, and nobody would give it back.
    """
    if len(committed) != len(allocated):
        raise ValueError(
            f"{len(committed)} committed and {len(allocated)} allocated lengths came; one of each per request."
        )
    page = positive("page_size", page_size)
    after = [max(have, round_up(done + reserve, page)) for done, have in zip(committed, allocated, strict=True)]
    return list(allocated), after, sum(after) - sum(allocated)


def num_new_pages(prefix_lens: Iterable[int], seq_lens: Iterable[int], *, page_size: int) -> int:
    """Pages that extending each request from its prefix to its length opens.

    Pages and not tokens: every request fills pages of its own, and one that grows inside its last page needs none.
    """
    page = positive("page_size", page_size)
    return sum(ceil_div(s, page) - ceil_div(p, page) for p, s in zip(prefix_lens, seq_lens, strict=True))


def num_new_pages_decode(seq_lens: Iterable[int], *, page_size: int) -> int:
    """Pages that one decode step opens; seq_lens already include the new token, 0 is a lane not in use."""
    page = positive("page_size", page_size)
    return sum(s > 0 and (s - 1) % page == 0 for s in seq_lens)


def max_new_tokens_for_memory(*, input_tokens: int, max_new_tokens: int, token_capacity: int, page_size: int) -> int:
    """Output tokens that still fit a pool of `token_capacity`, if the request had it alone, one page kept back."""
    return max(0, min(max_new_tokens, token_capacity - round_up(input_tokens, page_size) - page_size - 1))
