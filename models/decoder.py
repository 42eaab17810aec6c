"""A decoder-only transformer whose keys and values live in a paged pool that is passed in and returned.

Use it split: the graph outside, the weights as an argument, merged inside the jitted step.

    graph, weights = nnx.split(Decoder.from_weights(config, checkpoint.weights))

    @functools.partial(jax.jit, donate_argnames="pool")
    def step(weights, tokens, positions, pool, batch):
        return nnx.merge(graph, weights)(tokens, positions, pool, batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.indexing import take
from models.batch import Batch
from models.config import ModelConfig
from models.experts import Experts
from models.gqa import GQAttention
from models.layers import MLP, Linear, norm_of, rope_angles
from models.matmul import project
from models.mla import MLAttention
from models.rope import rope_inv_freq
from models.weights import expected_tensors

Pool = TypeVar("Pool")
KVScales = Sequence[tuple[float | None, float | None]]


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); with sandwich norms the results are normed too."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array], layer_id: int, precision: Any, scales):
        self.input_norm = norm_of(config, weights, "input_norm")
        self.post_norm = norm_of(config, weights, "post_norm")
        sandwich = config.sandwich_norms
        self.attention_out_norm = norm_of(config, weights, "attention_out_norm") if sandwich else None
        self.mlp_out_norm = norm_of(config, weights, "mlp_out_norm") if sandwich else None
        if config.is_mla:
            self.attention = MLAttention(config, weights, layer_id, precision=precision)
        else:
            k_scale, v_scale = scales
            self.attention = GQAttention(
                config, weights, layer_id, precision=precision, k_scale=k_scale, v_scale=v_scale
            )
        if config.num_experts is not None:
            self.mlp = Experts(config, weights, precision=precision)
        else:
            self.mlp = MLP(weights, activation=config.activation, precision=precision)

    def __call__(self, x, positions, angles, pool, batch: Batch, implementation: str | None):
        with jax.named_scope("attention"):
            out, pool = self.attention(
                self.input_norm(x), positions, angles, pool, batch, implementation=implementation
            )
            x = x + (out if self.attention_out_norm is None else self.attention_out_norm(out))
        with jax.named_scope("mlp"):
            out = self.mlp(self.post_norm(x))
            return x + (out if self.mlp_out_norm is None else self.mlp_out_norm(out)), pool


class Decoder(nnx.Module):
    """Embedding, unrolled layers, final norm, head. Make it with `from_weights`, or `abstract` to compile only."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array], precision: Any, scales: KVScales):
        self.config = config
        self.precision = precision
        self.embed = nnx.Param(weights["embed"])  # [vocab, hidden]
        self.layers = nnx.List(
            Block(config, _layer(weights, i), i, precision, scales[i]) for i in range(config.num_layers)
        )
        self.norm = norm_of(config, weights, "norm")
        # Tied: logits are x @ embed.T, and the head has no weights of its own.
        self.head = None if config.tie_word_embeddings else Linear(weights["lm_head"], precision=precision)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Mapping[str, jax.Array | np.ndarray],
        *,
        dtype: Any = None,
        precision: Any = None,
        kv_scales: KVScales | None = None,
    ) -> Decoder:
        """The decoder of a checkpoint's weights (names and shapes: `models.weights.expected_tensors`).

        dtype: of parameters and activations; None: as the weights came.
        precision: of the matmuls, a `jax.default_matmul_precision` name. None: "highest" for float32 weights (a GPU
            would round the factors to TF32), the platform's default for narrower ones.
        kv_scales: (k_scale, v_scale) of each layer, for fp8 pools: stored keys are k / k_scale. None: 1.
        Raises ValueError for weights that are missing, unknown or of another shape.
        """
        expected = expected_tensors(config)
        odd = sorted(expected.keys() ^ weights.keys())
        if odd:
            missing = [name for name in odd if name in expected]
            raise ValueError(
                f"the weights do not fit the config: {len(missing)} missing ({', '.join(missing[:4])}), "
                f"{len(odd) - len(missing)} unknown ({', '.join([n for n in odd if n not in expected][:4])})."
            )
        for name, shape in expected.items():
            if tuple(weights[name].shape) != shape:
                raise ValueError(f"weight {name} has shape {tuple(weights[name].shape)}, the config needs {shape}.")
        if kv_scales is not None and config.is_mla:
            raise ValueError("kv_scales were given for an MLA model, whose pool stores the latent without scales.")
        scales = [(None, None)] * config.num_layers if kv_scales is None else list(kv_scales)
        if len(scales) != config.num_layers:
            raise ValueError(f"kv_scales has {len(scales)} pairs for {config.num_layers} layers; one each is needed.")
        cast = {name: jnp.asarray(w, dtype) for name, w in weights.items()}
        if precision is None and cast["embed"].dtype == jnp.float32:
            precision = "highest"
        return cls(config, cast, precision, scales)

    @classmethod
    def abstract(cls, config: ModelConfig, *, dtype: Any = jnp.float32, **kwargs: Any) -> Decoder:
        """The same with shapes in place of weights: nothing is allocated. To trace or compile ahead of time."""

        def build() -> Decoder:
            weights = {name: jnp.zeros(shape, dtype) for name, shape in expected_tensors(config).items()}
            return cls.from_weights(config, weights, **kwargs)

        return nnx.eval_shape(build)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        pool: Pool,
        batch: Batch,
        *,
        logits: str = "last",
        implementation: str | None = None,
    ) -> tuple[jax.Array, Pool]:
        """Run one chunk: write its keys and values into the pool, attend through the page table.

        tokens, positions: i32[b, t]; t == 1 is decode. What they hold on padding does not matter.
        pool: an `MHATokenToKVPool` or `MLATokenToKVPool` that fits the config, or an `SWAKVPool` for one with window
            layers, whose batch then has been made with the ledger.
        logits: "last", those of each lane's last real token, f32[b, vocab]; "all", f32[b, t, vocab].
            On padding they are finite and mean nothing.
        implementation: of the write and the attention, see `pallas_kernels.registry`.
        Returns (logits, pool).
        """
        if logits not in ("last", "all"):
            raise ValueError(f'logits must be "last" or "all", got {logits!r}.')
        with jax.named_scope("embed"):
            x = take(self.embed[...], tokens)
            if self.config.embed_scale != 1.0:
                x = x * jnp.asarray(self.config.embed_scale, x.dtype)
            angles = self._angles(positions)
            window_angles = angles
            if self.config.window_rope_theta is not None:
                window_angles = self._angles(positions, of_window_layers=True)
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{i}"):
                turned = window_angles if i in self.config.window_layers else angles
                x, pool = layer(x, positions, turned, pool, batch, implementation)
        with jax.named_scope("head"):
            if logits == "last":
                last = jnp.clip(batch.q_lens - 1, 0, x.shape[1] - 1)
                x = x[:, 0] if x.shape[1] == 1 else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
            return self._logits(self.norm(x)), pool

    def _angles(self, positions: jax.Array, *, of_window_layers: bool = False) -> tuple[jax.Array, jax.Array]:
        scaling = self.config.rope_scaling
        factor = 1.0 if scaling is None or of_window_layers else scaling.attention_factor
        inv_freq = rope_inv_freq(self.config, of_window_layers=of_window_layers)
        return rope_angles(positions, jnp.asarray(inv_freq), factor)

    def _logits(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> f32[..., vocab]."""
        matrix = self.embed if self.head is None else self.head.kernel
        logits = project(x, matrix[...], precision=self.precision, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _layer(weights: Mapping[str, jax.Array], index: int) -> dict[str, jax.Array]:
    """The weights of one layer, without "layers.{index}."."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
