"""`HybridConfig`: what a decoder with recurrent layers needs to know, read from a transformers config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from models._untrusted import Fields, shown
from models.errors import CheckpointError

CAP = 1 << 20  # largest accepted size, far above real models


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """lfm2: a gated convolution over the last `kernel` tokens; its window is all the state there is."""

    channels: int
    kernel: int
    bias: bool

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The window: the last kernel - 1 inputs of each channel."""
        return self.channels, self.kernel - 1

    temporal_shape = None


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """qwen3_next: a matrix of key and value per head, decayed, corrected and read once per token."""

    key_heads: int
    value_heads: int
    key_dim: int  # per head
    value_dim: int
    kernel: int

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The window over q, k and v: the last kernel - 1 inputs of each channel."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim, self.kernel - 1

    @property
    def temporal_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """bamba, falcon_h1: a state [head_dim, state] per head with one decay per head and token."""

    heads: int
    head_dim: int
    groups: int  # of B and C; consecutive heads share one
    state: int
    kernel: int
    conv_bias: bool
    proj_bias: bool
    gated_norm: bool  # normalise y * silu(gate), each group on its own (bamba); else the gate alone (falcon_h1)
    dt_limit: tuple[float, float]

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The window over x, B and C: the last kernel - 1 inputs of each channel."""
        return self.inner + 2 * self.groups * self.state, self.kernel - 1

    @property
    def temporal_shape(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Constant factors of falcon_h1; 1 in every other family."""

    embedding: float = 1.0
    lm_head: float = 1.0
    key: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5  # on z, x, B, C, dt
    mlp: tuple[float, ...] = (1.0, 1.0)  # on the gate, on the output


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Sizes and switches of one decoder; hashable, so that it can be static data of a jitted function."""

    family: str  # "lfm2", "qwen3_next", "falcon_h1" or "bamba"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention_layers: tuple[int, ...]  # global ids, ascending; a layer may be in both lists
    recurrent_layers: tuple[int, ...]
    recurrent: ShortConv | GatedDelta | Mamba2
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading entries of each head that rotate
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    output_gate: bool  # attention's output is multiplied by sigmoid of a gate that q's map makes (qwen3_next)
    tie_word_embeddings: bool
    max_context_len: int
    multipliers: Multipliers = Multipliers()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"The model has {self.num_heads} attention heads over {self.num_kv_heads} KV heads; "
                "a whole number of heads per KV head was expected."
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise CheckpointError(
                f"The model rotates {self.rotary_dim} of {self.head_dim} entries; an even number of them was expected."
            )
        if not self.attention_layers or not self.recurrent_layers:
            raise CheckpointError("A hybrid model needs an attention layer and a recurrent layer; one kind is missing.")
        cell = self.recurrent
        if isinstance(cell, GatedDelta) and cell.value_heads % cell.key_heads:
            raise CheckpointError(f"{cell.value_heads} value heads over {cell.key_heads} key heads do not divide.")
        if isinstance(cell, Mamba2) and cell.heads % cell.groups:
            raise CheckpointError(f"{cell.heads} state heads over {cell.groups} groups do not divide.")


ARCHITECTURES = {
    "Lfm2ForCausalLM": "lfm2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "FalconH1ForCausalLM": "falcon_h1",
    "BambaForCausalLM": "bamba",
}


def from_hf(config: Mapping[str, Any]) -> HybridConfig:
    """The config of a transformers config.json; raises `CheckpointError` for what these decoders do not compute."""
    fields = Fields(config, "config.json")
    architectures = fields.sequence("architectures", [])
    family = ARCHITECTURES.get(architectures[0]) if len(architectures) == 1 else None
    if family is None:
        raise CheckpointError(
            f"config.json has architectures {shown(architectures)}; one of {', '.join(ARCHITECTURES)} was expected."
        )
    if fields.flag("attention_bias", False) or fields.flag("mlp_bias", False) or fields.flag("projectors_bias", False):
        raise CheckpointError("config.json asks for biases of attention or MLP; hybrid models are built without them.")
    if fields.text("hidden_act", "silu") != "silu":
        raise CheckpointError("config.json has a hidden_act other than silu; silu is built.")
    layers, hidden = _size(fields, "num_hidden_layers"), _size(fields, "hidden_size")
    heads = _size(fields, "num_attention_heads")
    head_dim = _size(fields, "head_dim", hidden // heads)
    rope = Fields(fields.mapping("rope_parameters"), "config.json's rope_parameters")
    if rope.text("rope_type", "default") != "default":
        raise CheckpointError(f"config.json has rope_type {shown(rope.text('rope_type'))}; default is built.")
    attention, recurrent, cell = _LAYERS[family](fields, layers, hidden)
    return HybridConfig(
        family=family,
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_inner(fields, family),
        num_layers=layers,
        attention_layers=attention,
        recurrent_layers=recurrent,
        recurrent=cell,
        num_heads=heads,
        num_kv_heads=_size(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope.number("partial_rotary_factor", 1.0)),
        rope_theta=rope.number("rope_theta"),
        norm_eps=fields.number("norm_eps" if family == "lfm2" else "rms_norm_eps"),
        qk_norm=family in ("lfm2", "qwen3_next"),
        output_gate=family == "qwen3_next",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_context_len=_size(fields, "max_position_embeddings", 2048),
        multipliers=_multipliers(fields) if family == "falcon_h1" else Multipliers(),
    )


def _size(fields: Fields, name: str, *default: int) -> int:
    value = fields.integer(name, *default)
    if not 1 <= value <= CAP:
        raise CheckpointError(f"The model's {name} is {shown(value)}; an integer from 1 to {CAP} was expected.")
    return value


def _inner(fields: Fields, family: str) -> int:
    inner = _size(fields, "intermediate_size")
    if family != "lfm2" or not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = _size(fields, "block_multiple_of", 256)
    return -(-inner // multiple) * multiple


def _kinds(fields: Fields, layers: int, names: tuple[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers that attend, layers that recur) of a layer_types list of the two names."""
    kinds = fields.sequence("layer_types")
    if len(kinds) != layers or any(kind not in names for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types {shown(kinds)}; {layers} entries of {names[0]} and {names[1]} were expected."
        )
    attention = tuple(i for i, kind in enumerate(kinds) if kind == names[0])
    return attention, tuple(i for i in range(layers) if i not in attention)


