"""Cell sizes: bytes that one token takes over all layers of a kind. Host integers, SGLang's rules."""

from __future__ import annotations

from kvjax.layout import ceil_div, positive

DSA_INDEX_BYTES = 128 + 4  # indexer key of one token in fp8, and its float32 scale
PACKED_GROUP = 128  # fp8 values that share a scale in a packed latent


def kv_heads_per_rank(total_kv_heads: int, tp_size: int = 1, dcp_size: int = 1) -> int:
    """KV heads that one rank stores: an even split, and at least one (then several ranks hold the same head)."""
    return max(1, positive("total_kv_heads", total_kv_heads) // max(1, tp_size // dcp_size))


def mha_cell_size(
    *,
    num_layers: int,
    total_kv_heads: int,
    head_dim: int,
    itemsize: int,
    v_head_dim: int | None = None,
    tp_size: int = 1,
    dcp_size: int = 1,
) -> int:
    """K and V of one token, all layers, on one rank."""
    width = head_dim + (head_dim if v_head_dim is None else v_head_dim)
    return kv_heads_per_rank(total_kv_heads, tp_size, dcp_size) * width * num_layers * itemsize


def mla_kv_cache_dim(
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    dtype: str = "bfloat16",
    dsa: bool = False,
    prefill_backend: str = "flashmla",
    decode_backend: str = "flashmla",
) -> int:
    """Stored columns of a latent: rank + rope; a packed row's bytes for sparse attention in fp8.

    Packed: fp8 values, a float32 scale per 128 of them, the rope part in bf16. Backends that read plain fp8
    (trtllm, or tilelang on both sides) keep the plain latent.
    """
    plain = kv_lora_rank + qk_rope_head_dim
    backends = {prefill_backend, decode_backend}
    if not dsa or not dtype.startswith("float8") or "trtllm" in backends or backends == {"tilelang"}:
        return plain
    return kv_lora_rank + ceil_div(kv_lora_rank, PACKED_GROUP) * 4 + qk_rope_head_dim * 2


def mla_cell_size(*, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, itemsize: int) -> int:
    """The latent of one token, all layers; every rank holds all of it."""
    return (kv_lora_rank + qk_rope_head_dim) * num_layers * itemsize


def dsa_index_cell_size(*, indexed_layers: int, pooled: int = 1, dcp_size: int = 1) -> int:
    """Indexer keys and scales of one token; pooled: tokens that share an index entry."""
    return ceil_div(DSA_INDEX_BYTES, pooled) * indexed_layers * dcp_size


def with_draft_layers(cell_size: int, num_layers: int, draft_layers: int) -> int:
    """A cell that also counts the layers of a draft model of the same shape (EAGLE)."""
    return cell_size + cell_size * draft_layers // positive("num_layers", num_layers)


def buffer_span(*, tokens_per_row: int, row_bytes: int, page_size: int, num_tokens: int) -> tuple[int, int, int]:
    """(bytes of `num_tokens`, bytes with the padding page, bytes of a page's whole rows) of a buffer whose rows hold
    `tokens_per_row` tokens each; rows are never split."""
    return (
        ceil_div(num_tokens, tokens_per_row) * row_bytes,
        ceil_div(num_tokens + page_size, tokens_per_row) * row_bytes,
        page_size // tokens_per_row * row_bytes,
    )
