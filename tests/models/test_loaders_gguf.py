"""GGUF files: layouts, stored types, optional tensors, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from models.errors import CheckpointError
from models.loaders import gguf_header, load_checkpoint
from models.rope import RopeScaling
from models.weights import expected_tensors


def _pairs_to_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The reorder written out row by row: row 2i of a head goes to i, row 2i + 1 to i + D / 2."""
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, inside = divmod(row, head_dim)
        out[head * head_dim + inside // 2 + (inside % 2) * (head_dim // 2)] = rows[row]
    return out


def test_weights_arrive_in_the_canonical_layout(write_gguf, gguf_metadata, gguf_tensors):
    checkpoint = load_checkpoint(write_gguf(gguf_metadata, gguf_tensors))
    weights = checkpoint.weights
    assert {name: array.shape for name, array in weights.items()} == expected_tensors(checkpoint.config)
    np.testing.assert_array_equal(weights["embed"], gguf_tensors["token_embd.weight"])
    np.testing.assert_array_equal(weights["lm_head"], gguf_tensors["output.weight"])
    np.testing.assert_array_equal(weights["layers.1.v"], gguf_tensors["blk.1.attn_v.weight"])
    np.testing.assert_array_equal(weights["layers.1.down"], gguf_tensors["blk.1.ffn_down.weight"])
    for leaf in ("q", "k"):
        stored = gguf_tensors[f"blk.1.attn_{leaf}.weight"]
        np.testing.assert_array_equal(weights[f"layers.1.{leaf}"], _pairs_to_halves(stored, 8))
    assert checkpoint.chat_template is not None
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("ab ab") == [7, 9]
    assert checkpoint.tokenizer.eos_ids == (2,)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_types_are_dequantised(write_gguf, gguf_metadata, gguf_tensors, kind):
    matrices = [name for name, array in gguf_tensors.items() if array.ndim == 2]
    path = write_gguf(gguf_metadata, gguf_tensors, dict.fromkeys(matrices, kind))
    weights = load_checkpoint(path).weights
    stored = gguf_tensors["blk.0.ffn_up.weight"]
    quantised = GGMLQuantizationType[kind]
    np.testing.assert_array_equal(weights["layers.0.up"], dequantize(quantize(stored, quantised), quantised))
    assert np.abs(weights["layers.0.up"] - stored).max() < 0.5
    assert load_checkpoint(path, dtype=jnp.bfloat16).weights["layers.0.up"].dtype == jnp.bfloat16


def test_tied_head_and_qwen3_norms(write_gguf, gguf_metadata, gguf_tensors):
    metadata = {key.replace("llama.", "qwen3."): value for key, value in gguf_metadata.items()}
    del gguf_tensors["output.weight"]
    for layer in range(2):
        for norm in ("q", "k"):
            gguf_tensors[f"blk.{layer}.attn_{norm}_norm.weight"] = np.full(8, layer + 1.0, np.float32)
    checkpoint = load_checkpoint(write_gguf(metadata, gguf_tensors, architecture="qwen3"))
    assert checkpoint.config.qk_norm
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.weights["layers.1.k_norm"].tolist() == [2.0] * 8
    # qwen3 rotates by halves in GGUF as well: nothing is reordered.
    np.testing.assert_array_equal(checkpoint.weights["layers.0.q"], gguf_tensors["blk.0.attn_q.weight"])


def test_rope_factors_become_a_scaling(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["rope_freqs.weight"] = np.array([1, 1, 2, 8], np.float32)
    config = load_checkpoint(write_gguf(gguf_metadata, gguf_tensors)).config
    assert config.rope_scaling == RopeScaling(kind="factors", factors=(1.0, 1.0, 2.0, 8.0))
    gguf_tensors["rope_freqs.weight"] = np.array([1, 1, 0, 8], np.float32)
    with pytest.raises(CheckpointError, match="factor"):
        load_checkpoint(write_gguf(gguf_metadata, gguf_tensors))
    gguf_tensors["rope_freqs.weight"] = np.ones(5, np.float32)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        load_checkpoint(write_gguf(gguf_metadata, gguf_tensors))


def test_tensors_have_to_fit_the_metadata(write_gguf, gguf_metadata, gguf_tensors):
    with pytest.raises(CheckpointError, match="has shape"):
        load_checkpoint(write_gguf({**gguf_metadata, "llama.feed_forward_length": 1 << 19}, gguf_tensors))
    with pytest.raises(CheckpointError, match=r"lacks tensor blk\.2\."):
        load_checkpoint(write_gguf({**gguf_metadata, "llama.block_count": 3}, gguf_tensors))
    with pytest.raises(CheckpointError, match="no place for"):
        load_checkpoint(write_gguf({**gguf_metadata, "llama.block_count": 1}, gguf_tensors))
    with pytest.raises(CheckpointError, match="16 tokens, the model 15"):
        load_checkpoint(write_gguf({**gguf_metadata, "llama.vocab_size": 15}, gguf_tensors))


def test_strings_of_a_header_are_bounded(write_gguf, gguf_metadata, gguf_tensors, monkeypatch):
    path = write_gguf(gguf_metadata, gguf_tensors)
    monkeypatch.setattr(gguf_header, "_MAX_STRINGS", 20)
    load_checkpoint(path)  # 16 tokens and 4 merges
    monkeypatch.setattr(gguf_header, "_MAX_STRINGS", 19)
    with pytest.raises(CheckpointError, match="can not hold as many"):
        load_checkpoint(path)


def test_unknown_architecture_and_stored_type(write_gguf, gguf_metadata, gguf_tensors):
    with pytest.raises(CheckpointError, match="llama and qwen3 are supported"):
        load_checkpoint(write_gguf(gguf_metadata, gguf_tensors, architecture="mamba"))
    wide = {**gguf_tensors, "blk.0.ffn_up.weight": np.zeros((64, 256), np.float32)}
    with pytest.raises(CheckpointError, match="as TQ1_0"):
        load_checkpoint(write_gguf(gguf_metadata, wide, {"blk.0.ffn_up.weight": "TQ1_0"}))


@pytest.mark.smollm2
def test_smollm2_loads(smollm2_path):
    checkpoint = load_checkpoint(smollm2_path)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_word_embeddings
    assert {name: array.shape for name, array in checkpoint.weights.items()} == expected_tensors(config)
    assert all(np.isfinite(array).all() for array in checkpoint.weights.values())
