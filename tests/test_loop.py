from __future__ import annotations

import numpy as np
import pytest

from shufflerl import planning
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.loop import learn
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy
from tests.examples import random_mdp

MDP_ = random_mdp(6, horizon=3, states=3, actions=2)


@pytest.mark.parametrize("batch", [1, 25])
def test_regret_is_the_exact_expected_loss_of_what_was_deployed(batch: int) -> None:
    history = learn(UCBVI(MDP_.problem(200), 0, batch=batch), CountPopulation(MDP_, 0), NoPrivacy())
    switches = 0
    for b, record in enumerate(history):
        value = planning.mixture_value(MDP_, record.mixture)
        assert record.regret == pytest.approx(record.users * (MDP_.optimal_value - value), abs=1e-12)
        assert record.reward == pytest.approx(record.users * value, abs=1e-12)
        switches += b > 0 and record.mixture != history.mixture(b - 1)
    assert history.switches == switches > 0
    episodes, cumulative = history.curve
    assert (episodes[0], cumulative[0], episodes[-1]) == (0, 0.0, 200)
    assert cumulative[-1] == pytest.approx(history.total_regret)


def test_progress_is_reported_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    learn(
        UCBVI(MDP_.problem(100), 0, batch=30),
        CountPopulation(MDP_, 0),
        NoPrivacy(),
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen == [(30, 100), (60, 100), (90, 100), (100, 100)]


def test_nothing_left_to_learn_is_an_empty_history() -> None:
    learner = UCBVI(MDP_.problem(10), 0)
    learn(learner, CountPopulation(MDP_, 0), NoPrivacy())
    history = learn(learner, CountPopulation(MDP_, 0), NoPrivacy())
    assert (len(history), history.total_regret, history.switches) == (0, 0.0, 0)


class _Unknown:
    """An environment known only by playing it: one state, action 1 pays."""

    def play(
        self, policy: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # one step
        return np.array([0]), policy[0, [0]].astype(np.int64), policy[0, [0]].astype(np.int64)


def test_without_a_truth_rewards_are_counted_and_regret_is_unknown() -> None:
    from shufflerl.mdp import Problem

    history = learn(UCBVI(Problem(1, 1, 2, 100), 0, batch=10), TrajectoryPopulation(_Unknown(), 0), NoPrivacy())
    assert np.isnan(history.regret).all()
    assert history.reward.sum() >= 80
