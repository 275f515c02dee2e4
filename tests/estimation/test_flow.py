"""The flow step: exact identities, least squares, unbiasedness, stated errors; and the model made of its output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import linalg

from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import Batch, CountQuery, Release
from shufflerl.errors import ContractError
from shufflerl.estimation.flow import conserve
from shufflerl.estimation.model import Evidence
from shufflerl.mdp import MDP, Mixture
from shufflerl.noise import GaussianNoise, NoNoise, PoissonNoise
from shufflerl.population import CountPopulation
from tests.support.examples import mdps, random_mdp, random_mixture


def _release(
    mdp: MDP, users: int, mixture: Mixture, sd: float, seed: int, query: CountQuery | None = None
) -> tuple[Release, FloatArray]:
    batch = Batch(0, users, mixture, query or CountQuery.everything(mdp.problem(users)))
    counts = CountPopulation(mdp, seed).play(batch).values.astype(np.float64)
    if sd == 0:
        return Release(batch, counts, NoNoise(), 0.0), counts
    noise = GaussianNoise(sd)
    return Release(batch, counts + noise.sample(np.random.default_rng(seed), counts.size), noise, sd**2), counts


@settings(max_examples=60, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6), users=st.integers(1, 10**6))
def test_users_are_conserved_afterwards(mdp: MDP, seed: int, users: int) -> None:
    release, _ = _release(mdp, users, random_mixture(mdp, 2, seed), 25.0, seed)
    moves, pays = release.batch.table_query.scatter(conserve(release, mdp.start).values)
    everyone = pays.sum(axis=(1, 2, 3))
    np.testing.assert_allclose(everyone, users, rtol=1e-9, atol=1e-6)
    if mdp.support is None:
        # Where all cells are possible the step is exact: rows agree with rewards, arrivals with departures.
        np.testing.assert_allclose(moves.sum(axis=-1), pays[:-1].sum(axis=-1), atol=1e-6)
        np.testing.assert_allclose(moves.sum(axis=(1, 2)), pays[1:].sum(axis=(2, 3)), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6))
def test_true_counts_are_left_alone(mdp: MDP, seed: int) -> None:
    """What already obeys the identities does not move, noise law or not: the step is a projection."""
    release, counts = _release(mdp, 1000, random_mixture(mdp, 2, seed), 0.0, seed)
    pretended = Release(release.batch, counts, GaussianNoise(5.0), 25.0)
    conserved = conserve(pretended, mdp.start)
    np.testing.assert_allclose(conserved.values, release.values, atol=1e-8)
    np.testing.assert_allclose(conserved.visits, release.tables[1].sum(axis=-1), atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("start", [None, 0])
def test_it_is_unbiased_and_removes_noise(sparse: bool, start: int | None) -> None:
    """4,000 draws: each cell's mean error within 6 deviations; the mean squared error falls by a third or more."""
    mdp = random_mdp(3, horizon=4, states=4, actions=2, sparse=sparse, start=start)
    mixture = random_mixture(mdp, 2, 0)
    errors, raw = [], []
    for seed in range(4000):
        release, counts = _release(mdp, 500, mixture, 20.0, seed)
        errors.append(conserve(release, mdp.start).values - counts)
        raw.append(release.values - counts)
    bias = np.mean(errors, axis=0)
    assert (np.abs(bias) < 6 * 20.0 / np.sqrt(4000)).all()
    assert np.mean(np.square(errors)) < 0.67 * np.mean(np.square(raw))


def test_what_nobody_was_told_to_do_is_nothing() -> None:
    mdp = random_mdp(0, start=1)
    policy = np.zeros((3, 3), dtype=np.int32)
    release, _ = _release(mdp, 100, Mixture.single(policy), 10.0, 1)
    moves, pays = release.batch.table_query.scatter(conserve(release, mdp.start).values)
    assert not moves[:, :, 1].any()
    assert not pays[:, :, 1].any()
    assert not pays[0, [0, 2]].any()


