"""The learner of one random step: its contract, what noisy counts tell it, and what it learns."""

from __future__ import annotations

import numpy as np
import pytest

from shufflerl import envs, learn, learners, privatizers, state
from shufflerl.arrays import FloatArray
from shufflerl.counts import Batch, Release
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.experiments.setting import Setting, run
from shufflerl.learners.base import Learner
from shufflerl.learners.contextual_bandit import ContextualBandit, fit, posterior
from shufflerl.mdp import MDP, Problem
from shufflerl.noise import PoissonNoise
from shufflerl.population import CountPopulation
from shufflerl.privatizers.none import NoPrivacy
from shufflerl.returns import ReturnProblem
from shufflerl.steps import StepProblem
from shufflerl.testing import LearnerContract
from tests.support.examples import random_mdp, unsteered_mdp


class TestContract(LearnerContract):
    mdp = unsteered_mdp(21)

    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return ContextualBandit(problem, seed)


class TestLargeBatches(LearnerContract):
    mdp = unsteered_mdp(22)

    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return ContextualBandit(problem, seed, first=100)


def test_the_posterior_is_that_of_the_dense_model() -> None:
    """Mean, draws and likelihood against one normal law of all p[x, a], by matrices of their covariances."""
    rng = np.random.default_rng(0)
    states, actions, between, own = 3, 4, 0.06, 0.1
    scale = rng.uniform(0.5, 1.0, actions)
    precision = rng.uniform(0, 200, (states, actions)) * (rng.random((states, actions)) < 0.7)
    data = rng.normal(0, 0.2, (states, actions))
    x, a = np.divmod(np.arange(states * actions), actions)
    alike = 0.3**2 * (1 + (x[:, None] == x)) + between**2 * (a[:, None] == a) + own**2 * np.eye(len(x))
    prior = alike * np.outer(scale[a], scale[a])
    seen = np.flatnonzero(precision.ravel())
    told = prior[np.ix_(seen, seen)] + np.diag(1 / precision.ravel()[seen])
    gain = np.linalg.solve(told, prior[seen]).T
    mean = 0.5 * scale[a] + gain @ data.ravel()[seen]
    covariance = prior - gain @ prior[seen]
    found_likelihood, found = fit(precision, precision * data, scale, between, own)
    np.testing.assert_allclose(found.mean.ravel(), mean, atol=1e-10)
    likelihood = -0.5 * (data.ravel()[seen] @ np.linalg.solve(told, data.ravel()[seen]) + np.linalg.slogdet(told)[1])
    constant = 0.5 * np.log(precision.ravel()[seen]).sum()  # the same whatever the deviations are
    assert found_likelihood == pytest.approx(likelihood - constant, abs=1e-9)
    draws = found.sample(40_000, rng).reshape(-1, len(x))
    deviations = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=6 * deviations.max() / 200)
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=6 * deviations.max() ** 2 / 100)


def test_how_much_actions_differ_is_learned() -> None:
    precision = np.full((4, 5), 1e4)
    same = np.zeros((4, 5))
    apart = np.random.default_rng(0).normal(0, 0.2, (4, 5))
    variances = [posterior(precision * sure, precision * sure * same, np.ones(5)).variance.max() for sure in (1.0,)]
    loose = posterior(precision, precision * apart, np.ones(5))
    assert variances[0] < loose.variance.max()
    np.testing.assert_allclose(loose.mean, 0.5 + apart, atol=0.02)


@pytest.mark.parametrize("privatizer", ["none", "shuffle", "central", "local-sampled"])
def test_it_learns_under_every_model_of_privacy(privatizer: str) -> None:
    """A state for every action to be best in, whatever the step."""
    rewards = np.broadcast_to(np.where(np.eye(3), 0.9, 0.2), (10, 3, 3))
    mdp = MDP(np.full((9, 3, 3, 3), 1 / 3), rewards, np.full(3, 1 / 3))
    learner = ContextualBandit(mdp.problem(20_000), 0)
    budget = {} if privatizer == "none" else {"epsilon": 2.0, "delta": 1e-6, "seed": 0}
    history = learn(learner, CountPopulation(mdp, 0), privatizers.make(privatizer, learner, **budget))  # type: ignore[arg-type]
    assert history.users.sum() == 20_000
    assert history.regret[-1] == pytest.approx(0.0, abs=1e-6)
    assert learner.released.policies[0].argmax(axis=1).tolist() == [0, 1, 2]
    assert learner.view().estimate is not None


def test_regret_is_of_whole_episodes() -> None:
    mdp = unsteered_mdp(5, horizon=6)
    history = learn(ContextualBandit(mdp.problem(60), 0), CountPopulation(mdp, 0), NoPrivacy())
    assert history.reward.sum() + history.regret.sum() == pytest.approx(60 * mdp.optimal_value)


