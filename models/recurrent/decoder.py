"""`HybridDecoder`: a decoder whose attention layers use a paged pool and whose recurrent layers use state slots.

graph, weights = nnx.split(HybridDecoder.from_weights(config, weights))

@functools.partial(jax.jit, donate_argnames="pool")
def step(weights, tokens, positions, pool, batch, slots):
    return nnx.merge(graph, weights)(tokens, positions, pool, batch, slots)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.indexing import take
from kvjax.pools import MHATokenToKVPool
from kvjax.recurrent import HybridLinearKVPool, MambaPool
from models.attention import paged_attention
from models.batch import Batch
from models.layers import Linear, RMSNorm, apply_rope, rope_angles
from models.matmul import project
from models.recurrent import cells
from models.recurrent.config import GatedDelta, HybridConfig, ShortConv
from models.recurrent.weights import expected_tensors


def create_pool(
    config: HybridConfig, size: int, page_size: int, slots: int, dtype: Any = jnp.float32, store_dtype: Any = None
) -> HybridLinearKVPool:
    """Keys and values of `size` tokens for the attention layers, `slots` states for the recurrent ones.

    dtype: of keys, values and convolution windows; temporal states are float32.
    """
    kv = MHATokenToKVPool.create(
        size,
        page_size,
        len(config.attention_layers),
        config.num_kv_heads,
        config.head_dim,
        dtype=dtype,
        store_dtype=store_dtype,
    )
    cell = config.recurrent
    mamba = MambaPool.create(
        slots,
        config.recurrent_layers,
        [cell.conv_shape],
        cell.temporal_shape,
        conv_dtype=dtype,
        conv_store_dtype=store_dtype,
    )
    return HybridLinearKVPool.create(kv, mamba, config.attention_layers)


class Attention(nnx.Module):
    """Grouped-query attention with rotation of the leading entries, optional per-head norms and output gate."""

    def __init__(self, config: HybridConfig, weights: Mapping[str, jax.Array], layer_id: int, precision: Any):
        self.config, self.layer_id, self.precision = config, layer_id, precision
        self.q, self.k, self.v, self.o = (Linear.named(weights, n, precision=precision) for n in ("q", "k", "v", "o"))
        self.q_norm = RMSNorm(weights["q_norm"], config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(weights["k_norm"], config.norm_eps) if config.qk_norm else None

    def __call__(self, x, positions, angles, pool, batch: Batch, implementation: str | None):
        """x: [b, t, hidden]. Returns ([b, t, hidden], pool)."""
        c = self.config
        b, t, _ = x.shape
        q = self.q(x).reshape(b, t, c.num_heads, -1)
        q, gate = jnp.split(q, [c.head_dim], axis=-1)  # an empty gate without output_gate
        k = self.k(x).reshape(b, t, c.num_kv_heads, c.head_dim) * c.multipliers.key
        v = self.v(x).reshape(b * t, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotated(q, angles), self._rotated(k, angles)
        k = k.reshape(b * t, c.num_kv_heads, c.head_dim)
        with jax.named_scope("write_kv"):
            pool = pool.set_kv_buffer(self.layer_id, batch.write_loc, k, v, implementation=implementation)
        out = paged_attention(
            q,
            pool,
            self.layer_id,
            batch,
            positions,
            c.head_dim**-0.5,
            precision=self.precision,
            implementation=implementation,
        )
        if c.output_gate:
            out = out * jax.nn.sigmoid(gate)
        return self.o(out.reshape(b, t, -1)), pool

    def _rotated(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        turning, rest = jnp.split(x, [self.config.rotary_dim], axis=-1)
        return jnp.concatenate([apply_rope(turning, angles, interleaved=False), rest], axis=-1)


class Recurrence(nnx.Module):
    """One of the cells, with its weights; reads and writes the states of the lanes' slots."""

    def __init__(self, config: HybridConfig, weights: Mapping[str, jax.Array], layer_id: int, precision: Any):
        self.config, self.layer_id, self.eps = config, layer_id, config.norm_eps
        cell = config.recurrent
        self.conv = nnx.Param(weights["conv"])  # [channels, kernel]
        self.conv_bias = nnx.Param(weights["conv_bias"]) if "conv_bias" in weights else None
        self.project_out = Linear.named(weights, "out", precision=precision)
        if isinstance(cell, GatedDelta):
            self.qkvz, self.ba = (Linear.named(weights, n, precision=precision) for n in ("qkvz", "ba"))
        else:
            self.project_in = Linear.named(weights, "in", precision=precision)
        if not isinstance(cell, ShortConv):
            self.a_log, self.dt_bias = nnx.Param(weights["A_log"]), nnx.Param(weights["dt_bias"])
        if "D" in weights:
            self.skip = nnx.Param(weights["D"])
        self.state_norm = RMSNorm(weights["state_norm"], config.norm_eps) if "state_norm" in weights else None

    def bias(self, name: str) -> jax.Array | None:
        """A bias, where the checkpoint has one."""
        held = getattr(self, name)
        return None if held is None else held[...]

    def __call__(self, x, pool: HybridLinearKVPool, slots: jax.Array, lens: jax.Array):
        """x: [b, t, hidden]; slots, lens: i32[b]. Returns ([b, t, hidden], pool)."""
        cell = self.config.recurrent
        with jax.named_scope("read_state"):
            (window,), state = pool.read_state(self.layer_id, slots)
        if isinstance(cell, ShortConv):
            out, window, state = cells.short_conv(cell, self, x, window, lens)
        elif state is None:
            raise ValueError(f"layer {self.layer_id} needs a temporal state, but this pool has none; use create_pool.")
        elif isinstance(cell, GatedDelta):
            out, window, state = cells.gated_delta(cell, self, x, window, state, lens)
        else:
            factors = self.config.multipliers
            x = x * factors.ssm_in
            out, window, state = cells.mamba2(cell, self, x, window, state, lens, factors.ssm)
            out = out * factors.ssm_out
        with jax.named_scope("write_state"):
            return out, pool.write_state(self.layer_id, slots, [window], state)


