"""`HybridConfig`: read from config.json, and refused where these decoders would compute something else."""

import math

import pytest

from models.errors import CheckpointError
from models.recurrent.config import Mamba2, from_hf
from models.recurrent.weights import expected_tensors, stored_tensors

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
}
LFM2 = {
    **COMMON,
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}
QWEN = {
    **COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "mlp_only_layers": [0, 1],
    "rms_norm_eps": 1e-6,
}
BAMBA = {
    **COMMON,
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-5,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}
FALCON = {
    **BAMBA,
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 48,
    "mamba_d_head": 6,
    "ssm_multipliers": [1, 2, 3, 4, 5],
}


@pytest.mark.parametrize(
    ("config", "attends", "recurs", "window", "state"),
    [
        (LFM2, (1,), (0,), (32, 2), None),
        (QWEN, (1,), (0,), (64, 3), (4, 8, 8)),
        (BAMBA, (1,), (0,), (96, 3), (8, 8, 8)),
        (FALCON, (0, 1), (0, 1), (80, 3), (8, 6, 8)),
    ],
)
def test_layers_and_states_of_each_family(config, attends, recurs, window, state):
    made = from_hf(config)
    assert (made.attention_layers, made.recurrent_layers) == (attends, recurs)
    assert (made.recurrent.conv_shape, made.recurrent.temporal_shape) == (window, state)
    assert (made.head_dim, made.rotary_dim) == (8, 4)
    names = [target for tensor in stored_tensors(made) for target in tensor.targets]
    assert sorted(names) == sorted(expected_tensors(made))
    assert len({tensor.name for tensor in stored_tensors(made)}) == len(names)


def test_infinite_limits_and_multipliers_are_read():
    bamba, falcon = from_hf(BAMBA), from_hf(FALCON)
    assert isinstance(bamba.recurrent, Mamba2)
    assert bamba.recurrent.dt_limit == (0.0, math.inf)
    assert falcon.multipliers.ssm == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_lfm2_rounds_its_inner_size_where_the_config_says_so():
    assert from_hf({**LFM2, "block_auto_adjust_ff_dim": True, "block_multiple_of": 10}).intermediate_size == 40


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LFM2, {"architectures": ["LlamaForCausalLM"]}, "one of Lfm2ForCausalLM"),
        (LFM2, {"layer_types": ["conv", "mamba"]}, "2 entries of full_attention and conv were expected"),
        (LFM2, {"layer_types": ["conv", "conv"]}, "needs an attention layer and a recurrent layer"),
        (LFM2, {"conv_L_cache": 1}, "spans 1 token; 2 or more"),
        (LFM2, {"num_key_value_heads": 3}, "4 attention heads over 3 KV heads"),
        (LFM2, {"hidden_size": 1 << 30}, "hidden_size is 1073741824; an integer from 1 to"),
        (LFM2, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type"),
        (QWEN, {"mlp_only_layers": [0]}, "has experts"),
        (QWEN, {"linear_num_value_heads": 3}, "3 value heads over 2 key heads"),
        (QWEN, {"attention_bias": True}, "biases"),
        (BAMBA, {"attn_layer_indices": [2]}, "attn_layer_indices"),
        (BAMBA, {"mamba_n_groups": 3}, "8 state heads over 3 groups"),
        (BAMBA, {"mamba_d_head": 7}, "8 state heads of 7 for 64 inner channels"),
        (BAMBA, {"time_step_limit": [0.0, "x"]}, "a number was expected"),
        (FALCON, {"mamba_rms_norm": True}, "mamba_rms_norm"),
        (FALCON, {"ssm_multipliers": [1]}, "1 ssm_multipliers"),
    ],
)
def test_what_is_not_built_is_refused(config, change, message):
    with pytest.raises(CheckpointError, match=message):
        from_hf({**config, **change})
