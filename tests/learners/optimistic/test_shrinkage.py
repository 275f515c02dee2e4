"""The formulas of shrinkage, each against brute force, an exact posterior or the law it is of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate, optimize, stats

from shufflerl.arrays import FloatArray
from shufflerl.layout import Layout
from shufflerl.learners.optimistic.pooling import TYPICAL, UNKNOWN
from shufflerl.learners.optimistic.shrinkage import (
    CONCENTRATIONS,
    UNIFORM,
    _doubt,
    compare_steps,
    how_uniform,
    project,
    shrink_rewards,
    shrink_transitions,
)

# Are the steps alike?


def _brute_force(estimates: FloatArray, errors: FloatArray, noises: FloatArray) -> FloatArray:
    """differences[i] for estimates[h, i]: the mean of every cell integrated out numerically."""
    t = 1 / (CONCENTRATIONS + 1)
    likelihoods = np.empty((estimates.shape[1], len(t)))
    for i, (estimate, error, noise) in enumerate(zip(estimates.T, errors.T, noises.T, strict=True)):
        weights = 1 / (TYPICAL * error + noise)
        p = np.clip(np.average(estimate, weights=weights), 0, 1)
        for g in range(len(t)):
            sd = np.sqrt(error * max(p * (1 - p), 0.02) + noise + t[g] * max(p * (1 - p), 0.005) + 1e-6)
            likelihoods[i, g] = integrate.quad(
                lambda mu, e=estimate, s=sd: stats.norm.pdf(e, mu, s).prod() * stats.norm.pdf(mu, 0.3, 0.5),
                p - 2,
                p + 2,
                points=[p],
                epsabs=0,
                epsrel=1e-9,
                limit=200,
            )[0]
    before = np.array([2, 2, 2, 2, 2, 2, 1, 1]) / 14
    law = before
    for _ in range(5):
        shares = law * likelihoods
        shares /= shares.sum(axis=1, keepdims=True)
        law = (before + shares.sum(axis=0)) / (1 + len(shares))
    shares = law * likelihoods
    return np.asarray(shares @ t / shares.sum(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_differences_are_posterior_means_by_brute_force(seed: int) -> None:
    """Three actions of one state at four steps. The last has no transitions; those of others are one number each."""
    rng = np.random.default_rng(seed)
    estimates = 0.4 + rng.normal(size=(4, 3)) * [0.02, 0.1, 0.3]
    errors, noises = rng.uniform(0.001, 0.02, (2, 4, 3))
    layout = Layout((3, 1, 3))
    moves, pays = np.empty((2, 1, 3))
    tables = errors[:, None, :], noises[:, None, :]
    compare_steps(
        layout.row_starts,
        layout.successors,
        estimates[:-1].ravel(),
        *tables,
        estimates[:, None, :],
        *tables,
        moves,
        pays,
    )
    np.testing.assert_allclose(pays[0], _brute_force(estimates, errors, noises), rtol=1e-5)
    np.testing.assert_allclose(moves[0], _brute_force(estimates[:-1], errors[:-1], noises[:-1]), rtol=1e-5)


def test_small_rewards_are_told_by_other_steps_exactly_if_all_are_alike() -> None:
    """RiverSwim's reward of 0.005, well known at all steps but the last, against none: which is the better one there?

    Estimates that differ by less than 0.001 at five steps and twenty states leave hardly any room for differences.
    """
    rng = np.random.default_rng(0)
    shape = (6, 20, 2)
    noise = np.full(shape, 1e-7)
    noise[-1] = 1.0
    raw = np.array([0.0, 0.005]) + rng.normal(size=shape) * np.sqrt(noise)
    layout = Layout((5, 20, 2))
    moves, pays = np.empty((2, 20, 2))
    uniform = np.full(layout.size, 1 / 20)
    compare_steps(layout.row_starts, layout.successors, uniform, 0 * noise, noise, raw, 0 * noise, noise, moves, pays)
    rewards, variances = np.empty((2, *shape))
    shrink_rewards(raw, 0 * noise, noise, pays, rewards, variances)
    np.testing.assert_allclose(rewards[-1], [[0.0, 0.005]] * 20, atol=0.001)
    assert np.sqrt(variances[-1]).max() < 0.0015


# Shrinkage, where the formulas are exactly those of a normal model.


@settings(max_examples=50, deadline=None)
@given(raw=arrays(np.float64, 4, elements=st.floats(0, 1)), noise=arrays(np.float64, 4, elements=st.floats(1e-3, 10)))
def test_rewards_that_are_the_same_at_every_step_have_the_exact_posterior(raw: FloatArray, noise: FloatArray) -> None:
    """raw_h ~ N(mu, B_h) and mu ~ N(1/2, 0.2): every step's prior from the others, then its own, is all of them."""
    rewards, variances = np.empty((2, 4, 1, 1))
    shape = (4, 1, 1)
    shrink_rewards(raw.reshape(shape), np.zeros(shape), noise.reshape(shape), np.zeros((1, 1)), rewards, variances)
    precision = 1 / 0.2 + (1 / noise).sum()
    np.testing.assert_allclose(rewards.ravel(), (0.5 / 0.2 + (raw / noise).sum()) / precision, rtol=1e-6)
    np.testing.assert_allclose(variances.ravel(), 1 / precision, rtol=1e-6)


