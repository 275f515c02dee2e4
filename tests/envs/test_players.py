"""Environments known by returns: compiled dynamics against Gymnasium's, spaces, ranges, spectrum sensing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from shufflerl import envs
from shufflerl.envs import control_kernels as kernels
from shufflerl.envs.players import TASKS, ControlTask, GymPlayer
from shufflerl.envs.playing import Interface, play_episode
from shufflerl.envs.sensing import SpectrumSensing
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture
from shufflerl.policies import Network


@pytest.mark.parametrize("id", list(TASKS))
def test_dynamics_are_gymnasiums_step_by_step(id: str) -> None:
    """From Gymnasium's own state in every step, so that errors do not add up: states within 1e-14, all else equal."""
    env: Any = gymnasium.make(id).unwrapped
    rng, number = np.random.default_rng(0), TASKS[id].number
    over = True
    for step in range(3000):
        if over or step % 200 == 0:
            observation, _ = env.reset(seed=step)
        state = np.array(env.state, dtype=np.float64)
        seen = np.empty(len(observation))
        kernels.observe(number, state, seen)
        np.testing.assert_allclose(seen, observation, rtol=2e-7)
        action = int(rng.integers(TASKS[id].actions))
        observation, reward, over, _, _ = env.step(action)
        assert kernels.advance(number, state, action) == (reward, over)
        np.testing.assert_allclose(state, np.array(env.state, dtype=np.float64), atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("id", list(TASKS))
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_whole_episodes_return_what_gymnasium_returns(id: str, hidden: tuple[int, ...]) -> None:
    task, env = ControlTask(id), gymnasium.make(id)
    interface, rng = Interface.of(env), np.random.default_rng(1)
    family = Network(interface.inputs, interface.actions, hidden)
    np.testing.assert_allclose(task.middle, interface.box[0] if interface.box else 0, rtol=1e-6)
    np.testing.assert_allclose(task.scale, interface.box[1] if interface.box else 1, rtol=1e-6)
    policies = family.checked(3 * rng.normal(size=(4, family.size)))
    for policy in policies:
        env.reset(seed=7)
        start = np.array(env.unwrapped.state, dtype=np.float64)[None]  # type: ignore[attr-defined]
        returns = np.empty(1)
        layers, given = np.array(family.layers), np.zeros(1, dtype=np.int64)
        numbers = policy[None].astype(np.float64)
        kernels.play_tasks(
            task.task.number, numbers, layers, task.middle, task.scale, given, start, task.horizon, returns
        )
        played = play_episode(env, interface, family, policy, task.horizon, seed=7)
        assert returns[0] == pytest.approx(played, abs=2)  # a step's rounding may end an episode a step later


def test_units_are_squashed_as_by_tanh() -> None:
    rng = np.random.default_rng(3)
    given = np.concatenate([rng.normal(0, 3, 1000), rng.normal(0, 1e-3, 1000), [0.0, 1e-300, 50, -50, np.inf, -np.inf]])
    found, powers = given.copy(), np.empty(len(given))
    kernels.squash(found, len(found) - 1, powers, powers.view(np.int64))
    np.testing.assert_allclose(found[:-1], np.tanh(given[:-1]), rtol=2e-15)
    assert found[-1] == -np.inf  # not asked for


class _Small(gymnasium.Env[Any, Any]):
    """One step, whose reward is the action, or 1 for the last of two."""

    def __init__(self, observations: Any, actions: Any) -> None:
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), float(np.ravel(action)[0]), True, False, {}


@pytest.mark.parametrize("observations", [spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2, 2))])
@pytest.mark.parametrize("actions", [spaces.Discrete(2, start=4), spaces.Box(-2.0, 2.0, (2,))])
def test_any_environment_of_boxes_and_numbers_can_be_played(observations: Any, actions: Any) -> None:
    player = GymPlayer(_Small(observations, actions), 3)
    problem = player.problem(10)
    family = Network(problem.inputs, problem.actions, head=problem.head)
    policies = np.zeros((2, family.size))
    policies[0, -problem.actions :] = 10.0
    returns = player.returns(Mixture(policies, [0.5, 0.5], family), np.array([0, 1, 0]), np.random.default_rng(0))
    assert returns.round(3).tolist() == ([2.0, 0.0, 2.0] if problem.head == "box" else [5.0, 4.0, 5.0])


