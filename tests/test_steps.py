"""One random step of each episode: its law, its sensitivity, and what is refused. Errors by chance: below 1e-4 each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from shufflerl import envs
from shufflerl.counts import Batch, CountQuery, Counts, Trajectories
from shufflerl.envs.from_gymnasium import GymSimulator
from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.sensing import SensingTiles
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Mixture
from shufflerl.planning import mixture_value
from shufflerl.policies import MAX_PARAMETERS, Scores
from shufflerl.population import CountPopulation, StepPopulation, TrajectoryPopulation, random_step
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import InMemory, ServersInMemory, audit
from shufflerl.steps import StepProblem, one_step, step_law
from tests.support.examples import all_trajectories, random_mdp, unsteered_mdp

LEVEL = 1e-4
MDP_ = unsteered_mdp(3)
FAMILY = Scores(3, 2)
MIXTURE = Mixture(np.random.default_rng(4).normal(size=(2, 3, 2)), [0.3, 0.7], FAMILY)


def batch(users: int, mixture: Mixture = MIXTURE, mdp: MDP = MDP_) -> Batch:
    return Batch(0, users, mixture, CountQuery.everything(StepProblem.of(mdp.problem(users))))


def chances() -> Any:
    """P(tag) of one user: of every trajectory and every step of it."""
    found = np.zeros(batch(1).query.size)
    for weight, policy in zip(MIXTURE.weights, MIXTURE.as_tables(MDP_.horizon).policies, strict=True):
        states, actions, rewards, likely = all_trajectories(MDP_, policy)
        for h in range(MDP_.horizon):
            steps = Trajectories(states[:, [h]], actions[:, [h]], rewards[:, [h]])
            np.add.at(found, batch(1).query.tags(steps)[:, 0], weight * likely / MDP_.horizon)
    return found


@pytest.mark.parametrize(
    "population",
    [
        CountPopulation(MDP_, 1),
        TrajectoryPopulation(MDP_, 1),
        TrajectoryPopulation(GymSimulator(TabularEnv(MDP_), 3, 0, 1), 1),
    ],
    ids=str,
)
def test_counts_are_those_of_a_uniform_step_of_every_episode(population: Any) -> None:
    """Chi-square against the exact law by enumeration."""
    users = 4_000
    counts = population.play(batch(users) if population.mdp is not None else larger(users))
    values = counts.values if population.mdp is not None else counts.values.reshape(4, 2, 2)[:3].ravel()
    exact = chances()
    assert values.sum() == users
    assert not values[exact == 0].any()
    assert stats.chisquare(values[exact > 0], users * exact[exact > 0]).pvalue > LEVEL
    per_user = counts.earned / users
    expected = mixture_value(MDP_, MIXTURE)
    assert per_user == pytest.approx(expected, abs=6 * np.sqrt(MDP_.horizon / users))


def larger(users: int) -> Batch:
    """The bridge to Gymnasium adds a state, after the end of an episode; these have none."""
    scores = np.concatenate([MIXTURE.policies, np.zeros((2, 1, 2))], axis=1)
    problem = StepProblem(MDP_.horizon, 4, 2, users)
    return Batch(0, users, Mixture(scores, MIXTURE.weights, Scores(4, 2)), CountQuery.everything(problem))


def test_counts_of_any_number_of_users_cost_the_same() -> None:
    users = 10**15
    found = CountPopulation(MDP_, 0).play(batch(users)).values
    np.testing.assert_allclose(found / users, chances(), atol=1e-6)


def test_a_replaced_user_changes_two_counters_however_long_episodes_are() -> None:
    """Every pair of trajectories, every pair of steps; and two it is, not fewer."""
    states, actions, rewards, _ = all_trajectories(MDP_, MIXTURE.as_tables(MDP_.horizon).policies[0])
    asked = batch(1)
    alone = {
        tuple(
            Counts.of(
                asked, Trajectories(states[[i], h : h + 1], actions[[i], h : h + 1], rewards[[i], h : h + 1])
            ).values
        )
        for i in range(len(states))
        for h in range(MDP_.horizon)
    }
    most = max(int((np.array(one) != other).sum()) for one, other in itertools.product(alone, alone))
    assert (asked.query.touched_counters, asked.query.changed_counters, most) == (1, 2, 2)
    assert set(asked.query.groups) == {0}


@pytest.mark.slow(3)
@pytest.mark.parametrize("system", [InMemory, ServersInMemory])
def test_the_audit_finds_nothing_to_say_against_it(system: Any) -> None:
    """False alarms: at most one in a thousand; epsilon is taken large, so that a few transcripts do."""
    problem = StepProblem(20, 2, 2, 1_000)
    report = audit(Budget(3.0, 1e-5), samples=200, system=system(problem=problem))
    assert report.passed, report
    assert CountQuery.everything(problem).changed_counters == 2


def test_a_step_is_drawn_from_all_of_them() -> None:
    """Of 3,000 users with three steps; each number of times within six deviations."""
    steps = np.tile([0, 1, 2], (3_000, 1))
    drawn = random_step(Trajectories(steps, steps, np.zeros_like(steps)), np.random.default_rng(0))
    assert (drawn.states == drawn.actions).all()
    assert np.abs(np.bincount(drawn.states[:, 0], minlength=3) - 1_000).max() < 6 * np.sqrt(3_000 * 2 / 9)


def test_scores_are_played_as_the_tables_that_they_are() -> None:
    tables = MIXTURE.as_tables(4)
    assert tables.policies.shape == (2, 4, 3)
    for scores, table in zip(MIXTURE.policies, tables.policies, strict=True):
        assert table.tolist() == [[int(FAMILY.act(scores, x)) for x in range(3)]] * 4


def test_actions_that_steer_are_refused() -> None:
    steered = random_mdp(0)
    for population in (CountPopulation(steered, 0), TrajectoryPopulation(steered, 0)):
        with pytest.raises(InvalidInputError, match=r"Where users go from state \d at step \d depends on their action"):
            population.play(batch(10, mdp=steered))
    np.testing.assert_allclose(step_law(MDP_).sum(axis=1), 1.0)


def test_a_step_is_a_problem_of_its_own() -> None:
    """What any policy earns in it is what it earns in an episode, by step; in units of episodes, as much."""
    alone = one_step(MDP_)
    for policy in itertools.product(range(2), repeat=3):
        whole = mixture_value(MDP_, Mixture.single([policy] * 3))
        assert mixture_value(alone, Mixture.single([policy])) == pytest.approx(whole / 3)
        assert alone.units.value(whole / 3) == pytest.approx(whole)
    assert CountQuery.everything(alone.problem(1)).changed_counters == 2
    with pytest.raises(InvalidInputError, match="depends on their action"):
        one_step(random_mdp(0))


def test_states_that_nobody_reaches_may_be_steered() -> None:
    moves = np.zeros((1, 2, 2, 2))
    moves[0, 0, :, 0] = 1.0
    moves[0, 1] = np.eye(2)
    assert step_law(MDP(moves, np.full((2, 2, 2), 0.5), [1.0, 0.0])).tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_a_user_sees_one_state_of_each_action() -> None:
    """Of each channel its own tile: what is told is that of the channel that was chosen."""
    made = envs.make("spectrum-tiles", n_channels=3, tiles=4)
    assert isinstance(made, SensingTiles)
    scores = np.zeros((1, 4, 3))
    scores[0, 3], scores[0, 2, 1] = 1.0, 2.0  # the second channel's third tile is best of all, then any last one
    told, returns = made.play(Mixture(scores, [1.0], made.family), np.zeros(500, dtype=int), np.random.default_rng(0))
    tiles, channels, heard = told.T
    assert 2 in tiles[channels == 1]
    assert 2 not in tiles[channels == 2]  # then another had its last tile, or all were alike and the first was taken
    assert heard.mean() == pytest.approx(returns.mean() / made.horizon, abs=6 * 0.5 / np.sqrt(500))
    with pytest.raises(InvalidInputError, match=r"expected Scores\(states=4, actions=3\)"):
        made.play(MIXTURE, np.zeros(1, dtype=int), np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match="more than the 10,000,000 that can play one by one"):
        StepPopulation(made, 0).play(Batch(0, 10**8, Mixture(scores, [1.0], made.family), _query(made)))


def _query(made: SensingTiles) -> CountQuery:
    return CountQuery.everything(made.problem(10))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"steps": 0}, "steps is 0; expected a whole number of at least 1"),
        ({"scale": [1.0]}, r"scale has shape \(1,\); expected \(2,\)"),
        ({"scale": [0.0, 1.0]}, "expected numbers above 0 and at most 1"),
        ({"scale": [0.5, 1.5]}, "expected numbers above 0 and at most 1"),
        ({"n_states": MAX_PARAMETERS}, "200,000 scores; expected at most 100,000"),
    ],
)
def test_what_is_no_problem_of_one_step_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        StepProblem(**{"steps": 5, "n_states": 3, "n_actions": 2, "episodes": 10} | given)


def test_a_problem_is_known_by_all_that_is_public_of_it() -> None:
    problem = StepProblem(5, 3, 2, 10)
    assert StepProblem.of(problem) is problem
    assert StepProblem(5, 3, 2, 10, scale=[1.0, 1.0]).fingerprint == problem.fingerprint
    for other in (StepProblem(6, 3, 2, 10), StepProblem(5, 3, 2, 10, scale=[1.0, 0.5]), StepProblem(5, 3, 2, 11)):
        assert other.fingerprint != problem.fingerprint


def test_a_player_that_does_not_say_how_long_episodes_are_is_refused() -> None:
    class Silent:
        def play(self, policy: Any, rng: Any) -> Any:
            raise AssertionError

    with pytest.raises(InvalidInputError, match="does not say how long episodes are; give it a `horizon`"):
        TrajectoryPopulation(Silent(), 0).play(batch(1))
