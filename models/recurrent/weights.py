"""The canonical weights of a hybrid decoder, and the tensors of a Hugging Face directory that they are read from.

Matrices are [out, in] as in files; convolutions [channels, kernel] here, [channels, 1, kernel] there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import CheckpointError
from models.loaders.hf import _CONFIG_LIMIT, _json, _open_shards
from models.loaders.spec import StoredTensor, assemble, check_tensors
from models.recurrent.config import GatedDelta, HybridConfig, ShortConv, from_hf

Shapes = dict[str, tuple[int, ...]]
# canonical name in a layer -> name in the file, where families differ
_BLOCK = {
    "lfm2": {"input_norm": "operator_norm", "post_norm": "ffn_norm"},
    "qwen3_next": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "falcon_h1": {"input_norm": "input_layernorm", "post_norm": "pre_ff_layernorm"},
    "bamba": {"input_norm": "input_layernorm", "post_norm": "pre_ff_layernorm"},
}
_MLP = {
    "lfm2": {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
    "qwen3_next": {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_MLP["falcon_h1"] = _MLP["bamba"] = {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
_ATTENTION = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")}
_ATTENTION |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_LFM2_ATTENTION = {"o": "self_attn.out_proj", "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}
_FINAL_NORM = {
    "lfm2": "embedding_norm",
    "qwen3_next": "norm",
    "falcon_h1": "final_layernorm",
    "bamba": "final_layernorm",
}


def layer_shapes(config: HybridConfig, layer: int) -> Shapes:
    """Canonical shapes of one layer's weights."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if layer in config.attention_layers:
        heads, kv = config.num_heads * dim, config.num_kv_heads * dim
        shapes |= {"q": (heads * (1 + config.output_gate), hidden), "k": (kv, hidden), "v": (kv, hidden)}
        shapes |= {"o": (hidden, heads)} | ({"q_norm": (dim,), "k_norm": (dim,)} if config.qk_norm else {})
    if layer in config.recurrent_layers:
        shapes |= _cell_shapes(config)
    return shapes


def _cell_shapes(config: HybridConfig) -> Shapes:
    cell, hidden = config.recurrent, config.hidden_size
    channels = cell.conv_shape[0]
    shapes: Shapes = {"conv": (channels, cell.kernel)}
    if isinstance(cell, ShortConv):
        shapes |= {"in": (3 * channels, hidden), "out": (hidden, channels)}
        if cell.bias:
            shapes |= {"conv_bias": (channels,), "in_bias": (3 * channels,), "out_bias": (hidden,)}
    elif isinstance(cell, GatedDelta):
        value = cell.value_heads * cell.value_dim
        shapes |= {"qkvz": (channels + value, hidden), "ba": (2 * cell.value_heads, hidden)}
        shapes |= {"A_log": (cell.value_heads,), "dt_bias": (cell.value_heads,), "state_norm": (cell.value_dim,)}
        shapes |= {"out": (hidden, value)}
    else:
        shapes |= {"in": (cell.inner + channels + cell.heads, hidden), "out": (hidden, cell.inner)}
        shapes |= {name: (cell.heads,) for name in ("A_log", "D", "dt_bias")}
        shapes |= {"state_norm": (cell.inner,)} if cell.gated_norm else {}
        shapes |= {"conv_bias": (channels,)} if cell.conv_bias else {}
        shapes |= {"in_bias": shapes["in"][:1], "out_bias": (hidden,)} if cell.proj_bias else {}
    return shapes


def expected_tensors(config: HybridConfig) -> Shapes:
    """Shape of every weight that a model of this config has, by canonical name ("layers.0.q")."""
    shapes: Shapes = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    return shapes


def load(directory: Path, dtype: Any = np.float32) -> tuple[HybridConfig, dict[str, np.ndarray]]:
    """(config, canonical weights) of a Hugging Face directory; `CheckpointError` unless it holds exactly those."""
    values = _json(directory, "config.json", _CONFIG_LIMIT)
    if values is None:
        name = directory.name or directory
        raise CheckpointError(f"{name} has no config.json; a Hugging Face model directory was expected.")
    config = from_hf(values)
    source, stored = _open_shards(directory), stored_tensors(config)
    check_tensors(stored, source.shapes, {"lm_head.weight"} if config.tie_word_embeddings else ())
    return config, assemble(source, stored, dtype, None)


def stored_tensors(config: HybridConfig) -> list[StoredTensor]:
    """The tensors that a file of this config has to hold."""
    return [_stored(config, name, shape) for name, shape in expected_tensors(config).items()]


def _stored(config: HybridConfig, target: str, shape: tuple[int, ...]) -> StoredTensor:
    prefix, _, leaf = target.rpartition(".")
    file_name = f"model.{prefix}.{_file_name(config, leaf)}" if prefix else _outer_name(config, leaf)
    if leaf == "conv":
        return StoredTensor(file_name, (shape[0], 1, shape[1]), (target,), lambda a: (a[:, 0],))
    # qwen3_next's norms multiply by 1 + weight, except the gated one behind the state.
    centred = config.family == "qwen3_next" and leaf in ("input_norm", "post_norm", "q_norm", "k_norm", "norm")
    convert: Callable[[np.ndarray], tuple[np.ndarray, ...]] = (lambda a: (a + 1,)) if centred else (lambda a: (a,))
    return StoredTensor(file_name, shape, (target,), convert)


def _outer_name(config: HybridConfig, leaf: str) -> str:
    if leaf == "lm_head":
        return "lm_head.weight"
    return "model.embed_tokens.weight" if leaf == "embed" else f"model.{_FINAL_NORM[config.family]}.weight"


def _file_name(config: HybridConfig, leaf: str) -> str:
    cell, kind = config.recurrent, leaf.removesuffix("_bias") if leaf != "dt_bias" else leaf
    suffix = "bias" if kind != leaf else "weight"
    known = _BLOCK[config.family] | _MLP[config.family] | _ATTENTION
    if config.family == "lfm2":
        known |= _LFM2_ATTENTION
    if isinstance(cell, ShortConv):
        known |= {"conv": "conv.conv", "in": "conv.in_proj", "out": "conv.out_proj"}
    else:
        block = "linear_attn" if isinstance(cell, GatedDelta) else "mamba"
        if kind in ("A_log", "D", "dt_bias"):
            return f"{block}.{kind}"
        known |= {"conv": f"{block}.conv1d", "out": f"{block}.out_proj", "state_norm": f"{block}.norm"}
        known |= {"in": f"{block}.in_proj", "qkvz": f"{block}.in_proj_qkvz", "ba": f"{block}.in_proj_ba"}
    return f"{known[kind]}.{suffix}"