def test_what_cannot_be_played_is_refused_in_one_sentence() -> None:
    box, two = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    for seen, acts in ((spaces.Text(3), two), (box, spaces.MultiBinary(2)), (box, spaces.Box(-np.inf, 1, (1,)))):
        with pytest.raises(InvalidInputError, match=r"Supported are Box or Discrete observations"):
            GymPlayer(_Small(seen, acts), 3)
    player = GymPlayer(_Small(box, two), 3, low=2.0, high=3.0)
    family = Network(2, 2)
    with pytest.raises(InvalidInputError, match=r"returned 0 to 0, outside \[2, 3\]; give return_low"):
        player.returns(Mixture(np.zeros((1, 3)), [1.0], family), np.zeros(2, int), np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match="expected networks of 2 inputs, 2 actions"):
        player.returns(Mixture(np.zeros((1, 4)), [1.0], Network(3, 2)), np.zeros(2, int), np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match="expected 2 and 2"):
        player.interface.check_fits(Network(3, 2))


def test_an_environment_whose_extra_is_missing_is_refused_or_played() -> None:
    if find_spec("Box2D") is None:
        with pytest.raises(InvalidInputError, match=r"cannot make 'LunarLander-v3'.*(?i:box2d).* or install what"):
            envs.make("LunarLander-v3")
        return
    lander = envs.make("LunarLander-v3")
    assert isinstance(lander, GymPlayer)
    assert (lander.problem(1).inputs, lander.problem(1).actions, lander.horizon) == (8, 4, 1000)


@pytest.mark.parametrize("seen", [np.zeros(3), np.array([0.0, np.nan]), 0.5])
def test_an_observation_outside_its_space_is_refused_in_one_sentence(seen: Any) -> None:
    boxed = Interface.of(_Small(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))
    with pytest.raises(InvalidInputError, match=r"The environment showed .*; expected 2 finite numbers, as its space"):
        boxed.observed(seen)
    numbered = Interface.of(_Small(spaces.Discrete(3, start=1), spaces.Discrete(2)))
    assert numbered.observed(3).tolist() == [0, 0, 1]
    for number in (0, 4):
        with pytest.raises(InvalidInputError, match=f"The environment showed {number}; expected 1 to 3"):
            numbered.observed(number)


def test_a_given_range_of_returns_is_the_players() -> None:
    """And a task of known dynamics is then played in Gymnasium."""
    player = envs.make("gymnasium", id="CartPole", return_low=1, return_high=500)
    assert isinstance(player, GymPlayer)
    assert (player.problem(10).low, player.problem(10).high) == (1.0, 500.0)
    with pytest.raises(InvalidInputError, match="from 1 to None; expected both ends"):
        envs.make("gymnasium", id="CartPole", return_low=1)


def test_sensing_pays_what_its_channels_allow() -> None:
    """A fixed channel earns its share, and the exact filter more; within five deviations of 20,000 users."""
    game = envs.make("spectrum-sensing", n_channels=8)
    assert isinstance(game, SpectrumSensing)
    rng, family = np.random.default_rng(0), Network(24, 8, head="score")
    policies = np.zeros((2, family.size))
    policies[0, 2] = -1.0  # the channel of the lowest rate
    policies[1, 0] = 1.0  # where most is to be expected
    fixed, quiet = (
        game.returns(Mixture(policies, [0.5, 0.5], family), np.full(20_000, g), rng).mean() for g in range(2)
    )
    assert fixed == pytest.approx(game.horizon * 0.8 * 0.6, abs=0.2)
    assert game.best_fixed() == pytest.approx(game.horizon * 0.48, abs=0.2)
    assert game.best_fixed() < quiet < game.best_known(20_000, rng) < game.horizon


def test_sensing_weighs_a_slot_by_what_was_heard_lately() -> None:
    """By Bayes' rule: of channels that were free with that chance, as many as are told sounded so and were free."""
    game = envs.make("spectrum-sensing", n_channels=2, noise=0.7)
    assert isinstance(game, SpectrumSensing)
    rng = np.random.default_rng(0)
    lately = np.broadcast_to([0.3, 0.8], (200_000, 2))
    free = rng.random(lately.shape) < lately
    seen, _ = game.observed(free, lately, rng)
    sure = seen[..., 0] / game.rates
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        told = (low <= sure) & (sure < low + 0.2)
        assert free[told].mean() == pytest.approx(sure[told].mean(), abs=4 * 0.5 / np.sqrt(told.sum()))
    assert np.array_equal(seen[..., 1:], np.stack([lately * game.rates, np.broadcast_to(game.rates, lately.shape)], -1))


def test_sensing_without_noise_is_certain() -> None:
    """However often a channel sounded the same, nothing is divided by zero."""
    game = envs.make("spectrum-sensing", n_channels=2, noise=1e-3)
    assert isinstance(game, SpectrumSensing)
    rng, lately = np.random.default_rng(0), np.full((1, 2), 0.5)
    for free in [np.array([[True, False]])] * 200 + [np.array([[False, True]])]:
        seen, lately = game.observed(free, lately, rng)
        assert np.isfinite(seen).all()
