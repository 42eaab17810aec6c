"""The canonical weights of a decoder: one name and one shape each, the same whatever file they came from.

Matrices are [out, in], as files hold them (`models.matmul.project`); those of experts are [in, out]. H = hidden size,
I = intermediate size, D = head_dim, Dv = v_head_dim, R = kv_lora_rank, N = qk_nope_head_dim, P = qk_rope_head_dim.
"""

from models.config import ModelConfig


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that a model of this config has, by canonical name ("layers.0.q")."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, config.hidden_size),
        "norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    layer = {**_attention(config), **_mlp(config)}
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "o": (hidden, heads * config.v_head_dim),
    }
    if config.sandwich_norms:
        shapes["attention_out_norm"] = (hidden,)
    if config.attention_sinks:
        shapes["sinks"] = (heads,)
    if config.kv_lora_rank is not None:
        rank, nope = config.kv_lora_rank, config.qk_nope_head_dim or 0
        q_out = heads * (nope + config.head_dim)
        if config.q_lora_rank is None:
            shapes["q"] = (q_out, hidden)
        else:
            shapes["q_a"] = (config.q_lora_rank, hidden)
            shapes["q_a_norm"] = (config.q_lora_rank,)
            shapes["q_b"] = (q_out, config.q_lora_rank)
        shapes["kv_a"] = (rank + config.head_dim, hidden)
        shapes["kv_a_norm"] = (rank,)
        shapes["kv_b_k"] = (heads, nope, rank)  # k_nope = latent . kv_b_k: [heads, N, R]
        shapes["kv_b_v"] = (heads, config.v_head_dim, rank)  # v = latent . kv_b_v: [heads, Dv, R]
        return shapes
    shapes["q"] = (heads * config.head_dim, hidden)
    shapes["k"] = (config.num_kv_heads * config.head_dim, hidden)
    shapes["v"] = (config.num_kv_heads * config.v_head_dim, hidden)
    if config.attention_bias:
        shapes.update({f"{name}_bias": shapes[name][:1] for name in ("q", "k", "v", "o")})
    if config.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = (config.head_dim,)
    return shapes


def _mlp(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"post_norm": (hidden,)}
    if config.sandwich_norms:
        shapes["mlp_out_norm"] = (hidden,)
    if config.num_experts is not None:
        experts = config.num_experts
        shapes |= {"router": (experts, hidden), "router_bias": (experts,)}
        for name, (width_in, width_out) in {
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }.items():
            shapes[f"experts_{name}"] = (experts, width_in, width_out)
            shapes[f"experts_{name}_bias"] = (experts, width_out)
        return shapes
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if config.mlp_bias:
        shapes.update({f"{name}_bias": shapes[name][:1] for name in ("gate", "up", "down")})
    return shapes