def _identities(release: Release, start: FloatArray | None) -> tuple[FloatArray, FloatArray, BoolArray]:
    """C, d and which counters may count anybody: the true counts z of these solve C z = d, and all others are zero.

    Built from tables, cell by cell, without anything that the flow step uses.
    """
    query, mixture = release.batch.table_query, release.batch.mixture
    horizon, states, actions = query.horizon, query.n_states, query.n_actions
    numbers = np.arange(1.0, query.size + 1)
    moves, pays = (table.astype(int) - 1 for table in query.scatter(numbers))  # which counter stands where; -1: none
    some = np.zeros((horizon, states, actions), dtype=bool)
    for policy in mixture.policies[mixture.weights > 0]:
        some |= policy[..., None] == np.arange(actions)
    if start is not None:
        some[0, start == 0] = False
    for h in range(1, horizon):
        some[h, (moves[h - 1][some[h - 1]] < 0).all(axis=0)] = False
    moves[~some[:-1]], pays[~some] = -1, -1
    left, right = [], []

    def equal(these: NDArray[np.int_], those: NDArray[np.int_], constant: float = 0.0) -> None:
        row = np.zeros(query.size)
        row[these[these >= 0]] += 1.0
        row[those[those >= 0]] -= 1.0
        left.append(row)
        right.append(constant)

    nothing = np.empty(0, dtype=int)
    for h in range(horizon):
        equal(pays[h], nothing, float(release.batch.users))
        for x in range(states):
            if h > 0:
                equal(moves[h - 1, :, :, x], pays[h, x])
            if h < horizon - 1:
                for a in range(actions):
                    equal(moves[h, x, a], pays[h, x, a])
    used = np.zeros(query.size, dtype=bool)
    used[moves[moves >= 0]] = used[pays[pays >= 0]] = True
    return np.array(left), np.array(right), used


def _least_squares(release: Release, start: FloatArray | None) -> FloatArray:
    """The nearest values that obey every identity: lstsq finds the shortest change that makes up for what is off."""
    identities, right, used = _identities(release, start)
    values = np.where(used, release.values, 0.0)
    values[used] += np.linalg.lstsq(identities[:, used], right - identities @ values, rcond=None)[0]
    return values


