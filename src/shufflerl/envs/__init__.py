"""Environments by name: `make("riverswim", horizon=8)` builds one, `ENVIRONMENTS` lists them.

Gymnasium's own registry learns of ours (`shufflerl/RiverSwim-v0`, ...) when `shufflerl.envs.gym` is imported: write
`import shufflerl.envs.gym`, which works in any order. Importing `shufflerl` does so by itself only if Gymnasium was
imported before it. Code that imports nothing of ours can have Gymnasium do it:
`gymnasium.make("shufflerl.envs.gym:shufflerl/RiverSwim-v0")`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from shufflerl.envs.from_gymnasium import GymSimulator, from_gymnasium, newest_id
from shufflerl.envs.players import Player
from shufflerl.envs.sensing import SensingTiles
from shufflerl.errors import UnknownNameError
from shufflerl.mdp import MDP
from shufflerl.registry import Entry, Registry
from shufflerl.seeding import Seed, stream

#: What may be made.
Environment = MDP | GymSimulator | Player | SensingTiles

__all__ = ["ENVIRONMENTS", "Environment", "GymSimulator", "Player", "SensingTiles", "make"]


@dataclass(frozen=True)
class _GymEntry(Entry):
    """An environment by its Gymnasium id, which is then no parameter."""

    id: str

    def load(self) -> Callable[..., Any]:
        return functools.partial(from_gymnasium, id=self.id)


class _Environments(Registry):
    """Ours by name, and Gymnasium's by their ids, such as CartPole-v1, or Taxi: the newest that Gymnasium has."""

    def entry(self, name: str) -> Entry:
        if isinstance(name, str) and re.fullmatch(r"[\w./:-]+-v\d+", name):
            return _GymEntry("", f"Gymnasium's {name}", name)
        try:
            return super().entry(name)
        except UnknownNameError:
            if newest := newest_id(name):
                return _GymEntry("", f"Gymnasium's {newest}", newest)
            raise


ENVIRONMENTS = _Environments(
    "environment",
    {
        "riverswim": Entry("shufflerl.envs.riverswim:riverswim", "the paper's RiverSwim: swim upstream for the reward"),
        "bandit": Entry("shufflerl.envs.bandit:bandit", "the paper's bandit: every user's arms differ a little"),
        "spectrum": Entry("shufflerl.envs.spectrum:spectrum", "dynamic spectrum access: transmit, wait or retune"),
        "spectrum-sensing": Entry(
            "shufflerl.envs.sensing:sensing", "dynamic spectrum access with noisy energies of many channels"
        ),
        "spectrum-tiles": Entry(
            "shufflerl.envs.sensing:sensing_tiles", "the same with energies in tiles: one random slot is counted"
        ),
        "deepsea": Entry("shufflerl.envs.deepsea:deepsea", "DeepSea: one treasure behind a chain of right moves"),
        "random": Entry("shufflerl.envs.random_mdp:random_mdp", "an MDP drawn at random"),
        "gymnasium": Entry(
            "shufflerl.envs.from_gymnasium:from_gymnasium", "any Gymnasium environment, by its id: write that alone"
        ),
    },
    given=1,  # a generator
    makes=(MDP, GymSimulator, Player, SensingTiles),
    group="shufflerl.environments",
)


def make(name: str, /, seed: Seed | None = None, **parameters: Any) -> Environment:
    """The environment `name` with these parameters; whatever in it is random is drawn from `seed`, if there is one.

    "module:my_environment" is a name too: a function of a NumPy generator and of the parameters.

    >>> make("riverswim", n_states=6).n_states
    6
    """
    rng = np.random.default_rng() if seed is None else stream(seed, "environment")
    environment: Environment = ENVIRONMENTS.make(name, rng, **parameters)
    return environment


if sys.modules.get("gymnasium") is not None:
    import_module("shufflerl.envs.gym")
