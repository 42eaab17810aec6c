"""The next token of every lane, in-graph: greedy, temperature, top-k, top-p, each lane with its own settings.

A request draws the same tokens alone, in any batch, in any lane, and again after it was retracted: its random key is
made from its own seed and the position of the token alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.operation import once_if, state


@state
class SamplingParams:
    """How each lane draws. Lanes that are not in use may hold anything."""

    temperature: jax.Array  # f32[b]; 0 (or less): greedy, and the rest is ignored
    top_k: jax.Array  # i32[b], keep the k most likely tokens; 0 (or less): off
    top_p: jax.Array  # f32[b], keep the fewest most likely tokens whose probability reaches p; 1 (or more): off
    seed: jax.Array  # i32[b], of the request; requests with one seed and one prompt draw alike

    @classmethod
    def create(
        cls, lanes: int, *, temperature: Any = 0.0, top_k: Any = 0, top_p: Any = 1.0, seed: Any = 0
    ) -> SamplingParams:
        """Settings for `lanes` lanes; each argument one value for all of them or one per lane."""

        def per_lane(value, dtype):
            return jnp.broadcast_to(jnp.asarray(value, dtype), (lanes,))

        return cls(
            per_lane(temperature, jnp.float32),
            per_lane(top_k, jnp.int32),
            per_lane(top_p, jnp.float32),
            per_lane(seed, jnp.int32),
        )


def sample(logits: jax.Array, params: SamplingParams, base_key: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[b]: one token per lane.

    logits: f32[b, vocab]; -inf forbids a token. base_key: one random key for the whole run.
    positions: i32[b], position of the token that is drawn; with the request's seed it makes the lane's key.

    Both filters look at the distribution after the temperature, and top_p counts probabilities of the whole
    vocabulary (SGLang's "joint" order). Equal logits rank by token id, as in argmax, so top_k = 1 is greedy.
    A batch of greedy lanes draws no random number, and one without filters sorts nothing.
    """
    with jax.named_scope("sample"):
        logits = logits.astype(jnp.float32)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drawn = params.temperature > 0
        return once_if(jnp.any(drawn), lambda _: _draw(logits, params, base_key, positions, greedy), greedy)


def _draw(logits, params, base_key, positions, greedy):
    """The Gumbel trick: the argmax of log-probability + Gumbel noise is a draw from the distribution."""
    drawn = params.temperature > 0
    scaled = logits / jnp.where(drawn, params.temperature, 1.0)[:, None]
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.fold_in(base_key, seed), position))(
        params.seed, positions
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    vocab = logits.shape[-1]
    top_k = jnp.where((params.top_k > 0) & (params.top_k < vocab), params.top_k, vocab)
    filtered = drawn & ((top_k < vocab) | (params.top_p < 1))
    tokens = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    tokens = once_if(
        jnp.any(filtered),
        lambda unfiltered: jnp.where(filtered, _draw_filtered(scaled, noise, top_k, params.top_p), unfiltered),
        tokens,
    )
    return jnp.where(drawn, tokens, greedy)


def _draw_filtered(scaled, noise, top_k, top_p):
    """i32[b]: the best of scaled + noise among the tokens that both filters keep."""
    tokens = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
    # The noise goes with its token, not with a rank: two logits that a differently shaped batch rounds into another
    # order still draw the same, and a filter changes nothing but what it removes.
    falling, tokens, noise = lax.sort((-scaled, tokens, noise), dimension=-1, is_stable=True, num_keys=1)
    probs = jax.nn.softmax(-falling, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    rank = jnp.arange(scaled.shape[-1], dtype=jnp.int32)
    keep = rank < top_k[:, None]
    # p >= 1 keeps all, whatever rounding made of the mass; the first token stays even for p <= 0.
    keep &= (mass_before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    best = jnp.argmax(jnp.where(keep, noise - falling, -jnp.inf), axis=-1)
    return jnp.take_along_axis(tokens, best[:, None], axis=-1)[:, 0]
