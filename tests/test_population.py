"""Both populations draw the same law. Every statistical test here fails by chance with probability below 1e-4."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from shufflerl.arrays import IntArray
from shufflerl.counts import Batch, CountQuery, Counts, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Mixture
from shufflerl.population import CountPopulation, TrajectoryPopulation
from tests.support.examples import all_trajectories, full_batch, random_mdp, random_mixture, telling_mdp

LEVEL = 1e-4


def _chi_square(observed: list[int], expected: list[float]) -> float:
    """p-value, cells with fewer than five expected pooled into one."""
    seen, want = np.array(observed, dtype=float), np.array(expected)
    rare = want < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    keep = want > 0
    return float(stats.chisquare(seen[keep], want[keep] * seen[keep].sum() / want[keep].sum()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("made", [random_mdp, telling_mdp])
@pytest.mark.parametrize("population", [CountPopulation, TrajectoryPopulation])
def test_the_joint_law_of_all_counts_is_that_of_independent_users(
    population: type[CountPopulation], made: Callable[..., MDP]
) -> None:
    """Two users, a mixture, every possible count vector with its exact probability by enumeration."""
    mdp = made(5, horizon=2, states=2, actions=2)
    mixture = random_mixture(mdp, 2, seed=1)
    batch = full_batch(mdp, 2, mixture)
    one_user: dict[tuple[int, ...], float] = {}
    for weight, policy in zip(mixture.weights, mixture.policies, strict=True):
        xs, actions, rewards, chances = all_trajectories(mdp, policy)
        for row in range(len(xs)):
            alone = Trajectories(xs[[row]], actions[[row]], rewards[[row]])
            key = tuple(Counts.of(batch, alone).values)
            one_user[key] = one_user.get(key, 0.0) + weight * chances[row]
    exact: dict[tuple[int, ...], float] = {}
    for first, p in one_user.items():
        for second, q in one_user.items():
            both = tuple(a + b for a, b in zip(first, second, strict=True))
            exact[both] = exact.get(both, 0.0) + p * q
    draws = 20_000
    users = population(mdp, seed=7)
    seen = Tally(tuple(users.play(batch).values) for _ in range(draws))
    assert set(seen) <= set(exact)
    assert _chi_square([seen[key] for key in exact], [draws * p for p in exact.values()]) > LEVEL


def _sample(population: CountPopulation | TrajectoryPopulation, batch: Batch, draws: int) -> IntArray:
    return np.stack([population.play(batch).values for _ in range(draws)])


@pytest.mark.parametrize("made", [random_mdp, telling_mdp])
def test_both_populations_have_the_same_law_for_a_batch_of_many(made: Callable[..., MDP]) -> None:
    """A random projection of the counts, and each counter by itself, against the other population's."""
    mdp = made(11, horizon=4, states=3, actions=2)
    batch = full_batch(mdp, 40, random_mixture(mdp, 3, seed=2))
    exact = _sample(CountPopulation(mdp, 1), batch, 2000)
    played = _sample(TrajectoryPopulation(mdp, 2), batch, 2000)
    rng = np.random.default_rng(3)
    pvalues = []
    for _ in range(5):
        direction = rng.normal(size=batch.query.size)
        pvalues.append(stats.ks_2samp(exact @ direction, played @ direction).pvalue)
    for counter in range(batch.query.size):
        table = np.stack([np.bincount(np.minimum(s[:, counter], 20), minlength=21) for s in (exact, played)])
        table = table[:, table.sum(axis=0) > 10]
        if table.shape[1] > 1:
            pvalues.append(stats.chi2_contingency(table).pvalue)
    assert min(pvalues) > LEVEL / len(pvalues)


def test_this_test_would_see_a_wrong_mixture() -> None:
    """Users who all get one policy drawn once have the right means but the wrong law; the projection test sees it."""
    mdp = random_mdp(11, horizon=4, states=3, actions=2)
    mixture = random_mixture(mdp, 3, seed=2)
    batch = full_batch(mdp, 40, mixture)
    rng = np.random.default_rng(0)
    users = CountPopulation(mdp, 1)
    together = np.stack(
        [
            users.play(full_batch(mdp, 40, Mixture.single(mixture.policies[rng.choice(3, p=mixture.weights)]))).values
            for _ in range(2000)
        ]
    )
    exact = _sample(CountPopulation(mdp, 2), batch, 2000)
    direction = np.random.default_rng(3).normal(size=batch.query.size)
    assert stats.ks_2samp(exact @ direction, together @ direction).pvalue < 1e-10


