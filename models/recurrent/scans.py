"""The two recurrences over a chunk of tokens, in blocks: matmuls inside a block, one carried state between blocks.

A token-by-token scan reads and writes the whole state for every token. In a block of C tokens the state is read and
written once, and what the tokens of the block do to each other is a few [C, C] matrices (Dao and Gu, "Transformers
are SSMs", 2024; Yang et al., "Gated Delta Networks", 2024). The cost per token is the same wherever a prompt is cut.
A token with decay 0 and dt or beta 0 changes nothing, which is how padding passes through.

Everything is float32. Decays are logarithms <= 0, so every factor exp(later - earlier) is at most 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64  # tokens

# (state, one block of each input, axis 1 = tokens) -> (state, out [b, block, ...])
Step = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def mamba2_scan(
    state: jax.Array, value: jax.Array, keys: jax.Array, reads: jax.Array, dt: jax.Array, decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """state <- exp(decay) state + dt value keys^T; out = state reads, token by token.

    state: f32[b, heads, dim, n]; value: f32[b, t, heads, dim]; keys, reads: f32[b, t, heads, n]; dt, decay:
    f32[b, t, heads]. Returns (state behind the last token, out f32[b, t, heads, dim]).
    """

    def block(state: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        value, keys, reads, dt, decay = inputs
        since = jnp.cumsum(decay, axis=1)  # from the block's beginning to behind each token
        seen = _exp_between(since, strict=False) * _dot("bihn,bjhn->bhij", reads, keys)
        value = value * dt[..., None]
        out = _dot("bhij,bjhp->bihp", seen, value)
        out += jnp.exp(since)[..., None] * _dot("bihn,bhpn->bihp", reads, state)
        left = jnp.exp(since[:, -1:] - since)[..., None]
        state = jnp.exp(since[:, -1])[..., None, None] * state + _dot("bjhp,bjhn->bhpn", value * left, keys)
        return state, out

    return _in_blocks(block, state, (value, keys, reads, dt, decay))


def gated_delta_scan(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """state <- exp(decay) state, then state += k beta (v - k^T state); out = q^T state, token by token.

    state: f32[b, heads, key, value]; q, k: f32[b, t, heads, key]; v: f32[b, t, heads, value]; beta, decay:
    f32[b, t, heads]. Returns (state behind the last token, out f32[b, t, heads, value]).

    What token i adds, u_i = beta_i (v_i - k_i^T state before it), holds the u_j of the block's earlier tokens, so
    the u are the solution of a unit lower triangular system.
    """

    def block(state: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, decay = inputs
        since = jnp.cumsum(decay, axis=1)
        grown = jnp.exp(since)[..., None]
        known = grown * _dot("bihk,bhkv->bihv", k, state)
        wanted = (beta[..., None] * (v - known)).swapaxes(1, 2)  # [b, heads, i, value]
        felt = _exp_between(since, strict=True) * _dot("bihk,bjhk->bhij", k, k)
        felt *= beta.swapaxes(1, 2)[..., None]
        added = lax.linalg.triangular_solve(felt, wanted, left_side=True, lower=True, unit_diagonal=True)
        seen = _exp_between(since, strict=False) * _dot("bihk,bjhk->bhij", q, k)
        out = grown * _dot("bihk,bhkv->bihv", q, state) + _dot("bhij,bhjv->bihv", seen, added)
        left = jnp.exp(since[:, -1:] - since)[..., None]
        state = jnp.exp(since[:, -1])[..., None, None] * state + _dot("bjhk,bhjv->bhkv", k * left, added)
        return state, out

    return _in_blocks(block, state, (q, k, v, beta, decay))


def _dot(form: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(form, *operands, precision="highest")


def _exp_between(since: jax.Array, *, strict: bool) -> jax.Array:
    """f32[b, heads, i, j]: the decay from behind token j to behind token i; 0 for j > i (strict: j >= i)."""
    lanes = since.swapaxes(1, 2)
    size = since.shape[1]
    earlier = jnp.tri(size, k=-1 if strict else 0, dtype=bool)
    # Masked before the exponential: a later token would give exp of a positive number.
    return jnp.exp(jnp.where(earlier, lanes[..., :, None] - lanes[..., None, :], -jnp.inf))


def _in_blocks(step: Step, state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    b, t = inputs[0].shape[:2]
    state, size = state.astype(jnp.float32), min(t, BLOCK)
    blocks = -(-t // size)

    def cut(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, 0), (0, blocks * size - t)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(b, blocks, size, *a.shape[2:]).swapaxes(0, 1)

    if blocks == 1:
        return step(state, inputs)
    state, out = lax.scan(step, state, jax.tree.map(cut, inputs))
    return state, out.swapaxes(0, 1).reshape(b, blocks * size, *out.shape[3:])[:, :t]
