"""Rows that were counted without noise: the formulas against scipy's laws, what they learn and state by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from shufflerl import CountPopulation, learners, privatizers
from shufflerl.arrays import FloatArray
from shufflerl.envs import make
from shufflerl.learners.optimistic.concentration import learn_law, log_likelihoods
from shufflerl.learners.optimistic.dirichlet import CONCENTRATIONS, count_rewards, count_transitions, shrinkage
from shufflerl.learners.optimistic.optimism import mean_and_error
from shufflerl.learners.optimistic.pooling import UNKNOWN
from shufflerl.learners.optimistic.posterior import Posterior
from shufflerl.learners.optimistic.shrinkage import LARGEST_SPREAD
from shufflerl.mdp import MDP


@pytest.mark.parametrize("counts", [[4, 0, 0], [1, 2, 3], [0, 0, 250], [7, 1, 0]])
@pytest.mark.parametrize("prior", [[1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1]])
def test_likelihoods_are_those_of_the_dirichlet_multinomial_law(counts: list[int], prior: list[float]) -> None:
    """But for the number of orders in which the outcomes may have come."""
    ours = np.empty(len(CONCENTRATIONS))
    log_likelihoods(np.array(counts, dtype=float), np.array(prior), CONCENTRATIONS, ours)
    theirs = np.array(
        [stats.dirichlet_multinomial.logpmf(counts, s * np.array(prior), sum(counts)) for s in CONCENTRATIONS]
    )
    np.testing.assert_allclose(ours - ours[0], theirs - theirs[0], rtol=1e-9, atol=1e-9)


def _draw_likelihoods(concentrations: FloatArray, visits: int, width: int, seed: int) -> FloatArray:
    """Of rows of such concentrations, one each."""
    rng = np.random.default_rng(seed)
    out, prior = np.empty((len(concentrations), len(CONCENTRATIONS))), np.full(width, 1 / width)
    for row, s in zip(out, concentrations, strict=True):
        counts = rng.multinomial(visits, rng.dirichlet(s * prior)).astype(float)
        log_likelihoods(counts, prior, CONCENTRATIONS, row)
    return out


@pytest.mark.parametrize("before", [np.full(5, 0.2), np.array([0.6, 0.1, 0.1, 0.1, 0.1])])
def test_the_law_is_the_likeliest_with_the_weight_of_one_row_before_any(before: FloatArray) -> None:
    """Against a numerical search: of the law's posterior, the rows' likelihoods and one row's share for each s."""
    likelihoods = _draw_likelihoods(np.repeat([0.1, 2.0], 30), 12, 4, seed=1)
    scaled = np.exp(likelihoods - likelihoods.max(axis=1, keepdims=True))

    def unlikely(logits: FloatArray) -> float:
        law = np.exp(logits) / np.exp(logits).sum()
        return float(-np.log(scaled @ law).sum() - before @ np.log(law))

    best = optimize.minimize(unlikely, np.zeros(len(CONCENTRATIONS)))
    law = learn_law(likelihoods, before)
    assert law.sum() == pytest.approx(1.0)
    assert unlikely(np.log(law)) < best.fun + 0.2
    assert unlikely(np.zeros(len(law))) > best.fun + 2.0
    np.testing.assert_allclose(likelihoods, scaled * law / (scaled @ law)[:, None])


@pytest.mark.parametrize("s", CONCENTRATIONS)
def test_rows_that_are_all_alike_are_found_out(s: float) -> None:
    """Forty rows of one concentration: at least 0.7 of the law is on it and its neighbours."""
    law = learn_law(_draw_likelihoods(np.full(40, s), 20, 4, seed=2), np.full(5, 0.2))
    assert law[np.abs(np.log(CONCENTRATIONS / s)) < 2].sum() > 0.7


def test_a_single_concentration_has_the_conjugate_posterior() -> None:
    """Mean, and the variance of E V, of the Dirichlet law that scipy has."""
    law = np.array([0.0, 0.0, 0.0, 1.0, 0.0])
    counts, prior, value = np.array([3.0, 0.0, 1.0]), np.array([0.5, 0.3, 0.2]), np.array([0.2, 1.5, 0.7])
    towards, left = shrinkage(law, 0.0, 4.0)
    p = counts / 4 + towards * (prior - counts / 4)
    posterior = stats.dirichlet(counts + 2.0 * prior)
    np.testing.assert_allclose(p, posterior.mean())
    assert left * (p @ value**2 - (p @ value) ** 2) == pytest.approx(value @ posterior.cov() @ value)
    assert shrinkage(law, 5.0, 4.0) == pytest.approx((5 / 9, 1 / 10))


