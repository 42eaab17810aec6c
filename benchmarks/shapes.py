"""The named shapes that kernels are timed and tuned at: layers and books of a model in service."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer of a model in service: bf16, rows of equal length on scattered pages."""

    heads: int
    kv_heads: int
    dim: int
    batch: int = 64
    context: int = 4096
    page: int = 16
    new: int = 1  # queries per row, the last tokens of the context
    rank: int | None = None  # latent attention


SHAPES = {
    "Llama-3-8B decode": Shape(32, 8, 128),
    "Llama-3-8B decode, 4 rows of 32768": Shape(32, 8, 128, batch=4, context=32768),
    "Qwen3-32B decode": Shape(64, 8, 128),
    "DeepSeek-V2-Lite decode": Shape(16, 1, 576, rank=512),
    "DeepSeek-V3 decode": Shape(128, 1, 576, rank=512),
    "Llama-3-8B chunk of 512": Shape(32, 8, 128, batch=8, new=512),
    "Llama-3-8B 4 drafts": Shape(32, 8, 128, new=4),
}

# A layer's KV write: of which shape's new tokens, and the dtype of the pool.
WRITES = {
    "Llama-3-8B write": ("Llama-3-8B decode", "bfloat16"),
    "Llama-3-8B write, fp8": ("Llama-3-8B decode", "float8_e4m3fn"),
    "DeepSeek-V3 write": ("DeepSeek-V3 decode", "bfloat16"),
    "Llama-3-8B write of a chunk": ("Llama-3-8B chunk of 512", "bfloat16"),
}

BOOKS = ("ledger_decode", "ledger_extend", "release")
BATCHES = (64, 256)  # of the operations on the books, with pages of 16