def _lfm2(fields: Fields, layers: int, hidden: int):
    kernel = _size(fields, "conv_L_cache")
    cell = ShortConv(hidden, kernel, fields.flag("conv_bias", False))
    return *_kinds(fields, layers, ("full_attention", "conv")), _with_window(cell)


def _qwen3_next(fields: Fields, layers: int, hidden: int):
    dense = fields.sequence("mlp_only_layers", [])
    if fields.integer("num_experts", 0) > 0 and sorted(map(str, dense)) != sorted(map(str, range(layers))):
        raise CheckpointError("config.json has experts; only dense layers are built (mlp_only_layers naming all).")
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    cell = GatedDelta(*(_size(fields, f"linear_{name}") for name in sizes))
    return *_kinds(fields, layers, ("full_attention", "linear_attention")), _with_window(cell)


def _mamba2(fields: Fields, hidden: int, *, inner: int, gated_norm: bool) -> Mamba2:
    heads, head_dim = _size(fields, "mamba_n_heads"), fields.values.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = inner // heads
    limit = tuple(_number(value) for value in fields.sequence("time_step_limit", [0.0, math.inf]))
    if heads * head_dim != inner or len(limit) != 2:
        raise CheckpointError(
            f"config.json has {heads} state heads of {shown(head_dim)} for {inner} inner channels, and a "
            f"time_step_limit of {len(limit)} numbers; they do not fit together."
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=_size(fields, "mamba_n_groups"),
        state=_size(fields, "mamba_d_state"),
        kernel=_size(fields, "mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias", False),
        gated_norm=gated_norm,
        dt_limit=limit,
    )


def _number(value: Any) -> float:
    """A number, or transformers' way to write an infinite one: {"__float__": "Infinity"}."""
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"config.json has {shown(value)} in time_step_limit; a number was expected.")
    return float(value)


def _bamba(fields: Fields, layers: int, hidden: int):
    attention = tuple(fields.sequence("attn_layer_indices"))
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in attention):
        raise CheckpointError(f"config.json has attn_layer_indices {shown(attention)}; layer ids were expected.")
    attention = tuple(sorted(set(attention)))
    cell = _mamba2(fields, hidden, inner=_size(fields, "mamba_expand") * hidden, gated_norm=True)
    return attention, tuple(i for i in range(layers) if i not in attention), _with_window(cell)


def _falcon_h1(fields: Fields, layers: int, hidden: int):
    if fields.flag("mamba_rms_norm", False):
        raise CheckpointError("config.json sets mamba_rms_norm; falcon_h1 is built without the gated norm.")
    every = tuple(range(layers))
    inner = fields.integer("mamba_d_ssm", None) or _size(fields, "mamba_expand") * hidden
    return every, every, _with_window(_mamba2(fields, hidden, inner=inner, gated_norm=False))


def _with_window(cell: Any) -> Any:
    if cell.kernel < 2:
        raise CheckpointError(f"The model's convolution spans {cell.kernel} token; 2 or more were expected.")
    return cell


def _multipliers(fields: Fields) -> Multipliers:
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    single = {name: fields.number(f"{name}_multiplier", 1.0) for name in names}
    ssm, mlp = fields.sequence("ssm_multipliers", [1.0] * 5), fields.sequence("mlp_multipliers", [1.0] * 2)
    if len(ssm) != 5 or len(mlp) != 2:
        raise CheckpointError(
            f"config.json has {len(ssm)} ssm_multipliers and {len(mlp)} mlp_multipliers, not 5 and 2."
        )
    return Multipliers(**single, ssm=tuple(map(_number, ssm)), mlp=tuple(map(_number, mlp)))


_LAYERS = {"lfm2": _lfm2, "qwen3_next": _qwen3_next, "falcon_h1": _falcon_h1, "bamba": _bamba}
