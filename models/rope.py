"""Rotary frequencies: the plain ones and the scalings that this project supports.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023) for "linear"; the Llama 3.1
frequency bands as in transformers' `_compute_llama3_parameters` for "llama3"; YaRN (Peng et al. 2023) as in
transformers' `_compute_yarn_parameters` for "yarn".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from models._untrusted import Fields, shown
from models.errors import CheckpointError

if TYPE_CHECKING:
    from models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the plain frequencies are changed; hashable, so that it can ride in a static config."""

    kind: str  # "linear", "llama3", "yarn" or "factors"
    factor: float = 1.0  # linear, llama3 and yarn: how many times longer the context became
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are stretched by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high stay as they are
    original_max_position: int = 8192  # llama3 and yarn: context length before scaling
    beta_fast: float = 32.0  # yarn: frequencies with more turns over the original context stay as they are
    beta_slow: float = 1.0  # yarn: frequencies with fewer turns are stretched by `factor`
    truncate: bool = True  # yarn: the band between them begins and ends at whole pairs
    attention_factor: float = 1.0  # yarn: on cos and sin, so its square on the scores
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency (GGUF's rope_freqs.weight)

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn", "factors"):
            raise CheckpointError(
                f"Rope scaling {shown(self.kind)} is not supported; default, linear, llama3 and yarn are."
            )
        if not 0 < self.beta_slow < self.beta_fast <= 1e6 or not 0 < self.attention_factor <= 1e3:
            raise CheckpointError(
                f"Rope scaling has beta_slow {self.beta_slow}, beta_fast {self.beta_fast} and attention_factor "
                f"{self.attention_factor}; 0 < slow < fast and a factor in (0, 1000] were expected."
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor <= 1e6:
            raise CheckpointError(
                f"Rope scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; 0 < low < high was expected."
            )
        if not 0 < self.original_max_position <= 1 << 24:
            raise CheckpointError(
                f"Rope scaling has an original context of {self.original_max_position}; 1 to 2**24 was expected."
            )
        if not all(math.isfinite(factor) and 0 < factor <= 1e6 for factor in (self.factor, *self.factors)):
            raise CheckpointError("Rope scaling has a factor outside of (0, 1e6]; a positive one was expected.")


def rope_inv_freq(config: ModelConfig, *, of_window_layers: bool = False) -> np.ndarray:
    """Angle per position of each rotated pair, float32[head_dim / 2] (MLA: of the rotary part of a head).

    of_window_layers: those of the layers that slide, where the model gives them a base of their own.
    """
    # float64 until the end: the powers differ between libraries by a few float32 ulps otherwise.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    if of_window_layers and config.window_rope_theta is not None:
        return (1.0 / config.window_rope_theta**exponents).astype(np.float32)
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq.astype(np.float32)
    if scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "llama3":
        inv_freq = _llama3_bands(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq = _yarn_ramp(inv_freq, scaling, config.rope_theta)
    else:
        inv_freq = inv_freq / np.asarray(scaling.factors)
    return inv_freq.astype(np.float32)


def _llama3_bands(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Short wavelengths stay, long ones are stretched, those between go smoothly from one to the other."""
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)  # 1: as it was; 0: fully stretched
    return (1 - share) * inv_freq / scaling.factor + share * inv_freq


def _yarn_ramp(inv_freq: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Fast pairs stay, slow ones are stretched, and in between the share falls linearly with the pair's number."""
    pairs = len(inv_freq)

    def pair_with(turns: float) -> float:
        return pairs * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def rope_from_hf(
    fields: Fields, *, per_layer: bool = False, yarn: bool = False
) -> tuple[float, RopeScaling | None, float | None]:
    """(theta, scaling, theta of the window layers) of a transformers config: `rope_parameters`, or the older fields.

    per_layer: full and window layers have parameters of their own (gemma3). yarn: the family may use it.
    """
    if per_layer:
        return _rope_per_layer(fields)
    theta, scaling = _rope(fields, yarn)
    return theta, scaling, None


def _rope_per_layer(fields: Fields) -> tuple[float, RopeScaling | None, float | None]:
    kinds = Fields(fields.mapping("rope_parameters", {}), f"{fields.where}'s rope parameters")
    if "full_attention" not in kinds.values:  # older configs: one theta each, the scaling for the full layers
        theta, scaling = _rope(Fields({"rope_theta": 1e6, **_present(fields)}, fields.where), False)
        return theta, scaling, fields.number("rope_local_base_freq", 10000.0)
    full, local = (
        _rope(Fields({"rope_parameters": kinds.mapping(kind)}, fields.where), False)
        for kind in ("full_attention", "sliding_attention")
    )
    if local[1] is not None:
        raise CheckpointError(f"{fields.where} scales the rotation of its window layers; plain ones are supported.")
    return (*full, local[0])


def _present(fields: Fields) -> dict:
    return {name: value for name, value in fields.values.items() if value is not None}


def _yarn(inner: Fields, fields: Fields) -> RopeScaling:
    factor = inner.number("factor")
    attention = inner.number("attention_factor", None)
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=inner.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings", 2048)
        ),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.flag("truncate", True),
        attention_factor=attention,
    )


def _rope(fields: Fields, yarn: bool) -> tuple[float, RopeScaling | None]:
    parameters = dict(fields.mapping("rope_scaling", {}))
    # Recent configs keep theta in the same object; older ones beside it.
    parameters.update(fields.mapping("rope_parameters", {}))
    inner = Fields(parameters, f"{fields.where}'s rope parameters")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    if inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{fields.where} rotates a part of each head only; that is not supported.")
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind == "default":
        if any(isinstance(value, dict) for value in parameters.values()):
            raise CheckpointError(f"{fields.where} has rope parameters per layer type; that is not supported.")
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=inner.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind=kind,
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position=inner.integer("original_max_position_embeddings"),
        )
    if kind == "yarn" and yarn:
        return theta, _yarn(inner, fields)
    # "factors" is this project's own kind: a config can not ask for it by name.
    raise CheckpointError(
        f"{fields.where} asks for rope scaling {shown(kind)}; default, linear and llama3 are supported."
    )


def rope_from_gguf(fields: Fields, prefix: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of GGUF metadata whose keys start with `prefix`, for example "llama"."""
    theta = fields.number(f"{prefix}.rope.freq_base", 10000.0)
    legacy = fields.number(f"{prefix}.rope.scale_linear", 1.0)
    kind = fields.text(f"{prefix}.rope.scaling.type", "linear" if legacy != 1.0 else "none")
    if kind == "none":
        return theta, None
    if kind == "linear":
        factor = fields.number(f"{prefix}.rope.scaling.factor", legacy)
        return theta, RopeScaling(kind="linear", factor=factor)
    raise CheckpointError(f"{fields.where} asks for rope scaling {shown(kind)}; none and linear are supported.")
