"""Tiles of a Box: every observation lies in one, tabular learners run on them, and what is no tiling is refused."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from shufflerl import learn
from shufflerl.envs.from_gymnasium import GymSimulator
from shufflerl.envs.tiles import Tiles
from shufflerl.errors import InvalidInputError
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.population import TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy


def test_tiles_are_equal_parts_between_the_bounds() -> None:
    env = Tiles(gymnasium.make("MountainCar-v0"), tiles=[3, 2])
    assert env.observation_space == gymnasium.spaces.Discrete(6)
    seen = [env.observation(np.array(x)) for x in ([-1.2, -0.07], [-1.2, 0.01], [-0.3, -0.01], [0.6, 0.07], [9.0, 9.0])]
    assert seen == [0, 1, 2, 5, 5]


def test_an_observation_that_lies_in_no_tile_is_refused() -> None:
    env = Tiles(gymnasium.make("MountainCar-v0"), tiles=[3, 2])
    for wrong in ([0.0], [0.0, np.nan]):
        with pytest.raises(InvalidInputError, match=r"The environment showed .*; expected 2 numbers"):
            env.observation(np.array(wrong))


def test_a_tabular_learner_runs_on_tiles() -> None:
    env = Tiles(gymnasium.make("CartPole-v1"), edges=[[], [], [-0.05, 0.0, 0.05], [0.0]])
    simulator = GymSimulator(env, 8, 0.0, 1.0)
    assert simulator.n_states == 9
    history = learn(UCBVI(simulator.problem(30), 0, batch=10), TrajectoryPopulation(simulator, 0), NoPrivacy())
    assert history.users.sum() == 30


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "Give either tiles"),
        ({"tiles": [2, 2]}, "expected 4"),
        ({"tiles": [2, 2, 2, 2]}, "Coordinate 1 lies in .* give edges"),
        ({"tiles": [0, 1, 1, 1]}, "tiles of coordinate 0 is 0"),
        ({"edges": [[1.0, 0.0], [], [], []]}, "do not increase"),
    ],
)
def test_what_is_no_tiling_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        Tiles(gymnasium.make("CartPole-v1"), **given)


def test_only_boxes_are_cut() -> None:
    with pytest.raises(InvalidInputError, match="expected a Box to be cut"):
        Tiles(gymnasium.make("FrozenLake-v1"), tiles=[1])
