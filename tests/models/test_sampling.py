"""What each lane may draw, how often, and that its draws depend on nothing but itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import SamplingParams, sample

KEY = jax.random.key(0)
VOCAB = 12
draw = jax.jit(sample)


def logits_for(lanes: int, seed: int = 0, vocab: int = VOCAB) -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=(lanes, vocab)), jnp.float32)


def many(row, count: int, **settings) -> np.ndarray:
    """`count` independent draws from one row of logits."""
    logits = jnp.broadcast_to(jnp.asarray(row, jnp.float32), (count, len(row)))
    return np.asarray(draw(logits, SamplingParams.create(count, **settings), KEY, jnp.arange(count)))


def test_temperature_zero_is_greedy():
    logits = logits_for(6)
    params = SamplingParams.create(6, temperature=0, top_k=3, top_p=0.5)
    assert np.array_equal(draw(logits, params, KEY, jnp.arange(6)), np.argmax(logits, axis=-1))


def test_top_k_one_is_greedy_even_between_equal_logits():
    logits = logits_for(64).at[:, jnp.array([2, 7, 9])].set(8.0)
    params = SamplingParams.create(64, temperature=1.3, top_k=1)
    assert np.array_equal(draw(logits, params, KEY, jnp.arange(64)), np.full(64, 2))


def test_top_p_of_almost_nothing_is_greedy():
    logits = logits_for(64)
    for top_p in (1e-6, 0.0):
        params = SamplingParams.create(64, temperature=1.0, top_p=top_p)
        assert np.array_equal(draw(logits, params, KEY, jnp.arange(64)), np.argmax(logits, axis=-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, VOCAB - 1])
def test_frequencies_follow_the_temperature(temperature, top_k):
    """With and without the sort; top_k = VOCAB - 1 removes only the least likely token."""
    row = np.asarray(logits_for(1)[0], np.float64)
    probs = np.exp(row / temperature)
    if top_k:
        probs[row.argmin()] = 0
    probs /= probs.sum()
    n = 20_000
    counts = np.bincount(many(row, n, temperature=temperature, top_k=top_k), minlength=VOCAB)
    # Five standard deviations of a binomial count, and one draw for counts near 0.
    assert (np.abs(counts - n * probs) <= 5 * np.sqrt(n * probs * (1 - probs)) + 1).all()


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_top_k_draws_exactly_the_k_most_likely(top_k):
    row = np.linspace(0.0, 1.0, VOCAB)[np.random.default_rng(1).permutation(VOCAB)]
    drawn = set(many(row, 2000, temperature=1.0, top_k=top_k).tolist())
    assert drawn == set(np.argsort(-row)[:top_k].tolist())


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.94, 4), (1.0, 5)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    probs = np.array([0.05, 0.3, 0.05, 0.4, 0.2])
    order = [3, 1, 4, 0, 2]  # equal probabilities rank by token id
    counts = np.bincount(many(np.log(probs), 4000, temperature=1.0, top_p=top_p), minlength=5)
    assert set(np.flatnonzero(counts)) == set(order[:kept])
    left = np.where(counts > 0, probs, 0) / probs[order[:kept]].sum()
    assert (np.abs(counts - 4000 * left) <= 5 * np.sqrt(4000 * left * (1 - left)) + 1e-6).all()


def test_top_p_counts_the_whole_vocabulary_beside_top_k():
    """Of 0.4 0.3 0.2 0.1, top_k 3 and top_p 0.75: the mass before the third token is 0.7 < 0.75, so it stays.
    Renormalised to the top 3 it would be 0.78, and the token would go."""
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(many(row, 2000, temperature=1.0, top_k=3, top_p=0.75).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("settings", [{}, {"top_k": 6}, {"top_p": 0.95}])
def test_forbidden_tokens_are_never_drawn(settings):
    row = np.array(logits_for(1)[0])
    forbidden = np.argsort(-row)[[0, 3, 5]]
    row[forbidden] = -np.inf
    drawn = many(row, 3000, temperature=5.0, **settings)
    assert not np.isin(drawn, forbidden).any()
    assert len(np.unique(drawn)) > 3


def test_a_request_draws_the_same_alone_and_in_any_lane():
    lanes = 8
    logits, positions = logits_for(lanes, vocab=40), jnp.arange(lanes) + 30
    params = SamplingParams.create(
        lanes,
        temperature=[0.7, 1.0, 0.0, 2.0, 1.5, 1.0, 0.9, 3.0],
        top_k=[0, 5, 0, 0, 20, 0, 3, 0],
        top_p=[1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 1.0],
        seed=np.arange(lanes) * 7,
    )
    together = np.asarray(draw(logits, params, KEY, positions))
    order = np.random.default_rng(3).permutation(lanes)

    shuffled = draw(logits[order], jax.tree.map(lambda x: x[order], params), KEY, positions[order])

    assert np.array_equal(shuffled, together[order])
    for lane in range(lanes):
        one = jax.tree.map(lambda x, lane=lane: x[lane : lane + 1], params)
        assert draw(logits[lane : lane + 1], one, KEY, positions[lane : lane + 1])[0] == together[lane]
    assert not np.array_equal(together, np.argmax(logits, axis=-1))


def test_a_filter_changes_only_the_draws_that_it_removes():
    row = logits_for(1)[0]
    free = many(row, 2000, temperature=2.0)
    removed = free == int(jnp.argmin(row))
    assert 0 < removed.sum() < 500
    for settings in ({"top_k": VOCAB - 1}, {"top_p": 1 - 1e-6}):
        filtered = many(row, 2000, temperature=2.0, **settings)
        assert np.array_equal(filtered[~removed], free[~removed])


def test_seed_position_and_base_key_all_change_the_draws():
    row, n = np.zeros(1000), 50
    base = many(row, n, temperature=1.0)
    logits, params = jnp.zeros((n, 1000)), SamplingParams.create(n, temperature=1.0)
    assert (many(row, n, temperature=1.0, seed=1) != base).mean() > 0.9
    assert (np.asarray(draw(logits, params, KEY, jnp.arange(n) + n)) != base).mean() > 0.9
    assert (np.asarray(draw(logits, params, jax.random.key(1), jnp.arange(n))) != base).mean() > 0.9
    assert len(np.unique(base)) > 0.9 * n  # lanes differ by position alone


def test_greedy_lanes_stay_greedy_beside_drawing_ones():
    logits = logits_for(40, vocab=300)
    greedy = np.arange(40) % 2 == 0
    params = SamplingParams.create(40, temperature=np.where(greedy, 0.0, 5.0), top_k=np.where(greedy, 0, 200))
    tokens = np.asarray(draw(logits, params, KEY, jnp.arange(40)))
    best = np.argmax(logits, axis=-1)
    assert np.array_equal(tokens[greedy], best[greedy])
    assert (tokens[~greedy] != best[~greedy]).mean() > 0.5


def test_sorts_and_random_numbers_are_gated():
    """Both lie inside loops of at most one turn: a greedy batch runs neither."""
    lanes = 4
    jaxpr = jax.make_jaxpr(sample)(logits_for(lanes), SamplingParams.create(lanes), KEY, jnp.arange(lanes))
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert "while" in outside
    assert not outside & {"sort", "random_bits", "random_fold_in", "cumsum"}
    inside = str(jaxpr)
    assert "sort" in inside
    assert "random_bits" in inside


def test_works_in_scan_and_vmap():
    logits = jnp.stack([logits_for(3, seed) for seed in range(4)])
    params, positions = SamplingParams.create(3, temperature=1.0, top_k=4), jnp.arange(3)
    want = np.stack([draw(step, params, KEY, positions) for step in logits])
    _, scanned = jax.lax.scan(lambda c, step: (c, sample(step, params, KEY, positions)), None, logits)
    assert np.array_equal(scanned, want)
    assert np.array_equal(jax.vmap(sample, in_axes=(0, None, None, None))(logits, params, KEY, positions), want)
