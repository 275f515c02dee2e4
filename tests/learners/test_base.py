"""How far the values that learners tell can be believed: intervals against the truth, over whole runs."""

from __future__ import annotations

import numpy as np
import pytest

from shufflerl import envs, learners, privatizers
from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.learners.base import Learner
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.mdp import MDP, Mixture, Problem
from shufflerl.planning import mixture_value
from shufflerl.population import CountPopulation

EPISODES, SEEDS = 20_000, 10


def meant(learner: Learner) -> Mixture:
    """The policy that the estimate is of."""
    if isinstance(learner, SDPPE):
        assert learner.radius.incumbent is not None
        return Mixture.single(learner.radius.incumbent)
    assert learner.playing is not None
    return learner.playing


def covered(env: str, name: str, epsilon: float | None) -> tuple[FloatArray, BoolArray, FloatArray]:
    """After every batch of several runs: the share of episodes played, whether the truth is inside, the width."""
    rows = []
    for seed in range(SEEDS):
        mdp = envs.make(env, seed)
        assert isinstance(mdp, MDP)
        learner = learners.make(name, mdp.problem(EPISODES), seed)
        privatizer = (
            privatizers.make("none", learner, seed=seed)
            if epsilon is None
            else privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-5, seed=seed)
        )
        population = CountPopulation(mdp, seed)
        while (batch := learner.next_batch()) is not None:
            learner.observe(privatizer.release(population.play(batch)))
            learner.next_batch()
            if (told := learner.view().estimate) is not None:
                inside = told.low <= mixture_value(mdp, meant(learner)) <= told.high
                rows.append((learner.episodes_played / EPISODES, inside, told.high - told.low))
    played, inside, width = np.array(rows, dtype=float).T
    return played, inside > 0, width


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("optimistic", 0.95), ("sdp-pe", 0.8)])
@pytest.mark.parametrize(("env", "epsilon"), [("riverswim", 1.0), ("random", 3.0), ("spectrum", None)])
def test_intervals_hold_the_truth(name: str, least: float, env: str, epsilon: float | None) -> None:
    """Not in all runs: the policy was chosen by the very data that judge it. And intervals get narrower."""
    played, inside, width = covered(env, name, epsilon)
    assert inside[played > 0.1].mean() >= least
    assert inside.mean() >= least - 0.05
    assert width[played > 0.9].mean() < 0.5 * width[played < 0.1].mean()


def test_the_papers_interval_is_its_radius() -> None:
    mdp = envs.make("riverswim", 0, n_states=2, horizon=2)
    assert isinstance(mdp, MDP)
    learner = SDPPE(mdp.problem(10**12), 0, constants="paper")
    privatizer, population = privatizers.make("none", learner, seed=0), CountPopulation(mdp, 0)
    while (batch := learner.next_batch()) is not None:
        learner.observe(privatizer.release(population.play(batch)))
    told, last = learner.view().estimate, learner.trace[-1]
    assert told is not None
    assert last.radius is not None
    assert told.value == last.best_value
    assert told.low == max(0.0, told.value - last.radius)
    assert told.high == min(2.0, told.value + last.radius)
    assert told.low <= mixture_value(mdp, meant(learner)) <= told.high
    assert "paper's radius" in told.description


def test_without_the_law_of_the_first_state_the_value_is_not_known() -> None:
    mdp = envs.make("riverswim", 0)
    assert isinstance(mdp, MDP)
    problem = Problem(mdp.horizon, mdp.n_states, mdp.n_actions, episodes=1000)
    learner = learners.make("optimistic", problem, 0)
    privatizer, population = privatizers.make("none", learner, seed=0), CountPopulation(mdp, 0)
    while (batch := learner.next_batch()) is not None:
        learner.observe(privatizer.release(population.play(batch)))
    assert learner.view().estimate is None