class Block(nnx.Module):
    """x + attention(norm(x)) + recurrence(norm(x)), whichever the layer has; then x + mlp(norm(x))."""

    def __init__(self, config: HybridConfig, weights: Mapping[str, jax.Array], layer_id: int, precision: Any):
        self.factors = config.multipliers
        self.input_norm = RMSNorm(weights["input_norm"], config.norm_eps)
        self.post_norm = RMSNorm(weights["post_norm"], config.norm_eps)
        attends, recurs = layer_id in config.attention_layers, layer_id in config.recurrent_layers
        self.attention = Attention(config, weights, layer_id, precision) if attends else None
        self.recurrence = Recurrence(config, weights, layer_id, precision) if recurs else None
        self.gate, self.up, self.down = (Linear.named(weights, n, precision=precision) for n in ("gate", "up", "down"))

    def __call__(self, x, positions, angles, pool, batch: Batch, slots, implementation):
        normed, f = self.input_norm(x), self.factors
        if self.recurrence is not None:
            with jax.named_scope("recurrence"):
                out, pool = self.recurrence(normed, pool, slots, batch.q_lens)
                x = x + out
        if self.attention is not None:
            with jax.named_scope("attention"):
                out, pool = self.attention(normed * f.attention_in, positions, angles, pool, batch, implementation)
                x = x + out * f.attention_out
        with jax.named_scope("mlp"):
            normed = self.post_norm(x)
            inner = self.up(normed) * jax.nn.silu(self.gate(normed) * f.mlp[0])
            return x + self.down(inner) * f.mlp[1], pool


