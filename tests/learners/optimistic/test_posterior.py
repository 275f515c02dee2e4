"""The formulas of the posterior, each against brute force, an exact posterior or the law it is of."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate, optimize, stats

from shufflerl.arrays import FloatArray
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.pooling import UNKNOWN
from shufflerl.learners.optimistic.posterior import Family, arrange, fit, learn_law, project

GRID = np.array(C.concentrations)


def _fit(raw: FloatArray, inverse_ess: FloatArray, noise: FloatArray) -> Family:
    """The posterior of rows raw[h, x, a, j], all of which lead to the same outcomes."""
    *shape, width = raw.shape
    rows, flat = int(np.prod(shape)), (shape[0], -1)
    cells = arrange(np.arange(0, raw.size + 1, width), np.tile(np.arange(width), rows), rows // shape[0])
    by_chance, by_noise, between = np.empty(shape), np.empty(shape), np.empty(shape[1:])
    errors = [each.astype(float, copy=False).reshape(flat) for each in (inverse_ess, noise, by_chance, by_noise)]
    family = Family(cells, 1.0, raw.ravel().copy(), np.empty(raw.size), between.ravel(), *errors)
    fit(family)
    return family._replace(chance_error=by_chance, noise_error=by_noise, between=between)


@pytest.mark.parametrize("seed", range(5))
def test_cells_of_one_outcome_lead_to_one_state_step_after_step(seed: int) -> None:
    """Three steps of four pairs, whose rows lead to some of five states each."""
    leads = np.random.default_rng(seed).random((3, 4, 5)) < 0.5
    leads[..., seed] = True
    cells = arrange(np.append(0, leads.sum(-1).cumsum()), np.nonzero(leads)[2].astype(np.int32), 4)
    where = list(zip(*(each.tolist() for each in np.nonzero(leads)), strict=True))  # (step, pair, state) of every cell
    seen = []
    for pair, (first, last) in enumerate(pairwise(cells.pair_starts)):
        for outcome in range(first, last):
            members = cells.members[cells.member_starts[outcome] : cells.member_starts[outcome + 1]].tolist()
            assert cells.outcomes[members].tolist() == [outcome] * len(members)
            steps, pairs, states = zip(*(where[cell] for cell in members), strict=True)
            assert cells.steps[members].tolist() == sorted(steps)
            assert set(pairs) == {pair}
            seen.append((pair, *set(states)))
    assert sorted(seen) == sorted({(pair, state) for _, pair, state in where})


def _pairs(estimates: FloatArray) -> FloatArray:
    """Rows of two outcomes."""
    return np.stack([1 - estimates, estimates], axis=-1)


# Are the steps alike?


def _brute_force(estimates: FloatArray, errors: FloatArray, noises: FloatArray) -> FloatArray:
    """between[i] for estimates[h, i] of two outcomes: the mean of the cell integrated out numerically."""
    t = 1 / (GRID + 1)
    likelihoods = np.empty((estimates.shape[1], len(t)))
    for i, (estimate, error, noise) in enumerate(zip(estimates.T, errors.T, noises.T, strict=True)):
        weights = 1 / (error + noise / C.typical + 1)
        p = np.clip(np.average(estimate, weights=weights), 0, 1)
        chance = max(p * (1 - p), C.min_chance)
        for g in range(len(t)):
            sd = np.sqrt(error * chance + noise + t[g] * chance + C.min_variance)
            likelihoods[i, g] = integrate.quad(
                lambda mu, e=estimate, s=sd: stats.norm.pdf(e, mu, s).prod(),
                p - 3,
                p + 3,
                points=[p],
                epsabs=0,
                epsrel=1e-9,
                limit=200,
            )[0]
    law = before = np.full(len(t), 1 / len(t))
    for _ in range(C.em_steps):
        shares = law * likelihoods
        shares /= shares.sum(axis=1, keepdims=True)
        law = (before + shares.sum(axis=0)) / (1 + len(shares))
    shares = law * likelihoods
    return np.asarray(shares @ t / shares.sum(axis=1))


@pytest.mark.parametrize("seed", range(4))
def test_between_step_variances_are_posterior_means_by_brute_force(seed: int) -> None:
    """Three actions of one state at four steps."""
    rng = np.random.default_rng(seed)
    estimates = 0.4 + rng.normal(size=(4, 3)) * [0.02, 0.1, 0.3]
    errors, noises = rng.uniform(0.001, 0.02, (2, 4, 3))
    family = _fit(_pairs(estimates)[:, None], errors[:, None], noises[:, None])
    np.testing.assert_allclose(family.between[0], _brute_force(estimates, errors, noises), rtol=1e-5)


def test_the_step_that_is_visited_most_does_not_set_the_others_apart() -> None:
    """Rewards drawn evenly from 0 to 1, the best of them visited most: steps differ by some 0.3 of p(1-p) all the same.

    Averaged by visits alone they seemed to by 0.6, and rows that were unlucky a few times were nearly certain.
    """
    rng = np.random.default_rng(5)
    truth = rng.random((6, 200))
    visits = np.where(truth == truth.max(axis=0), 100_000, 20)
    paid = rng.binomial(visits, truth) / visits
    family = _fit(_pairs(paid)[:, None], 1 / visits[:, None], np.zeros((6, 1, 200)))
    mean = truth.mean(axis=0)
    differ = (truth.var(axis=0, ddof=1) / (mean * (1 - mean))).mean()
    assert family.between.mean() == pytest.approx(differ, rel=0.2)


def test_one_step_tells_nothing_of_differences() -> None:
    family = _fit(_pairs(np.array([[[0.1, 0.9, 0.5]]])), np.full((1, 1, 3), 0.1), np.zeros((1, 1, 3)))
    np.testing.assert_allclose(family.between, (1 / (GRID + 1)).mean())


def test_small_rewards_are_told_by_other_steps_exactly_if_all_are_alike() -> None:
    """RiverSwim's reward of 0.005, well known at all steps but the last, against none: which is the better one there?

    Estimates that differ by less than 0.001 at five steps and twenty states leave hardly any room for differences.
    """
    rng = np.random.default_rng(0)
    shape = (6, 20, 2)
    noise = np.full(shape, 1e-7)
    noise[-1] = 1.0
    raw = np.array([0.0, 0.005]) + rng.normal(size=shape) * np.sqrt(noise)
    family = _fit(_pairs(raw), 0 * noise, noise)
    rewards = family.probabilities.reshape(*shape, 2)[..., 1]
    np.testing.assert_allclose(rewards[-1], [[0.0, 0.005]] * 20, atol=0.001)
    assert np.sqrt(family.noise_error[-1]).max() < 0.0015


def test_small_rewards_that_differ_are_told_by_their_own_step() -> None:
    """A permuted river's 0.005 is paid by either action, which differs from step to step: by 0.0025 of p(1-p).

    With p(1-p) taken for 0.02 all steps seemed alike, and others told that an action never paid at this one was paid.
    """
    rng = np.random.default_rng(1)
    truth = np.where(rng.random((10, 1, 12)) < 0.5, 0.005, 0.0)
    visits = np.exp(rng.uniform(np.log(30), np.log(3000), truth.shape)).astype(int)
    visits[-1] = 20_000
    family = _fit(_pairs(rng.binomial(visits, truth) / visits), 1 / visits, np.zeros(truth.shape))
    rewards = family.probabilities.reshape(*truth.shape, 2)[-1, ..., 1]
    assert family.between.mean() == pytest.approx(0.0025, rel=0.4)
    assert rewards[truth[-1] == 0].max() < 0.0002
    assert rewards[truth[-1] > 0].min() > 0.003


# Laws that are learned.


@pytest.mark.parametrize("rows", [1, 60])
def test_the_law_is_the_likeliest_with_the_weight_of_one_row_before_any(rows: int) -> None:
    """Against a numerical search: of the law's posterior, the rows' likelihoods and one row's share for each."""
    likelihoods = np.random.default_rng(1).normal(size=(rows, 5)) * 3
    scaled = np.exp(likelihoods - likelihoods.max(axis=1, keepdims=True))

    def unlikely(logits: FloatArray) -> float:
        law = np.exp(logits) / np.exp(logits).sum()
        return float(-np.log(scaled @ law).sum() - np.log(law).mean())

    best = optimize.minimize(unlikely, np.zeros(5))
    learn_law(likelihoods)
    np.testing.assert_allclose(likelihoods.sum(axis=1), 1.0)
    law = (likelihoods / scaled)[0] / (likelihoods / scaled)[0].sum()
    np.testing.assert_allclose(likelihoods, scaled * law / (scaled @ law)[:, None], rtol=1e-6)
    assert unlikely(np.log(law)) < best.fun + 0.3