def test_one_counter_of_noise_is_no_visit() -> None:
    """What nobody visited stays as unknown as before, most of the time, whatever the noise says."""
    learner = ContextualBandit(StepProblem(5, 2, 2, 10_000), 0)
    learner.expect(PoissonNoise(49.0))
    batch = learner.next_batch()
    assert batch is not None
    noisy = np.array([100.0, 300.0, 6.0, -4.0, -3.0, 2.0, 200.0, 0.0])
    learner.observe(Release(batch, noisy, PoissonNoise(49.0), 49.0))
    assert learner.precision[0, 1] == learner.precision[1, 0] == 0.0
    assert learner.precision[0, 0] > learner.precision[1, 1] > 0.0


def test_batches_grow_and_are_none_too_small() -> None:
    learner = ContextualBandit(StepProblem(20, 6, 8, 20_000), 0, first=100)
    learner.expect(PoissonNoise(42.0))
    made = envs.make("spectrum-tiles")
    sizes = []
    while (batch := learner.next_batch()) is not None:
        sizes.append(batch.users)
        learner.observe(Release(batch, np.full(96, batch.users / 96), PoissonNoise(42.0), 42.0))
    assert sum(sizes) == made.problem(20_000).episodes
    assert min(sizes) >= 48 * np.sqrt(42.0)
    assert (np.diff(sizes[:-1]) >= 0).all()
    assert len(sizes) <= learner.max_batches
    assert len(batch_weights(learner)) == 1


def batch_weights(learner: ContextualBandit) -> list[float]:
    assert learner.deployed is not None
    return list(learner.deployed.weights)


def test_spectrum_in_tiles_is_learned_and_told() -> None:
    setting = Setting("spectrum-tiles", "contextual-bandit", "shuffle", 6_000, 3.0, 1e-6)
    done = run(setting, 0)
    game = envs.make("spectrum-sensing")
    assert done.final_return is not None
    assert done.final_return > game.best_fixed() + 3  # type: ignore[union-attr]
    assert done.certificate is not None
    assert done.certificate.changed_counters == 2
    assert done.history.reward[-1] / done.history.users[-1] > done.history.reward[0] / done.history.users[0]


@pytest.mark.parametrize("name", [name for name, _ in learners.LEARNERS if name != "contextual-bandit"])
def test_learners_of_whole_episodes_are_refused(name: str) -> None:
    problem = envs.make("spectrum-tiles").problem(100)
    with pytest.raises(InvalidInputError, match=f"{name} needs a whole episode .* use the learner contextual-bandit"):
        learners.make(name, problem, 0)


def test_what_it_cannot_learn_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="observations here are vectors"):
        ContextualBandit(ReturnProblem(2, 2, 5, 100), 0)  # type: ignore[arg-type]
    steered = random_mdp(0)
    with pytest.raises(InvalidInputError, match="depends on their action"):
        learn(ContextualBandit(steered.problem(100), 0), CountPopulation(steered, 0), NoPrivacy())
    other = unsteered_mdp(0, horizon=4)
    with pytest.raises(InvalidInputError, match=r"learner was made for \(steps, states, actions\) = \(3, 3, 2\)"):
        learn(ContextualBandit(unsteered_mdp(0).problem(100), 0), CountPopulation(other, 0), NoPrivacy())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("precision", -np.ones((3, 2))), ("weighted", np.full((3, 2), np.nan)), ("weighted", np.ones((2, 2)))],
)
def test_a_spoilt_state_is_refused(name: str, wrong: FloatArray) -> None:
    learner = ContextualBandit(StepProblem(5, 3, 2, 100), 0)
    header, arrays = state.unpack(learner.save())
    with pytest.raises(StateMismatchError, match=f"no fitting {name}"):
        learner.restore(state.pack(header, arrays | {name: wrong}))
    header["values"]["noise"] = -1.0
    with pytest.raises(StateMismatchError, match="no fitting noise"):
        learner.restore(state.pack(header, arrays))


def test_a_batch_asks_for_one_counter_of_each_user() -> None:
    batch = ContextualBandit(StepProblem(500, 3, 2, 1_000), 0).next_batch()
    assert isinstance(batch, Batch)
    assert (batch.query.size, batch.query.changed_counters) == (12, 2)


def test_liars_who_tell_whole_episodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "environment", lambda *_: unsteered_mdp(0))
    liars = {"attack": "false episodes", "share": 0.1}
    with pytest.raises(InvalidInputError, match="Liars tell whole episodes"):
        run(Setting("riverswim", "contextual-bandit", "none", 100, liars=liars), 0)


def test_scores_show_themselves_in_notebooks() -> None:
    shown = ContextualBandit(StepProblem(5, 3, 2, 100), 0).released._repr_html_()
    assert "Scores(states=3, actions=2)" in shown
