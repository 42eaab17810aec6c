"""Tiny checkpoints on disk, and where the golden ones are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

HF_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (16, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (16, 32),
}
GGUF_SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (16, 32),
    "output_norm.weight": (32,),
    "output.weight": (16, 32),
}
for _layer in range(2):
    _hf, _blk = f"model.layers.{_layer}.", f"blk.{_layer}."
    for _name, _other, _shape in (
        ("input_layernorm", "attn_norm", (32,)),
        ("post_attention_layernorm", "ffn_norm", (32,)),
        ("self_attn.q_proj", "attn_q", (32, 32)),
        ("self_attn.k_proj", "attn_k", (16, 32)),
        ("self_attn.v_proj", "attn_v", (16, 32)),
        ("self_attn.o_proj", "attn_output", (32, 32)),
        ("mlp.gate_proj", "ffn_gate", (64, 32)),
        ("mlp.up_proj", "ffn_up", (64, 32)),
        ("mlp.down_proj", "ffn_down", (32, 64)),
    ):
        HF_SHAPES[f"{_hf}{_name}.weight"] = _shape
        GGUF_SHAPES[f"{_blk}{_other}.weight"] = _shape

# Byte-level pieces: "Ġ" stands for a blank.
GGUF_METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|start|>", "Ġ", "<|end|>", "a", "b", "c", "1", "ab", "Ġa", "Ġab", *"defgh", "ĠĠ"],
    "tokenizer.ggml.token_type": [3, 1, 3, *[1] * 13],
    "tokenizer.ggml.merges": ["a b", "Ġ a", "Ġ ab", "Ġ Ġ"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def hf_config() -> dict[str, Any]:
    """A fresh copy of the tiny llama config."""
    return json.loads(json.dumps(HF_CONFIG))


@pytest.fixture
def hf_tensors() -> dict[str, np.ndarray]:
    """float32 tensors of the tiny llama, under transformers' names."""
    return random_tensors(HF_SHAPES)


@pytest.fixture
def write_hf(tmp_path: Path) -> Callable[..., Path]:
    """`write_hf(config, tensors)`: a directory with config.json and model.safetensors."""

    def write(config: dict[str, Any], tensors: dict[str, Any], name: str = "hf") -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors")
        return directory

    return write


@pytest.fixture
def gguf_metadata() -> dict[str, Any]:
    """A fresh copy of the tiny llama's metadata."""
    return json.loads(json.dumps(GGUF_METADATA))


@pytest.fixture
def gguf_tensors() -> dict[str, np.ndarray]:
    """float32 tensors of the tiny llama, under GGUF's names."""
    return random_tensors(GGUF_SHAPES)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf(metadata, tensors, kinds)`: a file; `kinds` names the stored type of single tensors."""

    def write(
        metadata: dict[str, Any],
        tensors: dict[str, np.ndarray],
        kinds: dict[str, str] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            add: dict[type, Callable[..., None]] = {
                str: writer.add_string,
                list: writer.add_array,
                int: writer.add_uint32,
                float: writer.add_float32,
            }
            add[type(value)](key, value)
        for name, array in tensors.items():
            kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def find_parity() -> Callable[[str], Path]:
    """`find_parity(case)`: the folder of a golden case, of which the repository itself keeps some."""

    def find(case: str) -> Path:
        for folder in (ROOT / "tests" / "data" / "parity", ROOT.parent / "shared" / "parity"):
            if (folder / case).is_dir():
                return folder / case
        pytest.skip(f"golden case {case} is not stored here")

    return find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2 checkpoint, fetched once per machine."""
    from models.smollm2 import fetch_smollm2

    return fetch_smollm2(progress=False)