@pytest.mark.parametrize("users", [1, 10, 10**6, 10**12, 10**17])
def test_users_are_conserved_from_step_to_step(users: int) -> None:
    mdp = random_mdp(4, horizon=4, states=3, sparse=True)
    batch = full_batch(mdp, users, random_mixture(mdp, 4, seed=0))
    values = CountPopulation(mdp, 0).play(batch).values
    assert values.dtype == np.int64
    moves, pays = batch.table_query.scatter(values.astype(np.float64))
    tolerance = 0 if users < 2**53 else 1e-15  # beyond that, float tables lose parity; the counts themselves do not
    np.testing.assert_allclose(pays.sum(axis=(1, 2, 3)), users, rtol=tolerance)
    np.testing.assert_allclose(moves.sum(axis=(2, 3)), pays[:-1].sum(axis=(2, 3)), rtol=tolerance)
    np.testing.assert_allclose(moves.sum(axis=(1, 2)), pays[1:].sum(axis=(2, 3)), rtol=tolerance)


def test_huge_batches_have_the_right_mean_and_spread() -> None:
    """At 1e12 users, standardised rewards of one counter are standard normal."""
    mdp = random_mdp(2, horizon=1, states=1, actions=1)
    batch = full_batch(mdp, 10**12, Mixture.single([[0]]))
    users = CountPopulation(mdp, 0)
    wins = np.array([users.play(batch).values[1] for _ in range(3000)], dtype=float)
    p = mdp.rewards[0, 0, 0]
    scores = (wins - 1e12 * p) / np.sqrt(1e12 * p * (1 - p))
    assert stats.kstest(scores, "norm").pvalue > LEVEL


def test_only_the_asked_counters_come_back() -> None:
    mdp = random_mdp(0)
    query = CountQuery(mdp.problem(10), [1], [2])
    counts = CountPopulation(mdp, 0).play(Batch(0, 10, random_mixture(mdp, 1, 0), query))
    assert counts.values.shape == (query.size,) == (3 * 2 * 3 + 3 * 2 * 2,)
    assert counts.values.sum() == 20


@pytest.mark.parametrize("population", [CountPopulation, TrajectoryPopulation])
def test_what_users_earn_is_recorded_whatever_is_asked(population: type[CountPopulation]) -> None:
    mdp = random_mdp(0, start=0)
    everything = full_batch(mdp, 500)
    nothing_paid = replace(everything, query=CountQuery(mdp.problem(500), [0, 1], []))
    counts, asked = (population(mdp, 4).play(batch) for batch in (everything, nothing_paid))
    assert asked.earned == counts.earned == everything.table_query.scatter(counts.values)[1][..., 1].sum() > 0


def test_same_seed_same_counts() -> None:
    mdp = random_mdp(0)
    batch = full_batch(mdp, 100, random_mixture(mdp, 2, 0))
    for population in (CountPopulation, TrajectoryPopulation):
        first, second = (population(mdp, 5).play(batch).values for _ in range(2))
        np.testing.assert_array_equal(first, second)


def test_more_users_than_can_play_one_by_one_are_refused() -> None:
    mdp = random_mdp(0)
    with pytest.raises(InvalidInputError, match="use CountPopulation"):
        TrajectoryPopulation(mdp, 0).play(full_batch(mdp, 10**7 + 1))


def test_a_batch_of_another_problem_is_refused() -> None:
    mdp: MDP = random_mdp(0)
    with pytest.raises(InvalidInputError, match="expected"):
        CountPopulation(mdp, 0).play(full_batch(random_mdp(0, states=4), 3))
    with pytest.raises(InvalidInputError, match="more than"):
        CountPopulation(mdp, 0).play(Batch(0, 10**19, random_mixture(mdp, 1, 0), CountQuery.everything(mdp.problem(1))))
