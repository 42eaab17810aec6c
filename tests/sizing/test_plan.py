"""plan_pools against what is really built: never over the budget, and less than a page of every pool below it."""

import dataclasses
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, TokenToKVPoolAllocator
from kvjax.pools import MHATokenToKOnlyPool, MHATokenToKVPool, MLATokenToKVPool
from kvjax.sizing import LayerGroup, ModelShape, budget_bytes, default_pool_size, plan_pools, swa_tokens
from kvjax.sizing.plan import allocator_bytes, request_table_bytes

WINDOWED = ModelShape(
    "windowed",
    (
        LayerGroup(kind="full", label="attention", layers=2, heads=2, width=32),
        LayerGroup(kind="window", label="window", layers=3, heads=2, width=32),
    ),
    context_len=256,
    window=128,
)
RECURRENT = ModelShape(
    "recurrent",
    (
        LayerGroup(kind="full", label="attention", layers=2, heads=2, width=32),
        LayerGroup(kind="state", label="mamba", layers=6, conv_values=96, temporal_values=512),
    ),
    context_len=256,
)


def nbytes(make):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


def ledger_bytes(plan, need_sort=False):
    def make():
        if plan.page_size == 1:
            allocator = TokenToKVPoolAllocator.create(plan.full_tokens, need_sort)
        else:
            allocator = PagedTokenToKVPoolAllocator.create(plan.full_tokens, plan.page_size, need_sort)
        return Ledger.create(ReqToTokenPool.create(plan.rows, plan.row_width), allocator)

    return nbytes(make)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(300_000, 40_000_000),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    st.sampled_from(["mha", "mha v", "k only", "mla", "mla 128"]),
    st.booleans(),
)
def test_b60_what_is_built_fits_the_budget_and_one_page_more_would_not(budget, page_size, dtype, kind, need_sort):
    align = 1
    how: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "need_sort": need_sort}
    rows: dict[str, Any] = {"max_running": 8, "max_context_len": 512}
    shape: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16}
    latent: dict[str, Any] = {"num_layers": 3, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    if kind == "mla 128":
        align = 128
    match kind:
        case "mha":
            model, pool, more = ModelShape.mha(**shape), MHATokenToKVPool, shape
        case "mha v":
            model, pool, more = ModelShape.mha(**shape, v_head_dim=8), MHATokenToKVPool, {**shape, "v_head_dim": 8}
        case "k only":
            model, pool, more = ModelShape.mha(**shape, v_head_dim=0), MHATokenToKOnlyPool, shape
        case _:
            width = {"width": 128} if align == 128 else {}
            model, pool, more = ModelShape.mla(**latent), MLATokenToKVPool, {**latent, **width}
    plan = plan_pools(budget, model, **how, **rows, width_align=align)
    built = nbytes(lambda: pool.create(plan.full_tokens, page_size, **more, dtype=dtype)) + ledger_bytes(
        plan, need_sort
    )
    assert built == plan.total_bytes
    assert plan.total_bytes <= budget < plan.total_bytes + plan.step_bytes
    lists = 4 * (2 + need_sort)
    assert plan.step_bytes == page_size * (plan.bytes["full pool"] // (plan.full_tokens + page_size)) + lists


@pytest.mark.parametrize(
    "model", [WINDOWED, RECURRENT, ModelShape.mla(num_layers=4, kv_lora_rank=32, qk_rope_head_dim=8, indexed=True)]
)
@pytest.mark.parametrize("budget", [2_000_000, 3_141_592, 50_000_001])
def test_every_kind_uses_its_budget_to_the_last_page(model, budget):
    plan = plan_pools(budget, model, max_running=16, max_context_len=256)
    assert plan.total_bytes <= budget < plan.total_bytes + plan.step_bytes
    assert plan.full_tokens % 16 == plan.swa_tokens % 16 == 0


def test_b60_the_index_keys_are_counted():
    with_index, without = (
        plan_pools(10**8, ModelShape.mla(num_layers=4, kv_lora_rank=512, qk_rope_head_dim=64, indexed=indexed))
        for indexed in (True, False)
    )
    assert with_index.bytes["full pool"] == (with_index.full_tokens + 16) * 4 * (576 * 2 + 132)
    assert with_index.full_tokens < without.full_tokens


def test_b60_mapping_and_state_slots_are_counted_with_their_padding():
    plan = plan_pools(10**7, WINDOWED, max_running=4)
    assert plan.bytes["window mapping"] == 4 * (plan.full_tokens + 16 + 1)
    assert plan.bytes["window pool"] == (plan.swa_tokens + 16) * 3 * 2 * 32 * 2
    plan = plan_pools(10**7, RECURRENT, max_running=4, state_slots=9)
    assert plan.bytes["state slots"] == 10 * 6 * (96 * 2 + 512 * 4)


def test_rows_left_open_follow_sglang_but_never_crowd_out_the_pool():
    shape: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64}
    small = plan_pools(100_000_000, ModelShape.mha(**shape, context_len=131_072))
    assert small.bytes["request table"] <= 100_000_000 // 20 + 4 * (131_072 + 7)
    assert plan_pools(10**10, ModelShape.mha(**shape, context_len=1024)).rows == 4096


def test_b63_a_window_pool_below_window_and_page_is_refused():
    message = r"would hold 256 tokens.*window 128 \+ page 256 = 384"
    with pytest.raises(ValueError, match=message):
        swa_tokens(4096, ratio=0.1, window=128, page_size=256)
    fits = plan_pools(10**7, dataclasses.replace(WINDOWED, window=1), page_size=256, swa_ratio=0.1, max_running=4)
    assert fits.swa_tokens > 256
    with pytest.raises(ValueError, match=r"raise the ratio or the memory"):
        plan_pools(10**7, dataclasses.replace(WINDOWED, window=4096), page_size=256, swa_ratio=0.1, max_running=4)


@pytest.mark.parametrize("budget", [0, -5, 1, 5000])
def test_b63_a_budget_without_a_page_is_refused(budget):
    with pytest.raises(ValueError, match=r"holds no page|positive number of bytes"):
        plan_pools(
            budget, ModelShape.mha(num_layers=2, num_kv_heads=2, head_dim=64), max_running=1, max_context_len=128
        )
    with pytest.raises(ValueError, match=r"hold no page of 16 tokens at 1000 bytes each"):
        default_pool_size(available_bytes=budget, cell_size=1000, page_size=16)


def test_a_share_of_free_memory_is_a_budget_too():
    assert budget_bytes(0.5, free_bytes=1001) == 500
    for bad in (1.5, 0.0, -0.1, True, "80GiB"):
        with pytest.raises(ValueError, match=r"budget is"):
            budget_bytes(bad, free_bytes=1000)  # pyright: ignore[reportArgumentType]


def test_tensor_parallel_ranks_hold_at_least_one_head():
    model = ModelShape.mha(num_layers=2, num_kv_heads=2, head_dim=64)
    one, two, eight = (plan_pools(10**8, model, tp=tp, max_running=8) for tp in (1, 2, 8))
    assert two.full_tokens == eight.full_tokens > 1.9 * one.full_tokens


def test_concurrency_counts_whole_pages_windows_and_slots():
    plan = plan_pools(50_000_000, WINDOWED, max_running=1000)
    assert plan.concurrent(17) == min(1000, plan.full_tokens // 32, plan.swa_tokens // 32)
    assert plan.concurrent(100_000) == plan.full_tokens // 100_000
    assert plan_pools(50_000_000, RECURRENT, state_slots=7, max_running=1000).concurrent(16) == 7


def test_table_bytes_are_those_of_the_built_ledger():
    for rows, width, pages in ((1, 1, 1), (7, 33, 12)):
        built = nbytes(
            lambda rows=rows, width=width, pages=pages: Ledger.create(
                ReqToTokenPool.create(rows, width), PagedTokenToKVPoolAllocator.create(pages * 4, 4)
            )
        )
        assert built == request_table_bytes(rows, width) + allocator_bytes(pages, 4)
