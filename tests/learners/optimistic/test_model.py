"""What all releases together say: visits, pooled rows and their errors, whether steps are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from shufflerl.arrays import FloatArray
from shufflerl.counts import Batch, CountQuery, Release
from shufflerl.errors import StateMismatchError
from shufflerl.estimation.flow import conserve
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.model import Model
from shufflerl.learners.optimistic.rows import expected_value
from shufflerl.mdp import MDP, Mixture, Problem, homogeneous
from shufflerl.noise import GaussianNoise, Noise, NoNoise
from shufflerl.population import CountPopulation
from tests.support.examples import full_batch, random_mdp, random_mixture


def _alike(seed: int) -> MDP:
    """Four states, two actions, six steps that are all the same."""
    rng = np.random.default_rng(seed)
    return homogeneous(rng.dirichlet(np.ones(4), size=(4, 2)), rng.random((4, 2)), 6, np.eye(4)[0])


def _release(mdp: MDP, users: int, sd: float, seed: int, policies: int = 1) -> tuple[Release, FloatArray]:
    """A release of policies drawn at random, and the true visits[h, x, a]."""
    batch = Batch(0, users, random_mixture(mdp, policies, seed), CountQuery.everything(mdp.problem(users)))
    counts = CountPopulation(mdp, seed).play(batch).values.astype(np.float64)
    noise: Noise = GaussianNoise(sd) if sd else NoNoise()
    values = counts + noise.sample(np.random.default_rng(seed), counts.size)
    return Release(batch, values, noise, noise.variance), batch.table_query.scatter(counts)[1].sum(axis=-1)


def _fit(mdp: MDP, users: int, batches: int, sd: float, seed: int = 0, policies: int = 1) -> tuple[Model, FloatArray]:
    model, visits = Model(mdp.problem(10**6)), np.zeros(mdp.rewards.shape)
    for b in range(batches):
        release, seen = _release(mdp, users, sd, 1000 * seed + b, policies)
        model.add(release)
        visits += seen
    return model, visits


def _check_sound(model: Model) -> None:
    for name, part in model.rows._asdict().items():
        assert np.isfinite(part).all(), name
    assert (model.probabilities >= 0).all()
    starts = model.rows.row_starts
    sums = np.diff(np.append(0.0, model.probabilities.cumsum())[starts])
    np.testing.assert_allclose(sums[np.diff(starts) > 0], 1.0, atol=1e-9)
    assert (model.rows.rewards >= 0).all()
    assert (model.rows.rewards <= 1).all()
    assert (model.rows.reward_variances >= 0).all()
    assert (model.visits >= 0).all()
    assert 0 <= model.rows.homogeneity <= 1


# Visits.


@pytest.mark.parametrize("policies", [1, 3])
@pytest.mark.parametrize(("alike", "most"), [(True, 0.6), (False, 1.05)])
def test_predicted_and_counted_visits_together_are_closer_to_the_truth(alike: bool, most: float, policies: int) -> None:
    """Mean squared errors beside those of the flow step alone, where steps are alike; elsewhere about the same."""
    errors, flow = 0.0, 0.0
    for seed in range(8):
        mdp = _alike(seed) if alike else random_mdp(seed, 6, 4, 2, start=0)
        model, true, counted = Model(mdp.problem(10**6)), np.zeros(mdp.rewards.shape), np.zeros(mdp.rewards.shape)
        for b in range(20):
            release, seen = _release(mdp, 200, 20.0, 1000 * seed + b, policies)
            model.add(release)
            true += seen
            counted += conserve(release, mdp.start).visits
        errors += ((model.visits - true) ** 2).mean()
        flow += ((counted - true) ** 2).mean()
    assert errors < most * flow


@pytest.mark.parametrize("policies", [1, 3])
@pytest.mark.parametrize("start_known", [False, True])
def test_without_noise_visits_are_what_was_counted(start_known: bool, policies: int) -> None:
    mdp = random_mdp(0, sparse=True)
    problem = mdp.problem(1000)
    if not start_known:
        problem = type(problem)(problem.horizon, problem.n_states, problem.n_actions, 1000, None, problem.layout)
    model, true = Model(problem), np.zeros(mdp.rewards.shape)
    for seed in range(5):
        release, visits = _release(mdp, 40, 0.0, seed, policies)
        model.add(release)
        true += visits
    np.testing.assert_allclose(model.visits, true, atol=1e-9)
    np.testing.assert_allclose(model.start, mdp.start if start_known else true[0].sum(axis=-1) / true[0].sum())


# Pooled rows.


@pytest.mark.parametrize("users", [300, 3000])
@pytest.mark.parametrize("kind", ["dense", "sparse", "several starts", "no noise", "mixtures"])
def test_stated_errors_of_pooled_rows_hold(kind: str, users: int) -> None:
    """Errors over stated deviations: mean zero; deviation 1 for rewards, below that for transitions.

    The stated error of transitions is that of counters before the flow step took noise out of them: 0.8 of it remain.
    About 700 rewards and 2,300 cells each, correlated within a run: the bounds are five standard errors and more off.
    """
    moves, pays = [], []
    for seed in range(16):
        mdp = random_mdp(seed, 6, 4, 2, sparse=kind == "sparse", start=None if kind == "several starts" else 0)
        model, _ = _fit(mdp, users, 20, 0.0 if kind == "no noise" else 15.0, seed, 3 if kind == "mixtures" else 1)
        reward, row = mdp.rewards, np.repeat(np.arange(len(mdp.layout.row_starts) - 1), np.diff(mdp.layout.row_starts))
        stated = model.inverse_ess[0].ravel()[row] * mdp.probabilities * (1 - mdp.probabilities)
        stated += model.noise[0].ravel()[row]
        told = (model.visits.ravel()[row] > 30) & (np.diff(mdp.layout.row_starts)[row] > 1)
        moves.append(((model.raw - mdp.probabilities) / np.sqrt(stated))[told])
        stated = model.inverse_ess[1] * reward * (1 - reward) + model.noise[1]
        pays.append(((model.raw_paid[1::2].reshape(reward.shape) - reward) / np.sqrt(stated))[model.visits > 30])
    z, r = np.concatenate(moves), np.concatenate(pays)
    assert abs(z.mean()) < 0.15
    assert abs(r.mean()) < 0.25
    assert (0.9 if kind == "no noise" else 0.6) < z.std() < (1.1 if kind == "no noise" else 1.0)
    assert 0.85 < r.std() < 1.15


def test_batches_are_pooled_by_how_much_noise_they_have() -> None:
    """A batch that is all noise changes nothing: one of a thousand times the noise leaves the estimate as it was."""
    mdp = random_mdp(3, start=0)
    alone, both = Model(mdp.problem(100)), Model(mdp.problem(100))
    good, _ = _release(mdp, 1000, 5.0, 1)
    bad, _ = _release(mdp, 1000, 5000.0, 1)  # the same policy
    alone.add(good)
    both.add(good)
    both.add(bad)
    np.testing.assert_allclose(both.probabilities, alone.probabilities, atol=2e-3)
    np.testing.assert_allclose(both.rows.rewards, alone.rows.rewards, atol=2e-3)


@pytest.mark.parametrize("policies", [1, 3])
def test_counts_without_noise_are_pooled_with_noisy_ones_as_if_theirs_were_tiny(policies: int) -> None:
    mdp = random_mdp(3, start=0)
    exact, nearly = Model(mdp.problem(100)), Model(mdp.problem(100))
    for seed in range(6):
        noise = 0.0 if seed % 2 else 15.0
        exact.add(_release(mdp, 400, noise, seed, policies)[0])
        nearly.add(_release(mdp, 400, max(noise, 1e-3), seed, policies)[0])
    for name in ("visits", "probabilities", "raw", "raw_paid", "inverse_ess", "noise"):
        np.testing.assert_allclose(getattr(exact, name), getattr(nearly, name), rtol=1e-3, atol=1e-4, err_msg=name)
    for name in ("rewards", "reward_variances"):
        of_both = getattr(exact.rows, name), getattr(nearly.rows, name)
        np.testing.assert_allclose(*of_both, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("unpaid", [3, 10, 40, 200])
def test_who_was_never_paid_may_yet_be(unpaid: int) -> None:
    """Without noise the error of such a reward is about that of the beta law of an even prior; else far less."""
    mdp = MDP(np.empty((0, 1, 2, 1)), [[[0.0, 1.0]]], np.ones(1))
    exact, nearly = (Model(mdp.problem(1000)) for _ in range(2))
    tiny = GaussianNoise(1e-3)
    for model, noise in ((exact, NoNoise()), (nearly, tiny)):
        for arm, users in ((0, unpaid), (1, 100)):
            batch = full_batch(mdp, users, Mixture.single([[arm]]))
            counts = CountPopulation(mdp, 0).play(batch).values.astype(np.float64)
            model.add(Release(batch, counts, noise, noise.variance))
    error, less = (math.sqrt(model.rows.reward_variances[0, 0, 0]) for model in (exact, nearly))
    law = stats.beta(1, 1 + unpaid)
    assert law.std() < error < 1.15 * law.std()
    assert less < 0.75 * law.std()


def test_many_releases_find_the_model() -> None:
    mdp = random_mdp(5, horizon=3, states=3, actions=2, sparse=True)
    model, _ = _fit(mdp, 100_000, 20, 30.0)
    seen = model.visits > 1000
    row = np.repeat(seen[:-1].ravel(), np.diff(mdp.layout.row_starts))
    assert seen.mean() > 0.9
    np.testing.assert_allclose(model.probabilities[row], mdp.probabilities[row], atol=0.02)
    np.testing.assert_allclose(model.rows.rewards[seen], mdp.rewards[seen], atol=0.02)


@pytest.mark.parametrize(("alike", "most"), [(True, 0.5), (False, 0.8)])
def test_shrunk_rows_are_closer_than_raw_ones_and_know_how_close(alike: bool, most: float) -> None:
    """Little data: mean squared errors fall to 0.12 and 0.66; stated variances are right within a factor two."""
    raw = shrunk = rewards = stated = 0.0
    for seed in range(8):
        mdp = _alike(seed) if alike else random_mdp(seed, 6, 4, 2, start=0)
        model, _ = _fit(mdp, 200, 20, 20.0, seed)
        row = np.repeat(model.visits[:-1].ravel() > 30, np.diff(mdp.layout.row_starts))
        raw += ((model.raw - mdp.probabilities)[row] ** 2).sum()
        shrunk += ((model.probabilities - mdp.probabilities)[row] ** 2).sum()
        rewards += ((model.rows.rewards - mdp.rewards) ** 2).sum()
        stated += model.rows.reward_variances.sum()
    assert shrunk < most * raw
    assert 0.5 < rewards / stated < 2.0


# Are the steps alike?


@pytest.mark.parametrize(("users", "sd"), [(300, 0.0), (300, 5.0), (1000, 20.0), (1000, 100.0)])
def test_steps_that_are_the_same_are_told_from_steps_that_differ(users: int, sd: float) -> None:
    """Rows of a Dirichlet law of ones over 4 states vary by t = 1/5, uniform rewards by about 1/3 of r(1-r)."""
    same, apart = _alike(1), random_mdp(1, 6, 4, 2, start=0)
    model, _ = _fit(same, users, 30, sd)
    assert model.between[0].mean() < 0.02
    assert model.between[1].mean() < 0.03
    assert model.rows.homogeneity > 0.85
    model, _ = _fit(apart, users, 30, sd)
    assert 0.12 < model.between[0].mean() < 0.35
    assert 0.25 < model.between[1].mean() < 0.6
    assert model.rows.homogeneity == 0


@pytest.mark.parametrize("sd", [0.0, 20.0])
def test_transitions_and_rewards_and_actions_are_told_apart(sd: float) -> None:
    """Only the rewards differ, or only the transitions of action 1."""
    same, rng = _alike(2), np.random.default_rng(0)
    model, _ = _fit(MDP(same.transitions, rng.random(same.rewards.shape), same.start), 1000, 30, sd)
    assert model.between[0].max() < 0.02
    assert model.between[1].mean() > 0.2
    transitions = same.transitions.copy()
    transitions[:, :, 1] = rng.dirichlet(np.ones(4), size=(5, 4))
    model, _ = _fit(MDP(transitions, same.rewards, same.start), 1000, 30, sd)
    assert model.between[1].max() < 0.03
    assert model.between[0][:, 0].max() < 0.03
    assert model.between[0][:, 1].min() > 0.08


def test_noise_alone_says_nothing_of_differences() -> None:
    """The prior of t has mean 0.3; what noise says moves it little, and the same for both kinds."""
    means = [_fit(mdp, 10, 20, 500.0)[0].between[0].mean() for mdp in (_alike(0), random_mdp(0, 6, 4, 2, start=0))]
    assert np.abs(np.diff(means)) < 0.02
    assert 0.25 < means[0] < 0.35


# Robustness and memory.


@pytest.mark.parametrize("users", [1, 1000])
@pytest.mark.parametrize("sd", [0.0, 1e-3, 1e6])
@pytest.mark.parametrize("kind", ["one step", "dense", "sparse", "no choice", "unknown start"])
def test_everything_stays_finite(kind: str, sd: float, users: int) -> None:
    """One user and nothing but noise, a horizon of one, rows of width one, first states unknown."""
    mdp = random_mdp(1, 1 if kind == "one step" else 4, 3, 2, sparse=kind == "sparse")
    if kind == "no choice":
        successors = np.random.default_rng(0).integers(3, size=(3, 3, 2, 1))
        mdp = MDP.sparse(successors, np.ones(successors.shape), mdp.rewards, mdp.start)
    problem = mdp.problem(100)
    if kind == "unknown start":
        problem = type(problem)(4, 3, 2, 100)
    model = Model(problem)
    _check_sound(model)
    for seed in range(6):
        model.add(_release(mdp, users, sd, seed, 1 + seed % 3)[0])
        _check_sound(model)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sd", [0.0, 10.0])
@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_loaded_state_goes_on_bit_for_bit(sparse: bool, sd: float, batches: int) -> None:
    mdp = random_mdp(4, sparse=sparse)
    first, second = (Model(mdp.problem(100)) for _ in range(2))
    for seed in range(batches):
        first.add(_release(mdp, 50, sd, seed, 1 + seed % 3)[0])
    second.load_state({name: array.copy() for name, array in first.state().items()})
    assert first.visits.any() == second.visits.any() == (batches > 0)
    for added in range(3):
        for name, part in first.rows._asdict().items():
            np.testing.assert_array_equal(part, getattr(second.rows, name), err_msg=name)
        release, _ = _release(mdp, 50, sd, 100 + added)
        first.add(release)
        second.add(release)


def test_a_state_that_does_not_fit_is_refused() -> None:
    mdp = random_mdp(4)
    model, _ = _fit(mdp, 50, 3, 10.0, policies=2)
    state = model.state()
    for name, wrong in [
        *((name, wrong) for name, array in state.items() for wrong in (array[..., :0], array.astype(np.int8), None)),
        ("noises", np.full_like(state["noises"], np.nan)),
        ("noises", np.full_like(state["noises"], -1.0)),
        ("values", np.full_like(state["values"], np.inf)),
        ("exact_visits", np.full_like(state["exact_visits"], -1.0)),
        ("policies", np.full_like(state["policies"], mdp.n_actions)),
        ("release", state["release"][::-1]),
        ("release", np.zeros_like(state["release"])),
    ]:
        damaged = {key: value for key, value in (state | {name: wrong}).items() if value is not None}
        with pytest.raises(StateMismatchError, match="no fitting"):
            Model(mdp.problem(10**6)).load_state(damaged)


@pytest.mark.parametrize("alike", [True, False])
def test_what_other_steps_tell_adds_to_the_precision_where_steps_are_alike(alike: bool) -> None:
    """A row's own visits, the mean of both families, and those of the same state and action at other steps, or not."""
    mdp = random_mdp(6, 5, 3, 2, start=0)
    if alike:
        table = mdp.layout.table(mdp.probabilities)
        mdp = MDP(np.broadcast_to(table[:1], table.shape), np.broadcast_to(mdp.rewards[:1], (5, 3, 2)), mdp.start)
    model, _ = _fit(mdp, 3000, 8, 10.0)
    own = 1 / (C.typical * model.inverse_ess[1] + 2 * model.noise[1])
    own[:-1] = (own[:-1] + 1 / (C.typical * model.inverse_ess[0] + model.noise[0])[:-1]) / 2
    if alike:
        assert (model.rows.precision > 1.5 * own).mean() > 0.5
    else:
        np.testing.assert_allclose(model.rows.precision, own)


