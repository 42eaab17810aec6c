"""Configs: what is read, what is derived, and what is refused."""

import math

import numpy as np
import pytest

from models.config import ModelConfig, from_gguf, from_hf
from models.errors import CheckpointError
from models.rope import RopeScaling, rope_inv_freq
from models.weights import expected_tensors

MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 2,
    "first_k_dense_replace": 2,
}


def test_llama_config_is_read(hf_config):
    config = from_hf(hf_config, {"eos_token_id": [7, 2]})
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 2, 4, 2)
    assert config.eos_token_ids == (2, 7)
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert not config.is_mla
    assert hash(config) == hash(from_hf(hf_config, {"eos_token_id": [7]}))


def test_absent_fields_take_the_defaults_of_transformers(hf_config):
    for key in ("num_key_value_heads", "head_dim", "rope_parameters", "eos_token_id", "tie_word_embeddings"):
        del hf_config[key]
    config = from_hf(hf_config)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert config.eos_token_ids == ()


def test_older_configs_keep_theta_beside_the_scaling(hf_config):
    del hf_config["rope_parameters"]
    config = from_hf({**hf_config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_mla_config_is_read(hf_config):
    config = from_hf({**hf_config, **MLA})
    assert config.is_mla
    assert config.rope_interleaved
    assert config.head_dim == config.qk_rope_head_dim == 4
    assert config.attention_scale == 0.25
    shapes = expected_tensors(config)
    assert shapes["layers.1.q_b"] == (4 * 16, 24)
    assert shapes["layers.1.kv_b_v"] == (4, 10, 16)


def test_rope_frequencies():
    plain = {
        "family": "llama",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 32,
        "v_head_dim": 32,
    }
    base = rope_inv_freq(ModelConfig(**plain, rope_theta=5e5))
    assert base.dtype == np.float32
    assert base.shape == (16,)
    np.testing.assert_allclose(base, [5e5 ** (-i / 16) for i in range(16)], rtol=1e-6)

    linear = RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_inv_freq(ModelConfig(**plain, rope_theta=5e5, rope_scaling=linear)), base / 4)

    bands = RopeScaling(kind="llama3", factor=8.0, original_max_position=8192)
    scaled = rope_inv_freq(ModelConfig(**plain, rope_theta=5e5, rope_scaling=bands))
    wavelength = 2 * math.pi / base
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], base[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], base[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any()
    assert np.all((scaled[between] < base[between]) & (scaled[between] > base[between] / 8))

    divisors = RopeScaling(kind="factors", factors=tuple(float(i + 1) for i in range(16)))
    divided = rope_inv_freq(ModelConfig(**plain, rope_theta=5e5, rope_scaling=divisors))
    np.testing.assert_allclose(divided, base / np.arange(1, 17), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gemma3"}, "supported are"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "supported are"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        ({"hidden_size": "64"}, "an integer was expected"),
        ({"hidden_size": True}, "an integer was expected"),
        ({"vocab_size": -5}, "from 1 to"),
        ({"intermediate_size": 1 << 60}, "from 1 to"),
        ({"num_key_value_heads": 3}, "whole number of heads"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"eos_token_id": 16}, "special token"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "sliding"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "factors"}}, "'factors'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "positive"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"kv_lora_rank": 8, **MLA, "first_k_dense_replace": 1}, "experts in layers 1 to 1"),
        ({**MLA, "qk_nope_head_dim": None}, "lacks 'qk_nope_head_dim'"),
        ({**MLA, "attention_bias": True}, "without biases"),
    ],
)
def test_unusable_configs_are_refused_in_a_sentence(hf_config, change, says):
    with pytest.raises(CheckpointError, match=says):
        from_hf({**hf_config, **change})


def test_qwen_window_that_is_switched_off_is_accepted(hf_config):
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config = from_hf({**hf_config, **qwen, "sliding_window": 64, "use_sliding_window": False})
    assert config.qk_norm
    assert "layers.0.q_norm" in expected_tensors(config)


