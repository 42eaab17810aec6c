"""Small decoders with random weights, page tables with scattered pages, and a dense attention to compare with."""

import jax.numpy as jnp
import numpy as np

from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from models.config import ModelConfig
from models.weights import expected_tensors

GQA = ModelConfig(
    family="qwen3",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    qk_norm=True,
)
MLA = ModelConfig(
    family="deepseek",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    v_head_dim=12,
    rope_interleaved=True,
    tie_word_embeddings=True,
    kv_lora_rank=16,
    q_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=8,
)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights whose activations stay near 1 and whose logits differ clearly between tokens."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        values = rng.normal(size=shape)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name != "embed":
            values = values / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


def pool_for(config: ModelConfig, size: int, page_size: int, dtype=jnp.float32):
    """An empty pool that fits the config."""
    if config.kv_lora_rank is not None:
        return MLATokenToKVPool.create(
            size, page_size, config.num_layers, config.kv_lora_rank, config.head_dim, dtype=dtype
        )
    return MHATokenToKVPool.create(
        size, page_size, config.num_layers, config.num_kv_heads, config.head_dim, config.v_head_dim, dtype=dtype
    )


def scattered_table(rows: int, context: int, page_size: int, *, width: int | None = None, seed: int = 0):
    """(table i32[rows + 1, width], size): each row holds `context` tokens on pages drawn in random order."""
    pages = -(-context // page_size)
    order = np.random.default_rng(seed).permutation(rows * pages) + 1
    table = np.zeros((rows + 1, width or context), np.int32)
    for row in range(rows):
        mine = order[row * pages : (row + 1) * pages, None]
        table[row + 1, :context] = (mine * page_size + np.arange(page_size)).ravel()[:context]
    return table, rows * pages * page_size


def dense_attention(q, k, v, positions, scale):
    """float64 [t, Hq, Dv] of one sequence: q [t, Hq, D], k [s, Hkv, D], v [s, Hkv, Dv], positions [t]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for i, position in enumerate(positions):
        for head in range(q.shape[1]):
            scores = k[: position + 1, head // group] @ q[i, head] * scale
            probs = np.exp(scores - scores.max())
            out[i, head] = probs @ v[: position + 1, head // group] / probs.sum()
    return out