class HybridDecoder(nnx.Module):
    """Embedding, unrolled layers, final norm, head. Make it with `from_weights`."""

    def __init__(self, config: HybridConfig, weights: Mapping[str, jax.Array], precision: Any):
        self.config, self.precision = config, precision
        self.embed = nnx.Param(weights["embed"])  # [vocab, hidden]
        self.layers = nnx.List(Block(config, _layer(weights, i), i, precision) for i in range(config.num_layers))
        self.norm = RMSNorm(weights["norm"], config.norm_eps)
        self.head = None if config.tie_word_embeddings else Linear(weights["lm_head"], precision=precision)

    @classmethod
    def from_weights(
        cls,
        config: HybridConfig,
        weights: Mapping[str, jax.Array | np.ndarray],
        *,
        dtype: Any = None,
        precision: Any = None,
    ) -> HybridDecoder:
        """The decoder of canonical weights (`models.recurrent.weights.expected_tensors`).

        dtype: of parameters and activations; None: as they came. precision: of the matmuls; None: "highest" for
        float32 weights. ValueError for weights that are missing, unknown or of another shape.
        """
        expected, found = expected_tensors(config), {name: tuple(w.shape) for name, w in weights.items()}
        if odd := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
            name = odd[0]
            raise ValueError(
                f"{len(odd)} weights do not fit the config, {name} first: shape {found.get(name)} came where "
                f"{expected.get(name)} was expected (None: no such weight)."
            )
        cast = {name: jnp.asarray(w, dtype) for name, w in weights.items()}
        if precision is None and cast["embed"].dtype == jnp.float32:
            precision = "highest"
        return cls(config, cast, precision)

    @classmethod
    def abstract(cls, config: HybridConfig, *, dtype: Any = jnp.float32, **kwargs: Any) -> HybridDecoder:
        """The same with shapes in place of weights: nothing is allocated. To trace or compile ahead of time."""

        def build() -> HybridDecoder:
            weights = {name: jnp.zeros(shape, dtype) for name, shape in expected_tensors(config).items()}
            return cls.from_weights(config, weights, **kwargs)

        return nnx.eval_shape(build)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        pool: HybridLinearKVPool,
        batch: Batch,
        slots: jax.Array,
        *,
        logits: str = "last",
        implementation: str | None = None,
    ) -> tuple[jax.Array, HybridLinearKVPool]:
        """Run one chunk: continue the states of the lanes' slots, write keys and values, attend.

        tokens, positions: i32[b, t]; t == 1 is decode. slots: i32[b], each row's working slot; 0, the sink, for a
        lane that is not in use (`HybridReqToTokenPool.working_slots` answers so). logits: "last" f32[b, vocab], or
        "all" f32[b, t, vocab]; on padding they are finite and mean nothing. implementation: of the attention layers'
        write and read, see `pallas_kernels.registry`; recurrent layers are XLA. Returns (logits, pool).
        """
        if logits not in ("last", "all"):
            raise ValueError(f'logits must be "last" or "all", got {logits!r}.')
        c = self.config
        with jax.named_scope("embed"):
            x = take(self.embed[...], tokens) * c.multipliers.embedding
            pairs = jnp.arange(0, c.rotary_dim, 2, dtype=jnp.float32) / c.rotary_dim
            angles = rope_angles(positions, c.rope_theta**-pairs)
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{i}"):
                x, pool = layer(x, positions, angles, pool, batch, slots, implementation)
        with jax.named_scope("head"):
            if logits == "last":
                last = jnp.clip(batch.q_lens - 1, 0, x.shape[1] - 1)
                x = x[:, 0] if x.shape[1] == 1 else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
            matrix = self.embed if self.head is None else self.head.kernel
            out = project(self.norm(x), matrix[...], precision=self.precision, preferred_element_type=jnp.float32)
            return out * c.multipliers.lm_head, pool


def _layer(weights: Mapping[str, jax.Array], index: int) -> dict[str, jax.Array]:
    """The weights of one layer, without "layers.{index}."."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