def test_gguf_config_is_read(gguf_metadata):
    metadata = {"general.architecture": "llama", **gguf_metadata}
    config = from_gguf(metadata, {"token_embd.weight"})
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (16, 8, 2)
    assert config.tie_word_embeddings
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 0)
    assert not from_gguf(metadata, {"output.weight"}).tie_word_embeddings
    assert from_gguf({**metadata, "tokenizer.ggml.eot_token_id": 5}, ()).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general.architecture": "gemma3"}, "llama and qwen3"),
        ({"llama.block_count": None}, "lacks 'llama.block_count'"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "an integer was expected"),
    ],
)
def test_unusable_gguf_metadata_is_refused_in_a_sentence(gguf_metadata, change, says):
    with pytest.raises(CheckpointError, match=says):
        from_gguf({"general.architecture": "llama", **gguf_metadata, **change}, ())


GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 12}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def test_gemma3_slides_in_all_but_every_sixth_layer(hf_config):
    config = from_hf({**hf_config, **GEMMA3})
    assert (config.window, config.window_layers, config.full_layers) == (16, (0, 1, 2, 3, 4, 6), (5,))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.attention_scale == 64**-0.5
    assert config.embed_scale == 32**0.5
    assert config.qk_norm
    assert config.zero_centred_norms
    assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
    full, local = rope_inv_freq(config), rope_inv_freq(config, of_window_layers=True)
    np.testing.assert_allclose(full, [1e6 ** (-i / 4) for i in range(4)], rtol=1e-6)
    np.testing.assert_allclose(local, [1e4 ** (-i / 4) for i in range(4)], rtol=1e-6)
    assert from_hf({**hf_config, **GEMMA3, "sliding_window": None}).window_layers == ()


def test_every_layer_of_mistral_slides_or_none(hf_config):
    assert from_hf({**hf_config, **MISTRAL}).window_layers == (0, 1)
    assert from_hf({**hf_config, **MISTRAL, "sliding_window": None}).window is None


def test_gpt_oss_alternates_and_stretches_its_rotation(hf_config):
    config = from_hf({**hf_config, **GPT_OSS})
    assert config.window_layers == (0, 2)
    assert (config.num_experts, config.experts_per_token) == (4, 2)
    assert config.attention_sinks
    assert config.attention_bias
    scaling = config.rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(32) + 1)

    def pair(turns):  # where a frequency makes so many turns over the original context
        return 4 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000)

    low, high = pair(32), pair(1)
    plain, got = 150000.0 ** (-np.arange(4) / 4), rope_inv_freq(config)
    stretched = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(got, plain * (1 - stretched) + plain / 32 * stretched, rtol=1e-6)
    assert got[0] == np.float32(plain[0])
    assert got[3] == np.float32(plain[3] / 32)
    shapes = expected_tensors(config)
    assert shapes["layers.0.experts_gate"] == (4, 32, 64)
    assert shapes["layers.0.sinks"] == (4,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({**GEMMA3, "hidden_activation": "gelu"}, "gelu_pytorch_tanh is built"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "both directions"),
        ({**GEMMA3, "layer_types": ["sliding_attention"]}, "for each of 7 layers"),
        ({**GEMMA3, "layer_types": ["chunked_attention"] * 7}, "sliding_attention or full_attention"),
        ({**GEMMA3, "query_pre_attn_scalar": -1}, "soft caps and scales"),
        ({**GEMMA3, "attn_logit_softcapping": 0.0}, "soft caps and scales"),
        ({**MISTRAL, "sliding_window": 0}, "window is 0"),
        ({**GPT_OSS, "swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ({**GPT_OSS, "num_experts_per_tok": 5}, "5 experts per token of 4"),
        ({**GPT_OSS, "rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, "positive"),
        ({**GPT_OSS, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 64.0}}, "beta_slow"),
    ],
)
def test_unusable_window_configs_are_refused_in_a_sentence(hf_config, change, says):
    with pytest.raises(CheckpointError, match=says):
        from_hf({**hf_config, **change})