def _posterior(mdp: MDP, users: int, seed: int) -> Posterior:
    """After 30 batches of random policies without noise."""
    rng = np.random.default_rng(seed)
    problem = mdp.problem(30 * users)
    learner = learners.make("optimistic", problem, seed=seed)
    privatizer = privatizers.make("none", learner)
    population = CountPopulation(mdp, seed)
    posterior = Posterior(problem)
    batch = learner.next_batch()
    assert batch is not None
    for _ in range(30):
        policy = rng.integers(mdp.n_actions, size=(1, mdp.horizon, mdp.n_states), dtype=np.int32)
        mixture = type(batch.mixture)(policy, [1.0])
        posterior.add(privatizer.release(population.play(type(batch)(batch.index, users, mixture, batch.query))))
    return posterior


def _drawn(concentration: float, seed: int) -> MDP:
    """An MDP of which every row and reward is drawn by that concentration, the rewards around 0.3."""
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.full(4, concentration / 4), size=(4, 4, 3))
    return MDP(rows, rng.beta(0.3 * concentration, 0.7 * concentration, size=(5, 4, 3)), np.array([1.0, 0, 0, 0]))


@pytest.mark.parametrize("concentration", [0.05, 0.5, 4.0])
@pytest.mark.parametrize("users", [2, 10])
def test_stated_errors_hold(concentration: float, users: int) -> None:
    """Squared errors of E V and of rewards over what is stated of them, for laws that are not on the grid.

    Of sums, as a few rows have nearly all of the error where most are certain. Measured: 0.69 to 1.42 for rows and 0.60
    to 1.58 for rewards; of deviations that is the root.
    """
    moved, moved_stated, paid, paid_stated = 0.0, 0.0, 0.0, 0.0
    for seed in range(30):
        mdp = _drawn(concentration, seed)
        posterior, value = _posterior(mdp, users, seed), np.random.default_rng(seed).random(4)
        rows, seen = posterior.rows, posterior.visits >= 1
        true = mdp.layout.table(mdp.probabilities) @ value
        for h, x, a in zip(*np.nonzero(seen[:-1]), strict=True):
            mean, variance = mean_and_error(value, rows, int(h), int(x), int(a))
            moved += (mean - true[h, x, a]) ** 2
            moved_stated += variance
        paid += float(((posterior.rewards - mdp.rewards)[seen] ** 2).sum())
        paid_stated += float(posterior.reward_variances[seen].sum())
    assert 0.5 < moved / moved_stated < 1.8
    assert 0.5 < paid / paid_stated < 1.8


def test_a_few_visits_tell_more_where_every_row_is_certain() -> None:
    """Where 20 rows of 20 visits always led to one state, five visits of one more leave a tenth of the error."""
    errors = []
    for certain in (True, False):
        counts = np.full((21, 1, 1), 20.0)
        counts[-1] = 5.0
        raw = np.zeros((21, 4))
        raw[:, 0] = 1.0
        if not certain:
            raw[:20] = [0.4, 0.3, 0.2, 0.1]
        probabilities, error = np.empty(84), np.empty((22, 1, 1))
        sampling = np.concatenate([1 / counts, np.full((1, 1, 1), UNKNOWN)])
        spread, prior = np.full((22, 1, 1), LARGEST_SPREAD), np.full(84, 0.25)
        count_transitions(np.arange(0, 85, 4), raw.ravel(), sampling, prior, spread, probabilities, error)
        p, value = probabilities[-4:], np.array([0.0, 1.0, 2.0, 3.0])
        assert p.sum() == pytest.approx(1.0)
        errors.append(error[20, 0, 0] * (p @ value**2 - (p @ value) ** 2))
    assert errors[0] < 0.1 * errors[1]


def test_every_row_is_as_certain_as_its_own_counts_say() -> None:
    """Certain and mixed rows of ten visits each: the mixed are drawn to their prior by a concentration of 8."""
    raw = np.tile([[1.0, 0.0, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]], (10, 1))
    probabilities, error = np.empty(80), np.empty((21, 1, 1))
    spread, prior = np.full((21, 1, 1), LARGEST_SPREAD), np.full(80, 0.25)
    count_transitions(np.arange(0, 81, 4), raw.ravel(), np.full((21, 1, 1), 0.1), prior, spread, probabilities, error)
    certain, mixed = probabilities.reshape(-1, 4)[:2]
    assert error[0, 0, 0] > error[1, 0, 0]
    assert certain[0] > 0.99
    assert mixed[3] == pytest.approx((10 * 0.1 + 8 * 0.25) / 18, abs=0.01)


