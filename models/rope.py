"""Rotary frequencies: the plain ones and the scalings that this project supports.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023) for "linear"; the Llama 3.1
frequency bands as in transformers' `_compute_llama3_parameters` for "llama3".
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

    kind: str  # "linear", "llama3" or "factors"
    factor: float = 1.0  # linear and llama3: how many times longer the context became
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are stretched by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high stay as they are
    original_max_position: int = 8192  # llama3: context length before scaling
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency (GGUF's rope_freqs.weight)

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "factors"):
            raise CheckpointError(f"Rope scaling {shown(self.kind)} is not supported; default, linear and llama3 are.")
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


def rope_inv_freq(config: ModelConfig) -> np.ndarray:
    """Angle per position of each rotated pair, float32[head_dim / 2] (MLA: of the rotary part of a head)."""
    # float64 until the end: the powers differ between libraries by a few float32 ulps otherwise.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq.astype(np.float32)
    if scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "llama3":
        inv_freq = _llama3_bands(inv_freq, scaling)
    else:
        inv_freq = inv_freq / np.asarray(scaling.factors)
    return inv_freq.astype(np.float32)


def _llama3_bands(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Short wavelengths stay, long ones are stretched, those between go smoothly from one to the other."""
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)  # 1: as it was; 0: fully stretched
    return (1 - share) * inv_freq / scaling.factor + share * inv_freq


def rope_from_hf(fields: Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a transformers config: `rope_parameters`, or the older two separate fields."""
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
