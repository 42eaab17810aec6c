"""Recurrent layers over a chunk: each takes its state, runs t tokens of every lane, and gives the state back.

A lane's padding does not move its state: beta, dt and the log decay are set to 0 there, after softplus and clamp, and
a window ends with the lane's last real tokens. Nothing of a chunk but state and window is needed to go on behind it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from models.recurrent.config import GatedDelta, Mamba2, ShortConv
from models.recurrent.scans import gated_delta_scan, mamba2_scan

Window = jax.Array  # [b, channels, kernel - 1], newest last


def causal_conv(
    x: jax.Array, window: Window, kernel: jax.Array, bias: jax.Array | None, lens: jax.Array
) -> tuple[jax.Array, Window]:
    """A depthwise convolution over the window and the chunk.

    x: [b, t, channels]; kernel: [channels, K]; lens: i32[b], real tokens of each lane, the first of its t.
    Returns ([b, t, channels], the window behind the last real token; as it was where a lane has none).
    """
    t, width = x.shape[1], kernel.shape[1]
    full = jnp.concatenate([window.swapaxes(1, 2).astype(x.dtype), x], axis=1)  # [b, K - 1 + t, channels]
    out = jnp.zeros_like(x)
    for k in range(width):
        out += full[:, k : k + t] * kernel[:, k]
    if bias is not None:
        out += bias
    last = lens[:, None] + jnp.arange(width - 1, dtype=jnp.int32)  # the old window stands in front
    after = jnp.take_along_axis(full, last[..., None], axis=1, mode="promise_in_bounds")
    return out, after.swapaxes(1, 2)


def short_conv(cell: ShortConv, w, x: jax.Array, window: Window, lens: jax.Array) -> tuple[jax.Array, Window, None]:
    """lfm2: C * conv(B * x), [b, t, hidden]."""
    gate_in, gate_out, value = jnp.split(w.project_in(x), 3, axis=-1)
    out, window = causal_conv(gate_in * value, window, w.conv[...], w.bias("conv_bias"), lens)
    return w.project_out(gate_out * out), window, None


def gated_delta(
    cell: GatedDelta, w, x: jax.Array, window: Window, state: jax.Array, lens: jax.Array
) -> tuple[jax.Array, Window, jax.Array]:
    """qwen3_next's linear attention (Yang et al., "Gated Delta Networks", 2024). state: f32[b, heads, key, value]."""
    b, t, _ = x.shape
    groups = cell.value_heads // cell.key_heads
    keys, values = cell.key_dim, groups * cell.value_dim
    mixed = w.qkvz(x).reshape(b, t, cell.key_heads, 2 * keys + 2 * values)
    q, k, v, z = jnp.split(mixed, [keys, 2 * keys, 2 * keys + values], axis=-1)
    beta, decay = jnp.split(w.ba(x).reshape(b, t, cell.key_heads, 2 * groups), 2, axis=-1)
    flat = jnp.concatenate([part.reshape(b, t, -1) for part in (q, k, v)], axis=-1)
    flat, window = causal_conv(flat, window, w.conv[...], None, lens)
    flat = jax.nn.silu(flat).astype(jnp.float32)
    edge = cell.key_heads * keys
    q, k, v = jnp.split(flat, [edge, 2 * edge], axis=-1)
    q, k = (jnp.repeat(_unit(p.reshape(b, t, cell.key_heads, keys)), groups, axis=2) for p in (q, k))
    v = v.reshape(b, t, cell.value_heads, cell.value_dim)
    real = _real(lens, t)
    beta = jnp.where(real, jax.nn.sigmoid(beta.reshape(b, t, -1).astype(jnp.float32)), 0)
    rate = jax.nn.softplus(decay.reshape(b, t, -1).astype(jnp.float32) + w.dt_bias[...])
    decay = jnp.where(real, -jnp.exp(w.a_log[...].astype(jnp.float32)) * rate, 0)

    state, out = gated_delta_scan(state, q * keys**-0.5, k, v, beta, decay)
    z = z.reshape(b, t, cell.value_heads, cell.value_dim)
    out = w.state_norm(out.astype(x.dtype)) * jax.nn.silu(z)
    return w.project_out(out.reshape(b, t, -1)), window, state


def mamba2(
    cell: Mamba2, w, x: jax.Array, window: Window, state: jax.Array, lens: jax.Array, factors: tuple[float, ...]
) -> tuple[jax.Array, Window, jax.Array]:
    """Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024). state: f32[b, heads, head_dim, state].

    factors: constants on z, x, B, C and dt (falcon_h1).
    """
    b, t, _ = x.shape
    inner, edge = cell.inner, cell.groups * cell.state
    z, *parts, dt = jnp.split(w.project_in(x), [inner, 2 * inner, 2 * inner + edge, 2 * inner + 2 * edge], axis=-1)
    z, *parts, dt = (part * factor for part, factor in zip((z, *parts, dt), factors, strict=True))
    flat, window = causal_conv(jnp.concatenate(parts, axis=-1), window, w.conv[...], w.bias("conv_bias"), lens)
    value, keys, reads = jnp.split(jax.nn.silu(flat).astype(jnp.float32), [inner, inner + edge], axis=-1)
    value = value.reshape(b, t, cell.heads, cell.head_dim)
    share = cell.heads // cell.groups
    keys, reads = (jnp.repeat(p.reshape(b, t, cell.groups, cell.state), share, axis=2) for p in (keys, reads))
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + w.dt_bias[...]), *cell.dt_limit)
    dt = jnp.where(_real(lens, t), dt, 0)  # decay 1, nothing added
    decay = dt * -jnp.exp(w.a_log[...].astype(jnp.float32))

    state, out = mamba2_scan(state, value, keys, reads, dt, decay)
    out = (out + value * w.skip[...][:, None]).reshape(b, t, inner).astype(x.dtype) * jax.nn.silu(z)
    if cell.gated_norm:
        grouped = out.reshape(b, t, cell.groups, -1).astype(jnp.float32)
        grouped = grouped * lax.rsqrt(jnp.mean(jnp.square(grouped), axis=-1, keepdims=True) + w.eps)
        out = grouped.reshape(b, t, inner).astype(x.dtype) * w.state_norm.weight[...]
    return w.project_out(out), window, state


def _real(lens: jax.Array, t: int) -> jax.Array:
    """bool[b, t, 1]: the lane's first `lens` tokens."""
    return (jnp.arange(t, dtype=jnp.int32) < lens[:, None])[..., None]


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