def test_two_unpaid_visits_say_little_where_rewards_are_of_all_sizes() -> None:
    """Forty rewards drawn evenly and ten of which two visits were not paid: these are taken for a law of 1 and 3.

    Its mean is 1/4, less what unpaid rows take off from what is paid on average.
    """
    rng = np.random.default_rng(4)
    raw = np.concatenate([rng.random(40), np.zeros(10)]).reshape(1, -1, 1)
    visits = np.concatenate([np.full(40, 1000.0), np.full(10, 2.0)]).reshape(1, -1, 1)
    rewards, variances, error = np.empty((3, 1, 50, 1))
    count_rewards(raw, 1 / visits, np.full((50, 1), 1.0), rewards, variances, error)
    law = stats.beta(1, 3)
    assert 0.7 * law.mean() < rewards[0, -1, 0] < 1.1 * law.mean()
    assert np.sqrt(variances[0, -1, 0]) == pytest.approx(law.std(), rel=0.15)
    np.testing.assert_allclose(rewards[0, :40, 0], raw[0, :40, 0], atol=0.005)


def test_transitions_of_other_steps_count_as_visits() -> None:
    """A row that one visit told follows a prior of concentration 99 that other steps made, and knows how sure it is."""
    raw, prior = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.3, 0.7, 0.3, 0.7])
    probabilities, error = np.empty(4), np.empty((3, 1, 1))
    spread = np.array([0.01, LARGEST_SPREAD, 1.0]).reshape(3, 1, 1)
    count_transitions(np.array([0, 2, 4]), raw, np.ones((3, 1, 1)), prior, spread, probabilities, error)
    np.testing.assert_allclose(probabilities[:2], [0.307, 0.693], atol=1e-9)
    assert error[0, 0, 0] == pytest.approx(1 / 101)
    assert error[1, 0, 0] > 0.1


def test_rewards_that_nobody_was_paid_are_expected_where_nobody_has_been() -> None:
    """Eleven of twelve known rewards are nothing: one that nobody knows is thought to be a twelfth, not a half."""
    raw, sampling = np.zeros((1, 1, 13)), np.full((1, 1, 13), 0.1)
    raw[..., 0], raw[..., -1], sampling[..., -1] = 1.0, 0.5, UNKNOWN
    rewards, variances, error = np.empty((3, 1, 1, 13))
    count_rewards(raw, sampling, np.zeros((1, 13)), rewards, variances, error)
    assert rewards[0, 0, -1] == pytest.approx(1.5 / 13, rel=0.01)
    assert rewards[0, 0, 0] > 0.95
    assert rewards[0, 0, 1:-1].max() < 0.02
    assert (variances[0, 0, 1:-1] < 0.001).all()
    assert variances[0, 0, -1] > 0.05


def test_other_steps_count_as_visits() -> None:
    """A reward that nobody was paid 50 times at each of five other steps is nothing at this one, where nobody was."""
    raw, sampling = np.zeros((6, 1, 2)), np.full((6, 1, 2), 1 / 50)
    raw[-1], sampling[-1] = 0.5, UNKNOWN
    raw[:-1, 0, 1] = 0.5
    rewards, variances, error = np.empty((3, 6, 1, 2))
    count_rewards(raw, sampling, np.zeros((1, 2)), rewards, variances, error)
    np.testing.assert_allclose(rewards[-1, 0], [0.0, 0.5], atol=0.01)
    assert np.sqrt(variances[-1]).max() < 0.05


@pytest.mark.parametrize("name", ["deepsea", "bandit"])
def test_runs_without_noise_go_on_bit_for_bit(name: str) -> None:
    """A learner that was saved in the middle plans as one that was not."""
    mdp = make(name, 3)
    assert isinstance(mdp, MDP)
    learner = learners.make("optimistic", mdp.problem(200), seed=4)
    privatizer, population = privatizers.make("none", learner), CountPopulation(mdp, 5)
    for _ in range(12):
        batch = learner.next_batch()
        assert batch is not None
        learner.observe(privatizer.release(population.play(batch)))
    again = learners.make("optimistic", mdp.problem(200), seed=4)
    again.restore(learner.save())
    assert again.next_batch() == learner.next_batch()