def _sensitivities(release: Release, start: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """By how much each value[i] and each visits[h, x, a] moves, per unit of every counter j: the step is affine."""
    base, changes = conserve(release, start), []
    for j in range(release.values.size):
        bumped = release.values.copy()
        bumped[j] += 1.0
        changes.append(conserve(Release(release.batch, bumped, release.noise, release.added_variance), start))
    values = np.stack([changed.values - base.values for changed in changes], axis=-1)
    visits = np.stack([changed.visits - base.visits for changed in changes], axis=-1)
    return values, visits


@settings(max_examples=100, deadline=None)
@given(
    mdp=st.builds(
        random_mdp,
        seed=st.integers(0, 10**6),
        horizon=st.integers(1, 4),
        states=st.integers(1, 4),
        actions=st.integers(1, 3),
        start=st.sampled_from([None, 0]),
    ),
    seed=st.integers(0, 10**6),
    users=st.integers(1, 10**5),
    policies=st.integers(1, 3),
    start_known=st.booleans(),
)
def test_where_all_cells_are_possible_it_is_least_squares(
    mdp: MDP, seed: int, users: int, policies: int, start_known: bool
) -> None:
    """Single policies and mixtures, one first state or several, known or not."""
    release, _ = _release(mdp, users, random_mixture(mdp, policies, seed), 20.0, seed)
    start = mdp.start if start_known else None
    conserved = conserve(release, start)
    exact = _least_squares(release, start)
    np.testing.assert_allclose(conserved.values, exact, atol=1e-6)
    np.testing.assert_allclose(conserved.visits, release.batch.table_query.scatter(exact)[1].sum(axis=-1), atol=1e-6)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    horizon=st.integers(1, 4),
    states=st.integers(1, 4),
    policies=st.integers(1, 3),
    first=st.sampled_from([None, 0]),
)
def test_with_fewer_counters_it_is_least_squares_on_those(
    seed: int, horizon: int, states: int, policies: int, first: int | None
) -> None:
    """Some transitions and rewards are not asked: those that are end up where they do if all others are free."""
    mdp = random_mdp(seed, horizon, states, 2, start=first)
    rng = np.random.default_rng(seed)
    everything = CountQuery.everything(mdp.problem(1000))
    chosen = rng.random((2, horizon)) < 0.6
    chosen[1, rng.integers(horizon)] = True
    query = CountQuery(mdp.problem(1000), np.flatnonzero(chosen[0, :-1]).tolist(), np.flatnonzero(chosen[1]).tolist())
    mixture = random_mixture(mdp, policies, seed)
    release, _ = _release(mdp, 1000, mixture, 20.0, seed, query)
    conserved = conserve(release, mdp.start)

    full = Release(Batch(0, 1000, mixture, everything), query.fill(release.values), release.noise, 400.0)
    identities, right, used = _identities(full, mdp.start)
    asked = query.fill(np.ones(query.size)) > 0
    some = np.linalg.lstsq(identities[:, used], right, rcond=None)[0]
    free = linalg.null_space(identities[:, used], rcond=1e-9)
    told = asked[used]
    best = some + free @ np.linalg.lstsq(free[told], (full.values[used] - some)[told], rcond=1e-9)[0]
    np.testing.assert_allclose(conserved.values[used][told], best[told], atol=1e-2)  # what is not asked has some weight
    assert not conserved.values[~used].any()


@pytest.mark.parametrize("seed", range(40))
def test_with_known_support_it_is_a_little_above_least_squares(seed: int) -> None:
    """Total variance of all counters beside that of least squares, exact: 3% more on average, at most 13% of 300 seeds.

    Everyone is somewhere, and who arrives is who leaves; rows of transitions only come close to their visits.
    """
    rng = np.random.default_rng(seed)
    horizon, states, actions = rng.integers([2, 2, 1], [5, 6, 4])
    mdp = random_mdp(seed, horizon, states, actions, sparse=True, start=[None, 0][seed % 2])
    release, _ = _release(mdp, 1000, random_mixture(mdp, 1 + seed % 3, seed), 20.0, seed)
    conserved = conserve(release, mdp.start)
    moves, pays = release.batch.table_query.scatter(conserved.values)
    np.testing.assert_allclose(pays.sum(axis=-1), conserved.visits, atol=1e-6)
    np.testing.assert_allclose(conserved.visits.sum(axis=(1, 2)), 1000, atol=1e-6)
    np.testing.assert_allclose(moves.sum(axis=(1, 2)), conserved.visits[1:].sum(axis=-1), atol=1e-6)
    identities, _, used = _identities(release, mdp.start)
    free = used.sum() - np.linalg.matrix_rank(identities[:, used])  # the trace of the projection
    total = (_sensitivities(release, mdp.start)[0] ** 2).sum()
    assert free - 1e-6 <= total <= 1.25 * free + 1e-6


