"""The small parts of a decoder layer: linear map, RMS norm, rotary embedding, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import SWIGLU_ALPHA, SWIGLU_LIMIT, ModelConfig
from models.matmul import project


class Linear(nnx.Module):
    """x @ kernel.T (+ bias)."""

    def __init__(self, kernel: jax.Array, bias: jax.Array | None = None, *, precision: Any = None):
        self.kernel = nnx.Param(kernel)  # [out, in]
        self.bias = None if bias is None else nnx.Param(bias)  # [out]
        self.precision = precision

    @classmethod
    def named(cls, weights: Mapping[str, jax.Array], name: str, *, precision: Any = None) -> Linear:
        """weights[name], with weights[name + "_bias"] where the checkpoint has one."""
        return cls(weights[name], weights.get(f"{name}_bias"), precision=precision)

    @classmethod
    def joined(cls, weights: Mapping[str, jax.Array], names: Sequence[str], *, precision: Any = None) -> Linear:
        """The named maps of one input as a single map, outputs side by side: one pass over x, fewer and longer
        matmuls. Take the parts with `split`."""
        kernels = [weights[name] for name in names]
        biases = [weights.get(f"{name}_bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            filled = zip(biases, kernels, strict=True)
            bias = jnp.concatenate([jnp.zeros(w.shape[0], w.dtype) if b is None else b for b, w in filled])
        return cls(jnp.concatenate(kernels), bias, precision=precision)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., in] -> [..., out], in the kernel's dtype."""
        out = project(x, self.kernel[...], precision=self.precision)
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; the mean square in float32. zero_centred: times 1 + weight (gemma3)."""

    def __init__(self, weight: jax.Array, eps: float, *, zero_centred: bool = False):
        self.weight = nnx.Param(weight)  # [features]
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., features] -> same shape and dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.zero_centred:  # in float32, for in a narrower type 1 + weight loses the weight
            return (normed * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[...].astype(x.dtype)


def split(x: jax.Array, *widths: int) -> list[jax.Array]:
    """The last axis of x cut into parts of the given widths."""
    return jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=-1)


def norm_of(config: ModelConfig, weights: Mapping[str, jax.Array], name: str) -> RMSNorm:
    """The norm weights[name] as the model has its norms."""
    return RMSNorm(weights[name], config.rms_norm_eps, zero_centred=config.zero_centred_norms)


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes into the down map: activation(gate) * up, any one shape; see `models.config.ACTIVATIONS`."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return jax.nn.silu(gate) * up


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, weights: Mapping[str, jax.Array], *, activation: str = "silu", precision: Any = None):
        self.activation = activation
        self.gate_up = Linear.joined(weights, ("gate", "up"), precision=precision)
        self.down = Linear.named(weights, "down", precision=precision)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> same shape."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(gated(self.activation, gate, up))


def rope_angles(positions: jax.Array, inv_freq: jax.Array, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """factor * (cos, sin), f32 positions.shape + [pairs], of the angle position * inv_freq of each rotated pair."""
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    if factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array], *, interleaved: bool) -> jax.Array:
    """Rotate the pairs of x's last axis; same shape and dtype, computed in float32.

    x: [b, t, heads, 2 * pairs]; angles: two f32[b, t, pairs].
    interleaved: pairs are entries (0, 1), (2, 3), ... (DeepSeek); otherwise entry i pairs with i + pairs (Llama).
    """
    cos, sin = (part[..., None, :] for part in angles)
    wide = x.astype(jnp.float32)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return rotated.astype(x.dtype)