def _conditional(mean: float, covariance: FloatArray, noise: FloatArray, raw: FloatArray) -> tuple[float, float]:
    """Mean and variance of the first of some normal variables, given all of them with noise."""
    gain = np.linalg.solve(covariance + np.diag(noise), covariance[0])
    return float(mean + gain @ (raw - mean)), float(covariance[0, 0] - gain @ covariance[0])


def test_rewards_that_differ_have_the_exact_posterior() -> None:
    """raw_h ~ N(theta_h, B_h), theta_h ~ N(mu, t c), mu ~ N(1/2, 0.2): exact where the prior mean p has p(1-p) = c."""
    difference, noise = 0.3, np.array([0.02, 0.01, 0.05])
    target = (1 - np.sqrt(1 - 4 * TYPICAL)) / 2
    weights = 1 / (noise + TYPICAL * difference)
    raw = np.array([0.6, 0.15, 0.0])
    raw[2] = (target * (5 + weights[1:].sum()) - 2.5 - weights[1] * raw[1]) / weights[2]
    assert 0 < raw[2] < 1
    rewards, variances = np.empty((2, 3, 1, 1))
    shrink_rewards(
        raw.reshape(3, 1, 1),
        np.zeros((3, 1, 1)),
        noise.reshape(3, 1, 1),
        np.full((1, 1), difference),
        rewards,
        variances,
    )
    covariance = np.full((3, 3), 0.2) + TYPICAL * difference * np.eye(3)
    assert (rewards[0, 0, 0], variances[0, 0, 0]) == pytest.approx(_conditional(0.5, covariance, noise, raw))


def test_transitions_have_the_exact_posterior() -> None:
    """Two normals, the row's own estimate and its prior, on the simplex of two states: p(1-p) is half of TYPICAL."""
    noise = np.array([0.03, 0.01])
    target = (1 - np.sqrt(1 - 2 * TYPICAL)) / 2
    layout = Layout((2, 2, 1))
    shape = (3, 2, 1)
    noises = np.full(shape, UNKNOWN)
    noises[:2, 0, 0] = noise
    table = np.full((2, 2, 1, 2), 0.5)
    errors = np.zeros(shape), noises, np.zeros((2, 1))
    visits = TYPICAL / noise[1]

    def towards(other: float) -> float:
        """The other step's row, drawn towards the uniform one."""
        table[:, 0, 0] = [[0.3, 0.7], [other, 1 - other]]
        likely = how_uniform(layout.row_starts, layout.successors, table.ravel(), *errors)[0, 0]
        trust = likely @ (visits / (visits + UNIFORM))
        return float(trust * other + (1 - trust) / 2)

    optimize.brentq(lambda other: towards(other) - target, 0.0, target, xtol=1e-14)
    prior, probabilities = np.empty((2, layout.size))
    spread, uncertainty = np.empty((2, *shape))
    shrink_transitions(
        layout.row_starts,
        layout.successors,
        table.ravel(),
        *errors,
        prior,
        spread,
        probabilities,
        uncertainty,
        np.empty_like(prior),
    )
    assert prior[0] == pytest.approx(target)
    assert spread[0, 0, 0] == pytest.approx(1 / (visits + 1.5))
    open_before = TYPICAL / 2 / (visits + 1.5)
    variance = 1 / (1 / open_before + 2 / noise[0])
    mean = variance * (target / open_before + 0.3 * 2 / noise[0])
    assert probabilities[:2] == pytest.approx([mean, 1 - mean])
    assert uncertainty[0, 0, 0] == pytest.approx(variance)


def _learned(likelihoods: FloatArray) -> list[FloatArray]:
    """What is likely of each row by EM in plain numpy, and of one that nobody saw."""
    scaled = np.exp(likelihoods - likelihoods.max(axis=1, keepdims=True))
    law = before = np.array([0.7, 0.1, 0.1, 0.1])
    for _ in range(20):
        shares = law * scaled / (law * scaled).sum(axis=1, keepdims=True)
        law = (before + shares.sum(axis=0)) / (1 + len(shares))
    return [*(law * scaled / (law * scaled).sum(axis=1, keepdims=True)), law]


def test_how_uniform_rows_are_is_learned_from_all_counts() -> None:
    """By scipy's law of counts: all steps together, of which one is unseen."""
    rng = np.random.default_rng(1)
    rows = rng.dirichlet(np.full(5, 4.0), 4)
    counts = np.zeros((3, 5, 5))
    counts[:2, :4] = [[rng.multinomial(30, row) for row in rows] for _ in range(2)]
    layout, shape = Layout((3, 5, 1)), (4, 5, 1)
    sampling, noises = np.full((2, *shape), UNKNOWN)  # as the pool has them: nobody knows what noise an unseen row has
    sampling[:2, :4], noises[:2, :4] = 1 / 30, 0.0
    likely = how_uniform(layout.row_starts, layout.successors, counts.ravel() / 30, sampling, noises, np.zeros((5, 1)))
    laws = [[stats.dirichlet_multinomial.logpmf(n, np.full(5, s / 5), 60) for s in UNIFORM] for n in counts.sum(0)[:4]]
    np.testing.assert_allclose(likely[:, 0], _learned(np.array(laws)), rtol=1e-5)


