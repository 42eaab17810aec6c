"""The blocked recurrences are the token-by-token ones, whatever the length, the cut and the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.recurrent.scans import BLOCK, gated_delta_scan, mamba2_scan

B, HEADS, DIM, N = 2, 3, 5, 4


def mamba2_tokens(state, value, keys, reads, dt, decay):
    """The recurrence as it is written down, in float64."""
    out = np.zeros_like(value)
    for i in range(value.shape[1]):
        added = (dt[:, i, :, None] * value[:, i])[..., None] * keys[:, i, :, None, :]
        state = np.exp(decay[:, i])[..., None, None] * state + added
        out[:, i] = np.einsum("bhpn,bhn->bhp", state, reads[:, i])
    return state, out


def gated_delta_tokens(state, q, k, v, beta, decay):
    """The recurrence as it is written down, in float64."""
    out = np.zeros_like(v)
    for i in range(v.shape[1]):
        state = np.exp(decay[:, i])[..., None, None] * state
        known = np.einsum("bhkv,bhk->bhv", state, k[:, i])
        state = state + k[:, i, :, :, None] * (beta[:, i, :, None] * (v[:, i] - known))[:, :, None, :]
        out[:, i] = np.einsum("bhkv,bhk->bhv", state, q[:, i])
    return state, out


def mamba2_inputs(t, rng):
    gates = rng.uniform(0, 1, (B, t, HEADS)), -rng.exponential(0.5, (B, t, HEADS))
    return rng.normal(size=(B, HEADS, DIM, N)), (
        rng.normal(size=(B, t, HEADS, DIM)), *rng.normal(size=(2, B, t, HEADS, N)), *gates
    )  # fmt: skip


def gated_delta_inputs(t, rng):
    q, k = rng.normal(size=(2, B, t, HEADS, N))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)  # as the model does; otherwise the state explodes
    gates = rng.uniform(0, 1, (B, t, HEADS)), -rng.exponential(0.5, (B, t, HEADS))
    return rng.normal(size=(B, HEADS, N, DIM)), (q, k, rng.normal(size=(B, t, HEADS, DIM)), *gates)


SCANS = {
    "mamba2": (mamba2_scan, mamba2_tokens, mamba2_inputs),
    "gated_delta": (gated_delta_scan, gated_delta_tokens, gated_delta_inputs),
}


def narrow(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


@pytest.mark.parametrize("t", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
@pytest.mark.parametrize("name", SCANS)
def test_a_blocked_scan_is_the_recurrence(name, t):
    scan, tokens, make = SCANS[name]
    state, inputs = make(t, np.random.default_rng(t))
    expected = tokens(state, *inputs)
    got = jax.jit(scan)(*narrow((state, *inputs)))
    for mine, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", SCANS)
def test_a_prompt_may_be_cut_anywhere(name):
    scan, _, make = SCANS[name]
    state, inputs = narrow(make(2 * BLOCK + 9, np.random.default_rng(5)))
    whole_state, whole = scan(state, *inputs)
    for cut in (1, BLOCK - 1, BLOCK, BLOCK + 30):
        middle, first = scan(state, *(a[:, :cut] for a in inputs))
        end, second = scan(middle, *(a[:, cut:] for a in inputs))
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(end, whole_state, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", SCANS)
def test_padding_moves_no_state(name):
    """Gates of 0 behind a lane's tokens: whatever else stands there, the state is the one behind its last token."""
    scan, _, make = SCANS[name]
    t, real = BLOCK + 20, BLOCK - 3
    state, (*vectors, gate, decay) = narrow(make(t, np.random.default_rng(6)))
    gate, decay = gate.at[1, real:].set(0), decay.at[1, real:].set(0)
    ends = [scan(state, *(a.at[1, real:].set(fill) for a in vectors), gate, decay)[0] for fill in (0.0, 1e3)]
    np.testing.assert_array_equal(*ends)
    alone, _ = scan(state[1:], *(a[1:, :real] for a in (*vectors, gate, decay)))
    np.testing.assert_allclose(ends[0][1], alone[0], rtol=2e-5, atol=2e-6)
