"""Environments whose users are known by their returns: `returns` plays many users at once, each its own policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.envs.playing import Interface, play_episode, scaling
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import UNIT, Mixture, Units
from shufflerl.policies import Network
from shufflerl.returns import ReturnProblem

if TYPE_CHECKING:
    import gymnasium


#: The tasks of classic control by number, as compiled code knows them.
CARTPOLE, MOUNTAIN_CAR, ACROBOT = 0, 1, 2


class Player:
    """What all of them have: a public problem, and policies played on it. Subclasses play (`_play`)."""

    units: Units = UNIT  # returns are never mapped

    def __init__(
        self, inputs: int, actions: int, horizon: int, *, low: float | None, high: float | None, head: str = "choice"
    ) -> None:
        self._public = ReturnProblem(inputs, actions, horizon, episodes=1, low=low, high=high, head=head)
        self.low, self.high, self.horizon = self._public.low, self._public.high, horizon

    def problem(self, episodes: int) -> ReturnProblem:
        """What a learner may know beforehand when it is given `episodes` episodes."""
        return replace(self._public, episodes=episodes)

    def returns(self, mixture: Mixture, given: IntArray, rng: np.random.Generator) -> FloatArray:
        """returns[i] of one episode each by user i under policy given[i] of the mixture."""
        family = mixture.family
        expected = (self._public.inputs, self._public.actions, self._public.head)
        if not isinstance(family, Network) or (family.inputs, family.actions, family.head) != expected:
            raise InvalidInputError(
                f"The policies are {family}; expected networks of {expected[0]} inputs, {expected[1]} actions and the "
                f"head {expected[2]!r}."
            )
        found = self._play(family, mixture.policies, given, rng)
        low, high = self.low, self.high
        if low is not None and high is not None and len(found) and not low <= found.min() <= found.max() <= high:
            raise InvalidInputError(
                f"An episode returned {found.min():g} to {found.max():g}, outside [{low:g}, {high:g}]; give "
                "return_low and return_high that hold for every episode."
            )
        return found

    def _play(self, family: Network, policies: FloatArray, given: IntArray, rng: np.random.Generator) -> FloatArray:
        raise NotImplementedError


class GymPlayer(Player):
    """Any Gymnasium environment with Box or Discrete observations and Discrete or bounded Box actions."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], horizon: int, low: float | None = None, high: float | None = None
    ) -> None:
        self.env, self.interface = env, Interface.of(env)
        super().__init__(
            self.interface.inputs, self.interface.actions, horizon, low=low, high=high, head=self.interface.head
        )

    def __repr__(self) -> str:
        return f"GymPlayer({self.env.unwrapped}, horizon={self.horizon})"

    def _play(self, family: Network, policies: FloatArray, given: IntArray, rng: np.random.Generator) -> FloatArray:
        seeds = rng.integers(2**31, size=len(given))
        return np.array(
            [
                play_episode(self.env, self.interface, family, policies[g], self.horizon, int(seed))
                for g, seed in zip(given, seeds, strict=True)
            ]
        )


class Task(NamedTuple):
    """A task of classic control: its number, actions, steps, range of returns, and bounds of observations."""

    number: int
    actions: int
    horizon: int
    returns: tuple[float, float]
    low: tuple[float, ...]
    high: tuple[float, ...]


_FREE = float("inf")
_ANGLE = float(np.float32(24 * 2 * np.pi / 360))
_TURNS = (1.0, 1.0, 1.0, 1.0, float(np.float32(4 * np.pi)), float(np.float32(9 * np.pi)))

#: By their Gymnasium ids.
TASKS = {
    "CartPole-v1": Task(
        CARTPOLE, 2, 500, returns=(0.0, 500.0), low=(-4.8, -_FREE, -_ANGLE, -_FREE), high=(4.8, _FREE, _ANGLE, _FREE)
    ),
    "MountainCar-v0": Task(MOUNTAIN_CAR, 3, 200, returns=(-200.0, 0.0), low=(-1.2, -0.07), high=(0.6, 0.07)),
    "Acrobot-v1": Task(ACROBOT, 3, 500, returns=(-500.0, 0.0), low=tuple(-x for x in _TURNS), high=_TURNS),
}


class ControlTask(Player):
    """CartPole, MountainCar or Acrobot with Gymnasium's dynamics and time limit, compiled.

    >>> ControlTask("CartPole-v1").problem(1000).inputs
    4
    """

    def __init__(self, id: str) -> None:
        self.id = checks.choice("id", id, tuple(TASKS))
        self.task = TASKS[id]
        self.middle, self.scale = scaling(np.array(self.task.low), np.array(self.task.high))
        low, high = self.task.returns
        super().__init__(len(self.task.low), self.task.actions, self.task.horizon, low=low, high=high)

    def __repr__(self) -> str:
        return f"ControlTask({self.id!r})"

    def starts(self, users: int, rng: np.random.Generator) -> FloatArray:
        """First states, as Gymnasium draws them."""
        if self.task.number == CARTPOLE:
            return rng.uniform(-0.05, 0.05, (users, 4))
        if self.task.number == MOUNTAIN_CAR:
            return np.stack([rng.uniform(-0.6, -0.4, users), np.zeros(users)], axis=1)
        return rng.uniform(-0.1, 0.1, (users, 4)).astype(np.float32).astype(np.float64)

    def _play(self, family: Network, policies: FloatArray, given: IntArray, rng: np.random.Generator) -> FloatArray:
        from shufflerl.envs.control_kernels import play_tasks

        returns = np.empty(len(given))
        play_tasks(
            self.task.number,
            policies.astype(np.float64),
            np.array(family.layers),
            self.middle,
            self.scale,
            given,
            self.starts(len(given), rng),
            self.horizon,
            returns,
        )
        return returns