# Rows, where the model has an exact posterior.


def _trust(width: int, by_chance: float, by_noise: float, apart: float) -> tuple[float, float]:
    """How far the mean over the steps is trusted, and what is left open of it, for one row alone in its problem."""
    s, usual = GRID[: C.row_concentrations], (1 - 1 / width) / width
    v = usual * (1 + by_chance * s) / (1 + s) + by_noise
    likely = np.exp(-0.5 * (width - 1) * (np.log(v) + apart / v))
    law = before = np.full(len(s), 1 / len(s))
    for _ in range(C.em_steps):
        law = (before + law * likely / (law @ likely)) / 2
    law = law * likely / (law @ likely)
    k = 1 / (1 + by_chance * s + by_noise * (1 + s) / usual)
    return float(law @ k), float(law @ (k * by_chance / (1 + k * by_chance)))


@pytest.mark.parametrize("visits", [1.0, 4.0, 100.0])
@pytest.mark.parametrize("shares", [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]])
def test_exact_counts_have_the_conjugate_posterior(visits: float, shares: list[float]) -> None:
    """One step: a row is drawn by c around a mean, and that by s around the uniform row, each a Dirichlet law."""
    row = np.array(shares)
    family = _fit(row.reshape(1, 1, 1, 3), np.full((1, 1, 1), 1 / visits), np.zeros((1, 1, 1)))
    t = (1 / (GRID + 1)).mean()
    c = 1 / t - 1
    trust, left = _trust(3, 1 / visits + t, 0.0, ((row - 1 / 3) ** 2).mean())
    mean = trust * row + (1 - trust) / 3
    posterior = stats.dirichlet(visits * row + c * mean)
    np.testing.assert_allclose(family.probabilities, posterior.mean())
    values = np.array([0.2, 1.5, 0.7])
    p = family.probabilities
    own = values @ posterior.cov() @ values / (p @ values**2 - (p @ values) ** 2)
    assert family.chance_error[0, 0, 0] == pytest.approx(own + (c / (visits + c)) ** 2 * left)
    assert family.noise_error[0, 0, 0] == 0


