"""Environments by name: `make("riverswim", horizon=8)` builds one, `ENVIRONMENTS` lists them.

Gymnasium's own registry learns of ours (`shufflerl/RiverSwim-v0`, ...) when `shufflerl.envs.gym` is imported, and
this package does so by itself when Gymnasium is already loaded. Gymnasium 1.0 dropped discovery by entry points, so
code that imports nothing of ours writes `gymnasium.make("shufflerl.envs:shufflerl/RiverSwim-v0")`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

from shufflerl import checks
from shufflerl.envs.from_gymnasium import GymSimulator
from shufflerl.mdp import MDP
from shufflerl.registry import Entry, Registry

__all__ = ["ENVIRONMENTS", "GymSimulator", "make"]

ENVIRONMENTS = Registry(
    "environment",
    {
        "riverswim": Entry("shufflerl.envs.riverswim:riverswim", "the paper's RiverSwim: swim upstream for the reward"),
        "bandit": Entry("shufflerl.envs.bandit:bandit", "the paper's bandit: every user's arms differ a little"),
        "spectrum": Entry("shufflerl.envs.spectrum:spectrum", "dynamic spectrum access: transmit, wait or retune"),
        "deepsea": Entry("shufflerl.envs.deepsea:deepsea", "DeepSea: one treasure behind a chain of right moves"),
        "random": Entry("shufflerl.envs.random_mdp:random_mdp", "an MDP drawn at random"),
        "gymnasium": Entry(
            "shufflerl.envs.from_gymnasium:from_gymnasium", "any Gymnasium environment with discrete spaces, by its id"
        ),
    },
    given=("rng",),
)


def make(name: str, /, seed: int | np.random.SeedSequence | None = None, **parameters: Any) -> MDP | GymSimulator:
    """The environment `name` with these parameters; whatever in it is random is drawn from `seed`.

    >>> make("riverswim", n_states=6).n_states
    6
    """
    if seed is not None and not isinstance(seed, np.random.SeedSequence):
        seed = checks.whole("seed", seed, least=0)
    environment: MDP | GymSimulator = ENVIRONMENTS.make(name, np.random.default_rng(seed), **parameters)
    return environment


if sys.modules.get("gymnasium") is not None:
    import_module("shufflerl.envs.gym")
