"""Hugging Face directories: layouts, dtypes, shards, and what is refused."""

import json
import os
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import CheckpointError
from models.loaders import load_checkpoint
from models.weights import expected_tensors

PARITY = ("llama_gqa_a", "llama_mha_tied_b", "qwen3_a", "deepseek_v2_mla_a", "deepseek_v3_mla_b")


@pytest.mark.parametrize("case", PARITY)
def test_golden_cases_load_with_the_expected_shapes(find_parity, case):
    directory, seen = find_parity(case), []
    checkpoint = load_checkpoint(directory, progress=lambda done, total, name: seen.append((done, total)))
    assert {name: array.shape for name, array in checkpoint.weights.items()} == expected_tensors(checkpoint.config)
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in checkpoint.weights.values())
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert checkpoint.tokenizer is None

    raw = load_file(directory / "model.safetensors")
    for name, leaf in (("self_attn.o_proj", "o"), ("mlp.down_proj", "down"), ("input_layernorm", "input_norm")):
        np.testing.assert_array_equal(
            checkpoint.weights[f"layers.1.{leaf}"], raw[f"model.layers.1.{name}.weight"], strict=True
        )
    assert ("lm_head" in checkpoint.weights) == ("lm_head.weight" in raw)


def test_mla_up_projection_is_split_per_head(find_parity):
    directory = find_parity("deepseek_v2_mla_a")
    checkpoint = load_checkpoint(directory)
    raw = load_file(directory / "model.safetensors")
    config, joint = checkpoint.config, raw["model.layers.2.self_attn.kv_b_proj.weight"]
    latent = np.random.default_rng(0).standard_normal(config.kv_lora_rank).astype(np.float32)
    per_head = (joint @ latent).reshape(config.num_heads, -1)
    nope = config.qk_nope_head_dim
    k, v = checkpoint.weights["layers.2.kv_b_k"] @ latent, checkpoint.weights["layers.2.kv_b_v"] @ latent
    np.testing.assert_allclose(k, per_head[:, :nope], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(v, per_head[:, nope:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_and_asked_dtypes(write_hf, hf_config, hf_tensors, stored):
    narrow = {name: array.astype(stored) for name, array in hf_tensors.items()}
    directory = write_hf(hf_config, narrow)
    weights = load_checkpoint(directory).weights
    np.testing.assert_array_equal(
        weights["layers.0.k"], narrow["model.layers.0.self_attn.k_proj.weight"].astype(np.float32)
    )
    assert load_checkpoint(directory, dtype=jnp.bfloat16).weights["embed"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="floating"):
        load_checkpoint(directory, dtype=jnp.int8)


def test_biases_are_loaded(write_hf, hf_config, hf_tensors):
    sizes = {"self_attn.q": 32, "self_attn.k": 16, "self_attn.v": 16, "self_attn.o": 32}
    sizes |= {"mlp.gate": 64, "mlp.up": 64, "mlp.down": 32}
    for layer in range(2):
        for name, size in sizes.items():
            hf_tensors[f"model.layers.{layer}.{name}_proj.bias"] = np.full(size, layer + 0.5, np.float32)
    directory = write_hf({**hf_config, "attention_bias": True, "mlp_bias": True}, hf_tensors)
    weights = load_checkpoint(directory).weights
    assert weights["layers.1.k_bias"].tolist() == [1.5] * 16
    assert weights["layers.0.up_bias"].tolist() == [0.5] * 64


def _shard(directory, tensors):
    """Rewrites the directory as two shards with an index; returns the index's weight map."""
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_load_like_one_file(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    whole = load_checkpoint(directory).weights
    _shard(directory, hf_tensors)
    sharded = load_checkpoint(directory).weights
    assert whole.keys() == sharded.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, sharded[name])


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "../x.safetensors", "a/b.safetensors", 7, ""])
def test_index_can_not_lead_out_of_the_directory(write_hf, hf_config, hf_tensors, name):
    directory = write_hf(hf_config, hf_tensors)
    weight_map = _shard(directory, hf_tensors)
    weight_map["lm_head.weight"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="without any folder"):
        load_checkpoint(directory)


def test_index_that_names_the_wrong_shard_is_refused(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    weight_map = _shard(directory, hf_tensors)
    first, second = sorted(set(weight_map.values()))
    weight_map["lm_head.weight"] = first if weight_map["lm_head.weight"] == second else second
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="it does not"):
        load_checkpoint(directory)


def test_link_out_of_the_directory_is_refused_but_the_hub_cache_works(write_hf, hf_config, hf_tensors, tmp_path):
    directory = write_hf(hf_config, hf_tensors)
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "main", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "config.json").write_text((directory / "config.json").read_text())
    os.replace(directory / "model.safetensors", blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123")
    assert load_checkpoint(snapshot).weights["embed"].shape == (16, 32)

    (directory / "model.safetensors").symlink_to(blobs / "0123")
    with pytest.raises(CheckpointError, match="leads out"):
        load_checkpoint(directory)


class _Poison:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_no_pickle_is_opened(write_hf, hf_config, hf_tensors, tmp_path, name):
    directory = write_hf(hf_config, hf_tensors)
    marker = tmp_path / "opened"
    (directory / name).write_bytes(pickle.dumps(_Poison(marker)))
    load_checkpoint(directory)  # beside safetensors it is of no interest
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pickle.*convert it to safetensors"):
        load_checkpoint(directory)
    (directory / name).rename(directory / "model.safetensors")  # nor under a false name
    with pytest.raises(CheckpointError):
        load_checkpoint(directory)
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Poison(marker))).close()
    assert marker.exists()  # the poison does work


def test_tensors_have_to_fit_the_config(write_hf, hf_config, hf_tensors):
    norm = "model.layers.1.input_layernorm.weight"
    missing = {name: array for name, array in hf_tensors.items() if name != norm}
    with pytest.raises(CheckpointError, match=f"lacks tensor {norm}"):
        load_checkpoint(write_hf(hf_config, missing))
    extra = {**hf_tensors, "model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(CheckpointError, match="no place for"):
        load_checkpoint(write_hf(hf_config, extra))
    with pytest.raises(CheckpointError, match="has shape"):
        load_checkpoint(write_hf({**hf_config, "vocab_size": 1 << 20}, hf_tensors))
    with pytest.raises(CheckpointError, match="dtype I32"):
        load_checkpoint(write_hf(hf_config, {**hf_tensors, norm: np.zeros(32, np.int32)}))
    ignored = {**hf_tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    load_checkpoint(write_hf(hf_config, ignored))


def test_tied_checkpoints_may_repeat_the_head(write_hf, hf_config, hf_tensors):
    tied = load_checkpoint(write_hf({**hf_config, "tie_word_embeddings": True}, hf_tensors))
    assert "lm_head" not in tied.weights


def test_chat_template_is_found_in_all_its_places(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    assert load_checkpoint(directory).chat_template is None
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert load_checkpoint(directory).chat_template == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert load_checkpoint(directory).chat_template == "two"
    (directory / "chat_template.jinja").write_text("three")
    assert load_checkpoint(directory).chat_template == "three"


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="neither a directory"):
        load_checkpoint(tmp_path / "model.bin")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_checkpoint(tmp_path)
