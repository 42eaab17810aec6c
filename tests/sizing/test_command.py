"""`kvjax plan`: layer kinds from real configs, the table, JSON, and refusals in one sentence."""

import json
import struct

import pytest

from kvjax import cli
from kvjax.sizing import read_model
from kvjax.sizing.command import parse_bytes
from kvjax.sizing.model import from_hf

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
BASE = {"num_hidden_layers": 4, "max_position_embeddings": 512, **HEADS}
CASES = {
    "llama": ({}, [("full", 4, 256, 0)]),
    "mistral": ({"sliding_window": 12}, [("window", 4, 256, 0)]),
    "qwen, window off": ({"sliding_window": 12, "use_sliding_window": False}, [("full", 4, 256, 0)]),
    "gpt_oss": (
        {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
        [("full", 2, 128, 0), ("window", 2, 128, 0)],
    ),
    "gemma3 pattern": ({"sliding_window": 8, "sliding_window_pattern": 4}, [("full", 1, 64, 0), ("window", 3, 192, 0)]),
    "multimodal": ({"text_config": BASE, "model_type": "gemma3"}, [("full", 4, 256, 0)]),
    "deepseek": ({"kv_lora_rank": 32, "qk_rope_head_dim": 16}, [("full", 4, 192, 0)]),
    "dsa": ({"kv_lora_rank": 32, "qk_rope_head_dim": 16, "index_topk": 4}, [("full", 4, 192 + 4 * 132, 0)]),
    "jamba": (
        {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
        [("full", 1, 64, 0), ("state", 3, 0, 3 * (128 * 3 + 128 * 8 * 4))],
    ),
    "bamba": (
        {"model_type": "bamba", "attn_layer_indices": [2], "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 2},
        [("full", 1, 64, 0), ("state", 3, 0, 3 * ((128 + 64) * 3 + 128 * 16 * 4))],
    ),
    "falcon_h1": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1},
        [("full", 4, 256, 0), ("state", 4, 0, 4 * ((96 + 32) * 3 + 96 * 16 * 4))],
    ),
    "lfm2": (
        {"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"]},
        [("full", 1, 64, 0), ("state", 3, 0, 3 * 64 * 2)],
    ),
    "qwen3_next": (
        {
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        },
        [("full", 1, 64, 0), ("state", 3, 0, 3 * (128 * 3 + 4 * 16 * 16 * 4))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layer_kinds_and_bytes_of_each_family(case):
    extra, expected = CASES[case]
    shape = from_hf({**BASE, **extra})
    seen = [
        (g.kind, g.layers, g.bytes_per_token(1), g.bytes_per_slot(1) if g.kind == "state" else 0) for g in shape.groups
    ]
    assert seen == expected


def gguf(tmp_path, **values):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    body = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    body += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    body += text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5)
    for key, value in values.items():
        body += text(f"llama.{key.replace('__', '.')}") + struct.pack("<II", 4, value)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3 + len(values)) + body)
    return path


SIZES = {"block_count": 4, "embedding_length": 64, "attention__head_count": 4, "attention__head_count_kv": 2}


def test_a_gguf_header_is_read_without_its_arrays(tmp_path):
    shape = read_model(gguf(tmp_path, **SIZES, context_length=99))
    assert (shape.context_len, shape.groups[0].bytes_per_token(2)) == (99, 4 * 2 * 32 * 2)


@pytest.mark.parametrize("cut", [2, 20, 60, 100])
def test_a_cut_gguf_header_is_refused(tmp_path, cut):
    path = gguf(tmp_path, **SIZES)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"not complete|starts with"):
        read_model(path)


@pytest.mark.parametrize(
    ("text", "bytes_"), [("80GiB", 80 << 30), ("512MB", 512_000_000), ("1.5 kib", 1536), ("77", 77), ("2G", 2 * 10**9)]
)
def test_memory_sizes(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "lots", "-3GiB", "3XB"])
def test_memory_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    return str(tmp_path)


def test_json_holds_the_plan_and_its_alternatives(model, capsys):
    assert cli.main(["plan", model, "--memory", "64MiB", "--max-running", "8", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["plan"]["total_bytes"] <= 64 << 20
    assert out["plan"]["tokens"] == out["plan"]["pages"] * 16
    assert {(p["dtype"], p["page_size"]) for p in out["others"]} >= {("float32", 1), ("float8_e4m3fn", 64)}
    assert out["plan"]["concurrent"]["512"] == 8


def test_the_tables_name_kinds_pages_and_concurrency(model, capsys):
    assert cli.main(["plan", model, "--memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    for part in ("bytes per token", "512", "pages", "rows", "requests of 512 tokens at once", "float8_e4m3fn"):
        assert part in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--memory", "1KB"], "holds no page"),
        (["--memory", "soon"], "is no size"),
        (["--page-size", "0"], "--page-size must be at least 1"),
    ],
)
def test_a_mistake_ends_with_one_sentence(model, capsys, args, says):
    assert cli.main(["plan", model, *args]) == 2
    assert says.lower() in capsys.readouterr().err.lower()
    assert cli.main(["plan", model + "/nowhere.json"]) == 2
    assert cli.main(["plna"]) == 2