def test_how_uniform_rows_are_is_learned_through_noise() -> None:
    """Normal laws by scipy: three unlike steps, one of them unseen; and a row that nobody saw."""
    noise = 0.01
    rng = np.random.default_rng(1)
    states, shape = 4, (4, 4, 1)
    layout = Layout((3, states, 1))
    raw = rng.dirichlet(np.ones(states), (3, states, 1)) + 0.05 * rng.standard_normal((3, states, 1, states))
    sampling, noises = np.full(shape, UNKNOWN), np.full(shape, noise)
    sampling[:2, :3] = rng.uniform(0.01, 0.3, (2, 3, 1))
    differences = np.array([[0.0], [0.1], [0.4], [0.1]])
    likely = how_uniform(layout.row_starts, layout.successors, raw.ravel(), sampling, noises, differences)[:, 0]
    rows = []
    for x in range(3):
        weights = 1 / (sampling[:3, x, 0] + noise / TYPICAL + differences[x])
        mean, own = weights @ raw[:, x, 0] / weights.sum(), np.empty(states)
        project(mean, own)
        of_steps = (sampling[:3, x, 0] + differences[x]) * (own * (1 - own)).mean() + noise
        variances = 3 / 16 / (UNIFORM + 1) + weights**2 @ of_steps / weights.sum() ** 2
        # three of the four cells are free
        rows.append([stats.norm.logpdf(mean - 1 / 4, 0, np.sqrt(v)).sum() * 3 / 4 for v in variances])
    np.testing.assert_allclose(likely, _learned(np.array(rows)), rtol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.03])
@pytest.mark.parametrize("s", [0.5, 2.0, 40.0])
@pytest.mark.parametrize("width", [3, 30])
def test_rows_are_drawn_towards_uniform_as_far_as_they_all_are(width: int, s: float, noise: float) -> None:
    """Of 600 rows, each visited 30 times at one step: nearly uniform ones are told much better, others no worse.

    That is against s = 1.5 for all, by squared errors, of what a second step that nobody saw is thought to be.
    """
    actions, visited = 600 // width, 1 / (1 / 30 + noise / TYPICAL)
    rng = np.random.default_rng(width)
    truth = rng.dirichlet(np.full(width, s / width), 600)
    seen = rng.multinomial(30, truth) / 30 + np.sqrt(noise) * rng.standard_normal(truth.shape)
    layout, shape = Layout((2, width, actions)), (3, width, actions)
    sampling = np.full(shape, UNKNOWN)
    sampling[0] = 1 / 30
    noises = np.where(sampling < UNKNOWN, noise, UNKNOWN)
    prior, probabilities, doubt = np.empty((3, layout.size))
    spread, uncertainty = np.empty((2, *shape))
    shrink_transitions(
        layout.row_starts,
        layout.successors,
        np.concatenate([seen, np.full_like(seen, 1 / width)]).ravel(),
        sampling,
        noises,
        np.zeros(shape[1:]),
        prior,
        spread,
        probabilities,
        uncertainty,
        doubt,
    )
    drawn, weakly = prior.reshape(2, 600, width)[1], np.empty_like(seen)
    for row, shares in zip(weakly, seen, strict=True):
        project(shares, row)
    weakly = (visited * weakly + 1.5 / width) / (visited + 1.5)
    ratio = ((drawn - truth) ** 2).sum() / ((weakly - truth) ** 2).sum()
    assert ratio < (0.6 if s > 2 else 1.06)
    np.testing.assert_allclose(spread[1], 1 / (visited + 1.5), rtol=1e-3)


@settings(max_examples=200, deadline=None)
@given(values=arrays(np.float64, st.integers(1, 12), elements=st.floats(-1e3, 1e3)))
def test_projection_is_the_nearest_point_of_the_simplex(values: FloatArray) -> None:
    """Against the root of the dual problem, found by scipy."""
    found = np.empty_like(values)
    project(values, found)
    low = values.max() - 1 - 1e-9  # a little less, as the difference is rounded
    shift = optimize.brentq(lambda s: np.maximum(values - s, 0).sum() - 1, low, values.max(), xtol=1e-12, rtol=1e-15)
    np.testing.assert_allclose(found, np.maximum(values - shift, 0), atol=1e-9)
    assert found.sum() == pytest.approx(1)


# What noise can still hide.


@settings(deadline=None)
@given(mean=st.floats(-2, 3), sd=st.floats(0.01, 0.9))
def test_doubt_is_the_variance_of_a_normal_cut_to_probabilities(mean: float, sd: float) -> None:
    cut = stats.truncnorm(-mean / sd, (1 - mean) / sd, mean, sd)
    assert _doubt(mean, sd**2) == pytest.approx(max(0.1, cut.var() / sd**2), abs=2e-3)
