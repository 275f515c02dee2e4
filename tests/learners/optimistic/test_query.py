"""Which counters are asked of a batch: what each is worth, which are left, and that learners are told what it saves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl import learners, privatizers
from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import Batch, CountQuery, Query
from shufflerl.envs.riverswim import riverswim
from shufflerl.learners.optimistic import Optimistic
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.model import Model
from shufflerl.learners.optimistic.planner import find_greedy
from shufflerl.learners.optimistic.query import Stakes, choose_counters, find_stakes, worth
from shufflerl.learners.optimistic.rows import Rows
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem
from shufflerl.noise import PoissonNoise
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.ledger import Charge
from shufflerl.privacy.mechanism import ShuffledPoisson
from shufflerl.privatizers.base import BudgetedPrivatizer, Privatizer
from tests.support.examples import estimated_rows, full_batch, random_mdp, random_mixture


def _fitted(mdp: MDP, users: int, epsilon: float = 1.0) -> Model:
    """After three batches of policies drawn at random."""
    model = Model(mdp.problem(20_000))
    learner = learners.make("optimistic", mdp.problem(20_000), 0)
    population, privatizer = (
        CountPopulation(mdp, 1),
        privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-5, seed=2),
    )
    for index in range(3):
        batch = full_batch(mdp, users, random_mixture(mdp, 2, index), index)
        model.add(privatizer.release(population.play(batch)))
    return model


def _stakes(seed: int, horizon: int, states: int = 3, actions: int = 2) -> Stakes:
    rng = np.random.default_rng(seed)
    shape = (horizon, states, actions)
    visits = rng.uniform(0, 200, shape) * (rng.random(shape) < 0.7)
    error = rng.uniform(0, 0.2, (2, *shape)) * (visits > 0)
    error[0, -1] = 0.0
    known = rng.uniform(1, 100, (2, *shape))
    return Stakes(error, known, rng.uniform(0, 0.5, (2, states, actions)), visits, visits.sum(axis=2))


def _told(stakes: Stakes, asked: BoolArray, noise: float) -> float:
    """By the formula, row by row."""
    total = 0.0
    for f, h, x, a in np.ndindex(stakes.error.shape):
        told = 0.0
        for k in np.flatnonzero(asked[f]):
            m = stakes.visits[k, x, a]
            if m > 0:
                variance = (noise / (1 + f) + C.typical * m) / m**2
                told += 1 / (variance + (k != h) * C.typical * stakes.between[f, x, a])
        if told > 0:
            met, v, known = stakes.visits[h, x].sum(), stakes.error[f, h, x, a], stakes.precision[f, h, x, a]
            total += met * v * told / (known + told)
    return total


def _all(horizon: int) -> BoolArray:
    asked = np.ones((2, horizon), dtype=np.bool_)
    asked[0, -1] = False
    return asked


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), horizon=st.integers(1, 4), noise=st.sampled_from([1.0, 100.0, 1e4]))
def test_worth_is_what_the_formula_says_and_losses_what_is_lost(seed: int, horizon: int, noise: float) -> None:
    """Losses are exact where steps share nothing, and never above the truth: what is told has falling returns."""
    stakes, losses = _stakes(seed, horizon), np.zeros((2, horizon))
    asked = _all(horizon) & (np.random.default_rng(seed).random((2, horizon)) < 0.8)
    told = worth(stakes, asked, noise, losses.ravel())
    assert told == pytest.approx(_told(stakes, asked, noise))
    assert np.isinf(losses[~asked]).all()
    for f, h in np.argwhere(asked):
        fewer = asked.copy()
        fewer[f, h] = False
        assert losses[f, h] <= (told - _told(stakes, fewer, noise)) * (1 + 1e-9) + 1e-12
    losses_of_little = np.zeros((2, horizon))
    little = worth(stakes, asked, 1e9, losses_of_little.ravel())  # what is told is next to nothing: all is linear
    for f, h in np.argwhere(asked):
        fewer = asked.copy()
        fewer[f, h] = False
        assert losses_of_little[f, h] == pytest.approx(little - _told(stakes, fewer, 1e9), rel=0.01, abs=1e-12)
    apart = stakes._replace(between=np.full_like(stakes.between, 1e12))
    told = worth(apart, asked, noise, losses.ravel())
    for f, h in np.argwhere(asked):
        fewer = asked.copy()
        fewer[f, h] = False
        assert losses[f, h] == pytest.approx(told - _told(apart, fewer, noise), rel=1e-6, abs=1e-9)


def _choose(rows: Rows, values: FloatArray, unsure: FloatArray, promised: FloatArray, each: float) -> BoolArray:
    everything = 2 * len(promised) - 1
    return choose_counters(rows, values, unsure, promised, each * np.arange(1.0, everything + 1))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_is_close_to_the_best_of_all_choices(seed: int) -> None:
    """At least what asking for everything tells, and 0.97 of what the best of all 2^7 - 1 choices would."""
    mdp = random_mdp(seed, 4, 3, 2, start=0)
    model = _fitted(mdp, 200)
    greedy = find_greedy(model.rows, mdp.start.copy())
    values, promised = np.random.default_rng(seed).uniform(0, 3, (4, 3)), model.visits / 3
    asked = _choose(model.rows, values, greedy.value_variance, promised, 30.0)
    stakes = find_stakes(model.rows, values, greedy.value_variance, promised)
    chosen = _told(stakes, asked, 30.0 * asked.sum())
    assert chosen >= _told(stakes, _all(4), 30.0 * 7)
    choices = []
    for some in itertools.product([False, True], repeat=7):
        others = np.zeros((2, 4), dtype=np.bool_)
        others[_all(4)] = some
        choices.append(_told(stakes, others, 30.0 * others.sum()))
    assert chosen >= 0.97 * max(choices)
    for f, h in np.argwhere(_all(4) & ~asked):  # nothing was dropped in vain
        more = asked.copy()
        more[f, h] = True
        assert chosen > 0.999 * _told(stakes, more, 30.0 * more.sum())


def test_without_noise_everything_is_asked_and_what_is_known_is_not() -> None:
    mdp = random_mdp(1, 4, 3, 2, start=0)
    model = _fitted(mdp, 200)
    rows, values = model.rows, np.random.default_rng(0).uniform(0, 3, (4, 3))
    unsure, promised = np.full((4, 3), 0.1), np.full((4, 3, 2), 30.0)
    assert (_choose(rows, values, unsure, promised, 1e-9) == _all(4)).all()
    variances = np.full_like(rows.reward_variances, 1e-9)
    asked = _choose(rows._replace(reward_variances=variances), values, unsure, promised, 30.0)
    assert asked[0].any()
    assert not asked[1].any()


def test_where_all_next_states_are_the_same_only_rewards_are_asked() -> None:
    """Unless it is not known that they are: where a row leads may matter later."""
    mdp = random_mdp(1, 4, 3, 2, start=0)
    rows, same, promised = _fitted(mdp, 200).rows, np.ones((4, 3)), np.full((4, 3, 2), 30.0)
    asked = _choose(rows, same, np.zeros((4, 3)), promised, 30.0)
    assert not asked[0].any()
    assert asked[1].any()
    assert _choose(rows, same, np.full((4, 3), 1.0), promised, 30.0)[0].any()


def test_what_is_known_of_a_row_is_what_its_posterior_leaves_open() -> None:
    """Each family has its own differences between the steps."""
    mdp = random_mdp(2, 3, 3, 2, start=0)
    rows, ones = _fitted(mdp, 200).rows, np.ones((3, 3, 2))
    stakes = find_stakes(rows, np.zeros((3, 3)), np.ones((3, 3)), ones)
    np.testing.assert_array_equal(stakes.between, rows.between)
    assert (rows.between[0] != rows.between[1]).all()
    left = C.typical * rows.chance_error + rows.noise_error
    np.testing.assert_allclose(stakes.precision[0, :-1], 1 / left[:-1])
    np.testing.assert_allclose(stakes.precision[1] * stakes.error[1], 1)
    np.testing.assert_allclose(stakes.error[1], rows.reward_variances)


def test_nothing_is_learned_from_what_was_not_asked() -> None:
    """Rewards of the last and transitions of the first step only: all else stays as before any data."""
    mdp = random_mdp(4, 3, 3, 2, start=0)
    problem = mdp.problem(20_000)
    batch = Batch(0, 5000, random_mixture(mdp, 2, 0), CountQuery(problem, [0], [2]))
    privatizer = privatizers.make("shuffle", Optimistic(problem, 0), epsilon=1.0, delta=1e-5, seed=1)
    model, before = Model(problem), Model(problem)
    model.add(privatizer.release(CountPopulation(mdp, 0).play(batch)))
    np.testing.assert_array_equal(model.inverse_ess[0, 1:], before.inverse_ess[0, 1:])
    np.testing.assert_array_equal(model.inverse_ess[1, :2], before.inverse_ess[1, :2])
    played = model.visits > 500
    assert (model.inverse_ess[0, 0][played[0]] < 1e-2).all()
    assert (model.inverse_ess[1, 2][played[2]] < 1e-2).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_row_matters_as_much_as_its_next_states_may_differ(seed: int) -> None:
    """By drawing the values of next states: the mean of what the error of a row is then."""
    mdp = random_mdp(seed, 2, 3, 2, start=0)
    rows, rng = _fitted(mdp, 200).rows, np.random.default_rng(seed)
    error = np.full((2, 3, 2), 1e-3)
    small = rows._replace(chance_error=error, noise_error=error / 10)
    values, unsure, ones = rng.uniform(0, 1, (2, 3)), rng.uniform(0, 0.3, (2, 3)), np.ones((2, 3, 2))
    stated = find_stakes(small, values, unsure, ones).error[0, 0]
    p = small.probabilities.reshape(3, 2, mdp.n_states)
    drawn = values[1] + rng.normal(size=(20_000, 3)) * np.sqrt(C.apart * unsure[1])
    off = drawn[:, None, None] - (p @ values[1])[..., None]  # from what is expected now
    noisy = np.mean((off**2).sum(axis=-1), axis=0)
    chance = np.mean((p * off**2).sum(axis=-1), axis=0)
    np.testing.assert_allclose(stated, 1e-3 * chance + 1e-4 * noisy, rtol=0.1)


# What learners are told, and what they ask.


NAMES = [*(name for name, _ in privatizers.PRIVATIZERS), "servers"]


def _privatizer(name: str, learner: Optimistic) -> Privatizer:
    if name == "none":
        return privatizers.make(name)
    by: dict[str, Any] = {"noise": "servers"} if name == "servers" else {}
    return privatizers.make("shuffle" if by else name, learner, epsilon=1.0, delta=1e-5, seed=1, **by)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("touched", [1, 3, 5, 6])
def test_a_release_says_truly_whether_asking_less_is_less_noisy(name: str, touched: int) -> None:
    """Of any number of counters that users touch, to 4%; None where there is nothing to gain."""
    mdp = riverswim(np.random.default_rng(0))
    learner = Optimistic(mdp.problem(20_000), 0)
    full, some = (_privatizer(name, learner) for _ in range(2))
    less = CountQuery(mdp.problem(20_000), [], range(touched))
    release, part = (
        privatizer.release(CountPopulation(mdp, 3).play(Batch(0, 500, random_mixture(mdp, 1, 0), query)))
        for privatizer, query in ((full, learner.query), (some, less))
    )
    assert release.variance_range == part.variance_range
    if name not in ("shuffle", "servers", "central", "local", "local-sampled"):
        assert release.variance_range is None
        return
    assert release.variance_range is not None
    assert len(release.variance_range) == 11
    assert (np.diff(release.variance_range) > 0).all()
    assert release.noise.variance == release.variance_range[-1]
    exact = touched in (1, 3, 6, 11)
    assert part.noise.variance == pytest.approx(release.variance_range[touched - 1], rel=1e-12 if exact else 0.04)


def test_counters_are_left_out_though_leaving_out_one_gains_nothing() -> None:
    """Where few counters have another law: hardly less noise for one less, next to none for one alone."""
    mdp = random_mdp(4, horizon=3, states=2, actions=2)
    rows, visits = estimated_rows(mdp), np.full(mdp.rewards.shape, 1000.0)
    values, unsure = np.ones((4, 2)), np.zeros((4, 2))
    asked = choose_counters(rows, values, unsure, visits, np.array([1e-3, 1e9, 1e9, 1e9, 1e9 + 1]))
    assert asked.sum() == 1


@pytest.mark.parametrize("name", NAMES)
def test_counters_are_left_out_where_that_is_less_noisy_and_nowhere_else(name: str) -> None:
    mdp = riverswim(np.random.default_rng(0))
    learner = Optimistic(mdp.problem(20_000), 0)
    privatizer, population, touched = _privatizer(name, learner), CountPopulation(mdp, 0), []
    while (batch := learner.next_batch()) is not None:
        touched.append(batch.query.touched_counters)
        release = privatizer.release(population.play(batch))
        learner.observe(release)
        assert learner.noise_variance == learner.variances[-1]
        assert tuple(learner.variances) == (release.variance_range or (release.noise.variance,))
    assert touched[0] == 11
    assert (min(touched) < 11) == (release.variance_range is not None)


def test_where_users_begin_is_asked_if_nobody_knows() -> None:
    """The rewards of the first step say so in every batch."""
    mdp = random_mdp(5, 3, 3, 2)
    unknown = Optimistic(Problem(3, 3, 2, 20_000), 0)
    population, privatizer = (
        CountPopulation(mdp, 0),
        privatizers.make("shuffle", unknown, epsilon=1.0, delta=1e-5, seed=0),
    )
    touched = []
    while (batch := unknown.next_batch()) is not None:
        assert 0 in batch.table_query.reward_steps
        touched.append(batch.query.touched_counters)
        unknown.observe(privatizer.release(population.play(batch)))
    assert min(touched) < 5


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("name", ["shuffle", "central", "local", "local-sampled"])
def test_a_certificate_is_no_less_than_what_any_batch_costs(name: str, epsilon: float) -> None:
    mdp = riverswim(np.random.default_rng(0))
    learner = Optimistic(mdp.problem(20_000), 0)
    privatizer = privatizers.make(name, learner, epsilon=epsilon, delta=1e-5, seed=1)
    learn(learner, CountPopulation(mdp, 0), privatizer)
    assert isinstance(privatizer, BudgetedPrivatizer)
    stated = privatizer.certificate(learner.query).epsilon
    assert stated == pytest.approx(epsilon, rel=1e-14)  # a Gaussian's epsilon is found by roots, to the last bits
    assert privatizer.ledger.spent <= stated * (1 + 1e-14)


def test_a_certificate_tells_noise_that_is_too_weak_for_the_budget() -> None:
    """The budget is stated where noise goes with the query, but not instead of what the noise costs."""

    class Halved(ShuffledPoisson):
        def _charge(self, query: Query, users: int) -> Charge:
            right = super()._charge(query, users)
            return Charge(PoissonNoise(right.noise.variance / 2), right.changed)

    learner = Optimistic(riverswim(np.random.default_rng(0)).problem(20_000), 0)
    assert Halved(Budget(1.0, 1e-5)).certificate(learner.query).epsilon > 1.3


def test_a_restored_learner_asks_what_it_would_have_asked() -> None:
    mdp = riverswim(np.random.default_rng(0))
    learner = Optimistic(mdp.problem(20_000), 0)
    privatizer = privatizers.make("shuffle", learner, epsilon=1.0, delta=1e-5, seed=0)
    learn(learner, CountPopulation(mdp, 0), privatizer, batches=9)
    restored = Optimistic(mdp.problem(20_000), 0)
    restored.restore(learner.save())
    ours, theirs = learner.next_batch(), restored.next_batch()
    assert ours is not None
    assert theirs is not None
    assert ours.query == theirs.query != learner.query
