"""A mixture of experts in place of a layer's MLP (gpt_oss): a router picks a few of many small MLPs for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.config import ModelConfig
from models.layers import Linear, gated


class ExpertMaps(nnx.Module):
    """The same linear map of every expert."""

    def __init__(self, weights: Mapping[str, jax.Array], name: str):
        self.kernel = nnx.Param(weights[name])  # [experts, in, out]
        self.bias = nnx.Param(weights[f"{name}_bias"])  # [experts, out]

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        return self.kernel[...], self.bias[...]


class Experts(nnx.Module):
    """sum of weight_e * expert_e(x) over the experts that the router prefers, the weights a softmax over those.

    One expert after the other, over all tokens, with weight 0 where it was not picked: right for any number of experts,
    and fast for few. Nothing is ever routed to a place that can overflow.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array], *, precision: Any = None):
        self.picked = config.experts_per_token or 1
        self.activation = config.activation
        self.precision = precision
        self.router = Linear.named(weights, "router", precision=precision)
        self.gate, self.up, self.down = (ExpertMaps(weights, f"experts_{name}") for name in ("gate", "up", "down"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> same shape."""
        scores, chosen = lax.top_k(self.router(x), self.picked)
        share = jax.nn.softmax(scores, axis=-1)
        maps = (self.gate.arrays(), self.up.arrays(), self.down.arrays())

        def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
            index, (gate, up, down) = one
            weight = jnp.sum(jnp.where(chosen == index, share, 0), axis=-1, keepdims=True)
            inner = gated(self.activation, self._map(x, gate), self._map(x, up))
            return total + weight * self._map(inner, down), None

        experts = jnp.arange(maps[0][0].shape[0])
        return lax.scan(add, jnp.zeros_like(x), (experts, maps))[0]

    def _map(self, x: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
        kernel, bias = arrays
        return jnp.matmul(x, kernel, precision=self.precision) + bias
