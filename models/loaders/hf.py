"""A Hugging Face directory: config.json, *.safetensors (whole or sharded), tokenizer and chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models._untrusted import Fields, parse_json_object, read_bounded, shown
from models.config import ModelConfig, from_hf
from models.errors import CheckpointError
from models.loaders.safetensors_file import SafetensorsFile
from models.loaders.spec import Progress, assemble, check_tensors, stored_tensors
from models.tokenizer import Tokenizer

_CONFIG_LIMIT = 1 << 20
_INDEX_LIMIT = 16 << 20
_TOKENIZER_LIMIT = 64 << 20
_INDEX = "model.safetensors.index.json"

_LAYER = "model.layers.{}."
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "input_norm": _LAYER + "input_layernorm.weight",
    "post_norm": _LAYER + "post_attention_layernorm.weight",
    **{name: f"{_LAYER}self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
    **{f"{name}_bias": f"{_LAYER}self_attn.{name}_proj.bias" for name in ("q", "k", "v", "o")},
    **{name: f"{_LAYER}self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
    "q_a_norm": _LAYER + "self_attn.q_a_layernorm.weight",
    "kv_a": _LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": _LAYER + "self_attn.kv_a_layernorm.weight",
    **{name: f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"{_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
}
_GPT_OSS = {
    "sinks": _LAYER + "self_attn.sinks",
    "router": _LAYER + "mlp.router.weight",
    "router_bias": _LAYER + "mlp.router.bias",
    "experts_gate": _LAYER + "mlp.experts.gate_up_proj",
    "experts_gate_bias": _LAYER + "mlp.experts.gate_up_proj_bias",
    "experts_down": _LAYER + "mlp.experts.down_proj",
    "experts_down_bias": _LAYER + "mlp.experts.down_proj_bias",
}
# Four norms per layer: what other families call post_attention_layernorm stands before the MLP, here behind attention.
_GEMMA3 = {
    "attention_out_norm": _LAYER + "post_attention_layernorm.weight",
    "post_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "mlp_out_norm": _LAYER + "post_feedforward_layernorm.weight",
}
_FAMILY_NAMES = {"gpt_oss": _NAMES | _GPT_OSS, "gemma3": _NAMES | _GEMMA3}


class _Shards:
    """Several safetensors files as one `TensorSource`."""

    def __init__(self, files: Mapping[str, SafetensorsFile]):
        self._home: dict[str, SafetensorsFile] = {}
        for file_name, file in files.items():
            for name in file.shapes:
                if name in self._home:
                    raise CheckpointError(f"Tensor {shown(name)} is in {file_name} and in another file; one has to go.")
                self._home[name] = file
        self.shapes = {name: file.shapes[name] for name, file in self._home.items()}

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)


def load_config(directory: Path) -> ModelConfig:
    config = _json(directory, "config.json", _CONFIG_LIMIT)
    if config is None:
        name = directory.name or directory
        raise CheckpointError(f"{name} has no config.json; a Hugging Face model directory was expected.")
    return from_hf(config, _json(directory, "generation_config.json", _CONFIG_LIMIT))


def load_weights(directory: Path, config: ModelConfig, dtype: Any, progress: Progress | None) -> dict[str, np.ndarray]:
    """The canonical weights; raises `CheckpointError` unless the files hold exactly those of `config`."""
    source = _open_shards(directory)
    stored = stored_tensors(config, _FAMILY_NAMES.get(config.family, _NAMES))
    # Saved by older versions of transformers, and by tools that write a tied head out.
    ignored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")
    check_tensors(stored, source.shapes, ignored)
    return assemble(source, stored, dtype, progress)


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of tokenizer.json, or None without one."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    return Tokenizer.from_json(
        read_bounded(path, _TOKENIZER_LIMIT), eos_ids=config.eos_token_ids, bos_id=config.bos_token_id
    )


def load_chat_template(directory: Path) -> str | None:
    """The template of chat_template.jinja, or else of tokenizer_config.json; None without one."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, _CONFIG_LIMIT).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError("chat_template.jinja is not UTF-8 text.") from None
    values = _json(directory, "tokenizer_config.json", _INDEX_LIMIT)
    if values is None:
        return None
    template = values.get("chat_template")
    if isinstance(template, list):
        # Several templates, each with a name; "default" is the one for plain chat.
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return Fields({"chat_template": template}, "tokenizer_config.json").text("chat_template", None)


def _json(directory: Path, name: str, limit: int) -> dict[str, Any] | None:
    path = directory / name
    return parse_json_object(read_bounded(path, limit), name) if path.exists() else None


def _open_shards(directory: Path) -> _Shards:
    index = _json(directory, _INDEX, _INDEX_LIMIT)
    if index is not None:
        weight_map = Fields(index, _INDEX).mapping("weight_map")
        files = {name: SafetensorsFile(_inside(directory, name)) for name in _shard_names(weight_map)}
        shards = _Shards(files)
        for name, file_name in weight_map.items():
            if name not in files[file_name].shapes:
                raise CheckpointError(f"{_INDEX} says that {file_name} holds tensor {shown(name)}; it does not.")
        return shards
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if "model.safetensors" in names:
        names = ["model.safetensors"]
    if not names:
        raise CheckpointError(_no_weights(directory))
    return _Shards({name: SafetensorsFile(_inside(directory, name)) for name in names})


def _shard_names(weight_map: Mapping[str, Any]) -> list[str]:
    """The distinct file names in an index, which a stranger wrote: a plain name in the directory or nothing."""
    for name in weight_map.values():
        plain = isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0")
        if not plain:
            raise CheckpointError(
                f"{_INDEX} names the file {shown(name)}; a *.safetensors name without any folder was expected."
            )
    return sorted(set(weight_map.values()))


def _inside(directory: Path, name: str) -> Path:
    """The path of a weight file; refuses links that lead out of the checkpoint."""
    allowed = [directory.resolve()]
    if directory.parent.name == "snapshots":
        # The Hugging Face cache: snapshots/<revision>/<file> links to blobs/<hash>.
        allowed.append((directory.parent.parent / "blobs").resolve())
    path = directory / name
    if path.resolve().parent not in allowed:
        raise CheckpointError(
            f"{name} is a link that leads out of the checkpoint directory; put the file itself there."
        )
    return path


def _no_weights(directory: Path) -> str:
    pickled = [path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    if pickled:
        return (
            f"{directory.name} has its weights in {pickled[0]} only: that is a pickle, which can run any program "
            "when opened, so it is not opened; convert it to safetensors."
        )
    return f"{directory.name} has no *.safetensors file; a Hugging Face model directory was expected."