@pytest.mark.parametrize("noise", [1e-3, 0.05])
def test_noisy_rows_have_the_normal_posterior(noise: float) -> None:
    """One step of two outcomes that is all noise: two normal laws with the variances of the two Dirichlet laws."""
    t = (1 / (GRID + 1)).mean()
    family = _fit(_pairs(np.array([[[0.4]]])), np.zeros((1, 1, 1)), np.full((1, 1, 1), noise))
    chance = 0.24
    k = t * chance / (t * chance + noise)
    trust, left = _trust(2, t, noise, 0.01)
    assert left < 0.5
    prior = trust * 0.4 + (1 - trust) / 2
    assert family.probabilities[1] == pytest.approx(k * 0.4 + (1 - k) * prior)
    assert family.noise_error[0, 0, 0] == pytest.approx(k * noise + (1 - k) ** 2 * trust * noise)
    assert family.chance_error[0, 0, 0] == pytest.approx((1 - k) ** 2 * left)


def test_a_few_visits_tell_more_where_every_row_is_certain() -> None:
    """Where 20 rows always led to one state at all steps, a few visits of one more leave little of the error."""
    errors = []
    for certain in (True, False):
        raw = np.zeros((3, 21, 1, 4))
        raw[..., 0] = 1.0
        if not certain:
            raw[:, :20] = [0.4, 0.3, 0.2, 0.1]
        inverse_ess = np.full((3, 21, 1), 1 / 7)
        inverse_ess[:, 20] = 1 / 2
        family = _fit(raw, inverse_ess, np.zeros((3, 21, 1)))
        p, value = family.probabilities[-4:], np.array([0.0, 1.0, 2.0, 3.0])
        assert p.sum() == pytest.approx(1.0)
        errors.append(family.chance_error[0, 20, 0] * (p @ value**2 - (p @ value) ** 2))
    assert errors[0] < 0.15 * errors[1]


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_other_steps_count_as_visits_where_steps_are_alike(noise: float) -> None:
    """What was met 50 times at each of five other steps is so at this one, where nobody was."""
    raw, errors = np.zeros((6, 10, 1)), np.full((6, 10, 1), 1 / 50)
    raw[:, ::2] = 0.5
    errors[-1] = UNKNOWN
    noises = np.where(errors < UNKNOWN, noise, UNKNOWN)
    family = _fit(_pairs(raw), errors, noises)
    told = family.probabilities.reshape(6, 10, 2)[-1, :, 1]
    np.testing.assert_allclose(told, raw[0, :, 0], atol=0.02)
    left = family.chance_error[-1, :, 0] * told * (1 - told) + family.noise_error[-1, :, 0]
    assert np.sqrt(left).max() < 0.06


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.03])
@pytest.mark.parametrize("s", [0.05, 0.5, 4.0])
def test_stated_errors_of_drawn_rows_hold(s: float, noise: float) -> None:
    """300 rows drawn by one concentration, the same at every of three steps, ten visits each: squares.

    Noise in cells near zero is overstated: no probability is below 0, and the stated error does not know.
    """
    rng = np.random.default_rng(1)
    truth = rng.dirichlet(np.full(4, s / 4), 300)
    raw = np.stack([rng.multinomial(10, truth) / 10 for _ in range(3)])
    raw = raw + np.sqrt(noise) * rng.standard_normal(raw.shape)
    shape = (3, 300, 1)
    family = _fit(raw[:, :, None], np.full(shape, 0.1), np.full(shape, noise))
    value = rng.random(4)
    p = family.probabilities.reshape(3, 300, 4)
    apart = (value - (p @ value)[..., None]) ** 2
    stated = family.chance_error[..., 0] * (p * apart).sum(-1) + family.noise_error[..., 0] * apart.sum(-1)
    assert 0.25 < ((p @ value - truth @ value) ** 2).sum() / stated.sum() < 1.6


@settings(max_examples=200, deadline=None)
@given(values=arrays(np.float64, st.integers(1, 12), elements=st.floats(-1e3, 1e3)))
def test_projection_is_the_nearest_point_of_the_simplex(values: FloatArray) -> None:
    """Against the root of the dual problem, found by scipy."""
    found = project(values)
    low = values.max() - 1 - 1e-9  # a little less, as the difference is rounded
    shift = optimize.brentq(lambda s: np.maximum(values - s, 0).sum() - 1, low, values.max(), xtol=1e-12, rtol=1e-15)
    np.testing.assert_allclose(found, np.maximum(values - shift, 0), atol=1e-9)
    assert found.sum() == pytest.approx(1)