def test_with_known_support_rows_mostly_meet_their_visits() -> None:
    """By a hundredth of the noise in 3 of 4 cases; where the support falls apart, margins do not fit each other."""
    worst = []
    for seed in range(40):
        mdp = random_mdp(seed, 4, 4, 2, sparse=True, start=[None, 0][seed % 2])
        release, _ = _release(mdp, 1000, random_mixture(mdp, 1 + seed % 3, seed), 20.0, seed)
        moves, pays = release.batch.table_query.scatter(conserve(release, mdp.start).values)
        worst.append(np.abs(moves.sum(axis=-1) - pays[:-1].sum(axis=-1)).max() / 20.0)
    assert np.mean(np.array(worst) < 0.01) > 0.6


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("first", ["one", "several", "unknown"])
@pytest.mark.parametrize("policies", [1, 3])
def test_the_stated_variance_of_visits_is_the_true_one(sparse: bool, first: str, policies: int) -> None:
    """Exactly, from the derivatives by every counter; with known support too."""
    for seed in range(5):
        mdp = random_mdp(seed, 4, 4, 2, sparse=sparse, start=0 if first == "one" else None)
        start = None if first == "unknown" else mdp.start
        release, _ = _release(mdp, 500, random_mixture(mdp, policies, seed), 20.0, seed)
        _, visits = _sensitivities(release, start)
        conserved = conserve(release, start)
        np.testing.assert_allclose(conserved.variance, 400.0 * (visits**2).sum(axis=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_the_stated_variance_of_visits_is_the_true_one_with_fewer_counters(seed: int) -> None:
    """Wherever something is told of them; elsewhere it is far above all users."""
    mdp = random_mdp(seed, 4, 3, 2, start=[None, 0][seed % 2])
    chosen = np.random.default_rng(seed).random((2, 4)) < 0.5
    chosen[1, seed % 4] = True
    query = CountQuery(mdp.problem(500), np.flatnonzero(chosen[0, :-1]).tolist(), np.flatnonzero(chosen[1]).tolist())
    release, _ = _release(mdp, 500, random_mixture(mdp, 2, seed), 20.0, seed, query)
    _, visits = _sensitivities(release, mdp.start)
    conserved = conserve(release, mdp.start)
    told = conserved.variance < 500**2
    np.testing.assert_allclose(conserved.variance[told], 400.0 * (visits[told] ** 2).sum(axis=-1), rtol=1e-3, atol=1e-3)
    assert (conserved.variance[~told] > 100 * 500**2).all()


def test_uncounted_visits_are_unknown_however_many_users_there_are() -> None:
    """Nothing is told of the second step: neither its own counters nor, at 1e12 users, the others' totals say more."""
    mdp = random_mdp(3, 3, 3, 2, start=0)
    query = CountQuery(mdp.problem(10**12), [], [0, 2])
    conserved = conserve(_release(mdp, 10**12, random_mixture(mdp, 2, 0), 20.0, 0, query)[0], mdp.start)
    played = (random_mixture(mdp, 2, 0).policies[:, 1, :, None] == np.arange(2)).any(axis=0)
    assert (conserved.variance[1][played] > 1e24).all()


def test_without_noise_all_rewards_must_be_asked() -> None:
    mdp = random_mdp(3, 3, 3, 2, start=0)
    query = CountQuery(mdp.problem(100), [0, 1], [0, 2])
    with pytest.raises(ContractError, match="all rewards"):
        conserve(_release(mdp, 100, random_mixture(mdp, 2, 0), 0.0, 0, query)[0], mdp.start)


def test_the_stated_variance_of_visits_holds_for_the_noise_of_the_shuffle_model() -> None:
    """2,000 draws of Poisson noise: chi-square of each row's visits within 6 deviations (fails by chance: 1e-7)."""
    mdp = random_mdp(2, 3, 3, 2, sparse=True, start=0)
    noise, draws = PoissonNoise(100.0), 2000
    silent, counts = _release(mdp, 300, random_mixture(mdp, 2, 1), 0.0, 1)
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(draws):
        release = Release(silent.batch, counts + noise.sample(rng, counts.size), noise, noise.variance)
        conserved = conserve(release, mdp.start)
        errors.append(conserved.visits - silent.tables[1].sum(axis=-1))
    observed = np.mean(np.square(errors), axis=0)
    uncertain = conserved.variance > 1e-9
    assert uncertain.any()
    assert (observed[~uncertain] < 1e-12).all()
    ratios = observed[uncertain] / conserved.variance[uncertain]
    assert (np.abs(ratios - 1) < 6 * np.sqrt(2 / draws)).all()


def test_states_that_nothing_leads_to_count_nobody() -> None:
    """Of three states the last is never entered: not by what is played in the first layer, then by nothing at all."""
    support = np.ones((2, 3, 2, 3), dtype=bool)
    support[0, :, 0, 2] = False  # the action played at step 0
    support[1, :2, :, 2] = False  # only state 2 leads to itself, and nobody is there
    transitions = support / support.sum(axis=-1, keepdims=True)
    mdp = MDP(transitions, np.full((3, 3, 2), 0.5), [0.5, 0.5, 0.0], support)
    policy = np.zeros((3, 3), dtype=np.int32)
    release, _ = _release(mdp, 100, Mixture.single(policy), 10.0, 0)
    conserved = conserve(release, mdp.start)
    moves, pays = release.batch.table_query.scatter(conserved.values)
    assert not moves[:, 2].any()
    assert not pays[:, 2].any()
    assert not conserved.visits[:, 2].any()
    assert not conserved.variance[:, 2].any()
    assert (conserved.variance[:, :2, 0] > 0).all()
    # Told to play the other action at step 0, users may be there.
    policy[0] = 1
    release, _ = _release(mdp, 100, Mixture.single(policy), 10.0, 0)
    assert (conserve(release, mdp.start).variance[1:, 2, 0] > 0).all()


def test_a_policy_of_no_weight_plays_nothing() -> None:
    mdp = random_mdp(0)
    policies = np.stack([np.zeros((3, 3), dtype=np.int32), np.ones((3, 3), dtype=np.int32)])
    alone, _ = _release(mdp, 100, Mixture.single(policies[0]), 10.0, 1)
    beside, _ = _release(mdp, 100, Mixture(policies, [1.0, 0.0]), 10.0, 1)
    np.testing.assert_array_equal(conserve(alone, mdp.start).values, conserve(beside, mdp.start).values)


def test_pooled_evidence_finds_the_model() -> None:
    """Many releases of noise together tell what one cannot; small batches hardly count."""
    mdp = random_mdp(5, horizon=3, states=3, actions=2)
    evidence = Evidence(mdp.problem(10**7))
    for seed in range(20):
        evidence.add(_release(mdp, 100_000, random_mixture(mdp, 6, seed), 30.0, seed)[0])
    model = evidence.model()
    assert model.known[1:].all()
    np.testing.assert_allclose(model.transitions[model.known[:-1]], mdp.transitions[model.known[:-1]], atol=0.02)
    np.testing.assert_allclose(model.rewards[model.known], mdp.rewards[model.known], atol=0.02)
    np.testing.assert_allclose(model.transitions[model.known[:-1]].sum(axis=-1), 1.0)


def test_stated_errors_cover_the_errors_made() -> None:
    """Rewards of known rows: squared errors over stated variances average to about one or less."""
    scores = []
    for seed in range(200):
        mdp = random_mdp(seed, horizon=2, states=3, actions=2)
        evidence = Evidence(mdp.problem(10**6))
        for part in range(4):
            evidence.add(_release(mdp, 3000, random_mixture(mdp, 4, part), 15.0, 10 * seed + part)[0])
        model = evidence.model()
        sure = model.known & (model.noise_variance < 0.01)
        variance = model.inverse_ess * mdp.rewards * (1 - mdp.rewards) + 0.5 * model.noise_variance
        scores.append((((model.rewards - mdp.rewards) ** 2) / variance)[sure])
    mean = np.concatenate(scores).mean()
    assert 0.5 < mean < 1.2


def test_noise_alone_makes_nothing_known() -> None:
    mdp = random_mdp(1, horizon=3, states=4, actions=2, start=0)
    evidence = Evidence(mdp.problem(100))
    evidence.add(_release(mdp, 1, random_mixture(mdp, 4, 0), 200.0, 0)[0])
    assert evidence.model().known.mean() < 0.5
    assert np.isfinite(evidence.model().transitions).all()
