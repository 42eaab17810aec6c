"""ModelShape: what a model keeps per token and per request, by layer kind, and how it is read from its files.

Only sizes are read, from a Hugging Face config.json or a GGUF header; no weights, and nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.layout import round_up
from kvjax.sizing.cells import DSA_INDEX_BYTES, kv_heads_per_rank

FULL, WINDOW, STATE = "full", "window", "state"  # what a layer keeps: every token, the last ones, one state
DELTA_NET = ("qwen3_next",)
SHORT_CONV = ("lfm2", "lfm2_moe")
MAMBA = ("jamba", "bamba", "falcon_h1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same thing. Per token: heads x width values of the pool's dtype and extra_bytes."""

    kind: str  # FULL, WINDOW or STATE
    label: str  # for people: "attention", "latent", "sliding window 512", "mamba state"
    layers: int
    heads: int = 1  # KV heads; they are split over tensor-parallel ranks
    width: int = 0  # values per head: K and V together, or the latent's columns
    extra_bytes: int = 0  # per token whatever the dtype: sparse attention's index keys and scales
    conv_values: int = 0  # STATE: values of the pool's dtype in a request's slot
    temporal_values: int = 0  # STATE: float32 values in a request's slot

    def bytes_per_token(self, itemsize: int, tp: int = 1, align: int = 1) -> int:
        """Bytes of one token in all layers of the group on one rank; align: the width is padded to a multiple."""
        if self.kind == STATE:
            return 0
        heads = kv_heads_per_rank(self.heads, tp)
        return self.layers * (heads * round_up(self.width, align) * itemsize + self.extra_bytes)

    def bytes_per_slot(self, itemsize: int, tp: int = 1) -> int:
        """Bytes of one request's state in all layers of the group on one rank."""
        return self.layers * (-(-self.conv_values // tp) * itemsize + -(-self.temporal_values // tp) * 4)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The layer groups of a model. ValueError without any attention layer, or with sizes below 1."""

    name: str
    groups: tuple[LayerGroup, ...]
    context_len: int  # tokens that the model was made for
    window: int = 0  # tokens; 0 without sliding-window layers

    def __post_init__(self) -> None:
        if not any(g.kind != STATE and g.layers > 0 for g in self.groups):
            raise ValueError(f"{self.name} has no attention layer, so there is no KV pool to plan.")
        if self.context_len < 1:
            raise ValueError(f"{self.name} has a context length of {self.context_len}; at least 1 was expected.")
        for g in self.groups:
            if g.layers < 1 or g.heads < 1 or (g.kind != STATE and g.width < 1):
                raise ValueError(f"{self.name} has {g.layers} {g.label} layers of {g.heads} heads x {g.width} values.")
            if g.kind == WINDOW and self.window < 1:
                raise ValueError(f"{self.name} has sliding-window layers and a window of {self.window} tokens.")

    def of(self, kind: str) -> tuple[LayerGroup, ...]:
        """Groups of one kind."""
        return tuple(g for g in self.groups if g.kind == kind)

    @classmethod
    def mha(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        context_len: int = 2048,
        name: str = "model",
    ) -> ModelShape:
        """Full attention everywhere; v_head_dim 0: keys only."""
        width = head_dim + (head_dim if v_head_dim is None else v_head_dim)
        group = LayerGroup(kind=FULL, label="attention", layers=num_layers, heads=num_kv_heads, width=width)
        return cls(name, (group,), context_len)

    @classmethod
    def mla(
        cls,
        *,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        indexed: bool = False,
        context_len: int = 2048,
        name: str = "model",
    ) -> ModelShape:
        """Latent attention everywhere; indexed: with sparse attention's index keys."""
        group = LayerGroup(
            kind=FULL,
            label="latent and index keys" if indexed else "latent",
            layers=num_layers,
            width=kv_lora_rank + qk_rope_head_dim,
            extra_bytes=DSA_INDEX_BYTES if indexed else 0,
        )
        return cls(name, (group,), context_len)


def read_model(path: str | Path) -> ModelShape:
    """The shape of the model in a directory with a config.json, in such a file, or in a .gguf file.

    ValueError with a sentence when the file says something else; OSError when it can not be read.
    """
    from kvjax.sizing.gguf_header import read_metadata

    path = Path(path)
    if path.suffix == ".gguf":
        return from_gguf(read_metadata(path), path.stem)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); pass a config.json, its directory, or a .gguf file.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; a config.json with an object was expected.")
    return from_hf(config, path.name if path.is_dir() else path.parent.name)


def from_hf(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape that a transformers config.json describes; of a multimodal model, its text part."""
    if isinstance(config.get("text_config"), Mapping):
        config = {**config["text_config"]}
    layers = _size(config, "num_hidden_layers")
    context = _size(config, "max_position_embeddings", 2048)
    if config.get("kv_lora_rank") is not None:
        return ModelShape.mla(
            num_layers=layers,
            kv_lora_rank=_size(config, "kv_lora_rank"),
            qk_rope_head_dim=_size(config, "qk_rope_head_dim"),
            indexed=config.get("index_topk") is not None,
            context_len=context,
            name=name,
        )
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", max(1, _size(config, "hidden_size") // heads))
    window = 0 if config.get("use_sliding_window") is False else _size(config, "sliding_window", 0)
    kinds = _layer_kinds(config, layers, bool(window))
    attention = {"heads": kv_heads, "width": 2 * head_dim}
    groups = []
    if full := kinds.count(FULL):
        groups.append(LayerGroup(kind=FULL, label="attention", layers=full, **attention))
    if windowed := kinds.count(WINDOW):
        groups.append(LayerGroup(kind=WINDOW, label=f"sliding window {window}", layers=windowed, **attention))
    # Falcon-H1 runs attention and a state space model side by side in every layer.
    states = layers if config.get("model_type") == "falcon_h1" else kinds.count(STATE)
    if states:
        groups.append(_state_group(config, states))
    return ModelShape(name, tuple(groups), context, window if windowed else 0)


def from_gguf(metadata: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape that GGUF metadata describes."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError(f"{name} names no general.architecture; a GGUF file of a language model was expected.")
    fields = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    layers, context = _size(fields, "block_count"), _size(fields, "context_length", 2048)
    if "attention.kv_lora_rank" in fields:
        rank, rope = _size(fields, "attention.kv_lora_rank"), _size(fields, "rope.dimension_count")
        return ModelShape.mla(
            num_layers=layers, kv_lora_rank=rank, qk_rope_head_dim=rope, context_len=context, name=name
        )
    if _size(fields, "attention.sliding_window", 0):
        raise ValueError(
            f"{name} has sliding-window layers, and GGUF does not say which; plan from the model's config.json."
        )
    heads = _size(fields, "attention.head_count")
    k_dim = _size(fields, "attention.key_length", max(1, _size(fields, "embedding_length") // heads))
    return ModelShape.mha(
        num_layers=layers,
        num_kv_heads=_size(fields, "attention.head_count_kv", heads),
        head_dim=k_dim,
        v_head_dim=_size(fields, "attention.value_length", k_dim),
        context_len=context,
        name=name,
    )


def _layer_kinds(config: Mapping[str, Any], layers: int, window: bool) -> list[str]:
    model = config.get("model_type")
    types = config.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ValueError(f"config.json lists {len(types)} layer_types for {layers} layers; one each was expected.")
        kinds = {"sliding_attention": WINDOW, "linear_attention": STATE, "conv": STATE, "mamba": STATE}
        unknown = {t for t in types if t not in kinds and t not in ("full_attention", "attention")}
        if unknown:
            raise ValueError(f"config.json has layers of type {sorted(map(str, unknown))}, which kvjax does not size.")
        return [kinds.get(t, FULL) if window or t != "sliding_attention" else FULL for t in types]
    if model == "jamba":
        period, offset = _size(config, "attn_layer_period", 8), _size(config, "attn_layer_offset", 4)
        return [FULL if i % period == offset else STATE for i in range(layers)]
    if model == "bamba":
        attends = set(config.get("attn_layer_indices") or ())
        return [FULL if i in attends else STATE for i in range(layers)]
    if model in SHORT_CONV and isinstance(config.get("full_attn_idxs"), list):
        return [FULL if i in config["full_attn_idxs"] else STATE for i in range(layers)]
    if model in DELTA_NET:
        every = _size(config, "full_attention_interval", 4)
        return [FULL if (i + 1) % every == 0 else STATE for i in range(layers)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if window and isinstance(pattern, int) and pattern > 0:
        return [FULL if (i + 1) % pattern == 0 else WINDOW for i in range(layers)]
    first_windowed = _size(config, "max_window_layers", 0) if "use_sliding_window" in config else 0
    return [WINDOW if window and i >= first_windowed else FULL for i in range(layers)]


def _state_group(config: Mapping[str, Any], layers: int) -> LayerGroup:
    model, hidden = config.get("model_type"), _size(config, "hidden_size")
    if model in SHORT_CONV:
        conv, temporal, label = hidden * (_size(config, "conv_L_cache") - 1), 0, "short convolution"
    elif model in DELTA_NET:
        k = _size(config, "linear_num_key_heads") * _size(config, "linear_key_head_dim")
        heads, v_dim = _size(config, "linear_num_value_heads"), _size(config, "linear_value_head_dim")
        conv = (2 * k + heads * v_dim) * (_size(config, "linear_conv_kernel_dim") - 1)
        temporal, label = heads * _size(config, "linear_key_head_dim") * v_dim, "linear attention"
    elif model in MAMBA:
        state, taps = _size(config, "mamba_d_state"), _size(config, "mamba_d_conv") - 1
        inner = _size(config, "mamba_d_ssm", _size(config, "mamba_expand", 2) * hidden)
        # Mamba 2 convolves B and C along with x; Mamba 1 (Jamba) x alone.
        mixed = inner if model == "jamba" else inner + 2 * _size(config, "mamba_n_groups", 1) * state
        conv, temporal, label = mixed * taps, inner * state, "mamba"
    else:
        raise ValueError(f"config.json has recurrent layers of model_type {model!r}, which kvjax does not size.")
    return LayerGroup(kind=STATE, label=label, layers=layers, conv_values=conv, temporal_values=temporal)


def _size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"the model's {name} is {value!r}; a whole number of at least 0 was expected.")
    return value