@pytest.mark.parametrize(("users", "sd"), [(100, 10.0), (1000, 10.0), (3, 0.0), (30, 0.0)])
def test_what_is_left_open_of_sparse_rows_is_near_their_error(users: int, sd: float) -> None:
    """Half of the transitions are impossible, and not known to be. Values are drawn at random.

    Squared errors over the stated variance, of sums, measured: 1.01, 0.73, 1.08, 1.36.
    """
    off = stated = 0.0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        table = random_mdp(seed, 5, 6, 2, sparse=True, start=0)
        mdp = MDP(table.layout.table(table.probabilities), table.rewards, table.start)
        model, _ = _fit(mdp, users, 15, sd, seed)
        values, rows = np.tile(rng.random(6), (6, 1)), model.rows
        for h, x, a in np.ndindex(*mdp.layout.shape):
            if model.visits[h, x, a] > users / 10:
                mean, variance = expected_value(rows, values, h, x, a)
                first, last = mdp.layout.row_starts[(h * 6 + x) * 2 + a :][:2]
                off += (mean - mdp.probabilities[first:last] @ values[0]) ** 2
                stated += variance
    assert 0.5 < off / stated < 1.6


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0, 1e9])
def test_noise_leaves_no_more_open_of_a_value_than_a_prior(noise: float) -> None:
    """Against the formula; however strong the noise is, what it leaves open is below the prior's variance."""
    rng = np.random.default_rng(3)
    p, values = np.array([0.7, 0.295, 0.005, 0.0]), rng.random(4)
    rows = Model(Problem(2, 4, 1, 1000)).rows
    rows.probabilities[:4], rows.chance_error[0, 0, 0], rows.noise_error[0, 0, 0] = p, 0.2, noise
    mean, variance = expected_value(rows, np.tile(values, (3, 1)), 0, 0, 0)
    squares = (values - p @ values) ** 2
    data, prior = noise * squares.sum(), (np.maximum(p, C.min_chance) * squares).sum()
    assert mean == pytest.approx(p @ values)
    assert variance == pytest.approx(0.2 * p @ squares + (data and 1 / (1 / data + 1 / prior)))
    assert variance < 0.2 * p @ squares + prior
