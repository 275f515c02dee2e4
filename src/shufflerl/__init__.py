"""Online reinforcement learning under shuffle differential privacy.

The names below are imported on first use, so that `import shufflerl` is instant.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from shufflerl import envs, learners, privatizers
    from shufflerl.counts import Batch, CountQuery, Counts, Release, Trajectories
    from shufflerl.experiments.setting import Setting, run, run_seeds
    from shufflerl.history import History
    from shufflerl.learners.base import Learner
    from shufflerl.loop import learn
    from shufflerl.mdp import MDP, Mixture, Problem
    from shufflerl.population import CountPopulation, ReturnPopulation, StepPopulation, TrajectoryPopulation
    from shufflerl.returns import ReturnProblem, ReturnQuery, Returns
    from shufflerl.steps import StepProblem

_HOMES = {
    "counts": ("Batch", "CountQuery", "Counts", "Release", "Trajectories"),
    "experiments.setting": ("Setting", "run", "run_seeds"),
    "history": ("History",),
    "learners.base": ("Learner",),
    "loop": ("learn",),
    "mdp": ("MDP", "Mixture", "Problem"),
    "population": ("CountPopulation", "ReturnPopulation", "StepPopulation", "TrajectoryPopulation"),
    "returns": ("ReturnProblem", "ReturnQuery", "Returns"),
    "steps": ("StepProblem",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "MDP",
    "Batch",
    "CountPopulation",
    "CountQuery",
    "Counts",
    "History",
    "Learner",
    "Mixture",
    "Problem",
    "Release",
    "ReturnPopulation",
    "ReturnProblem",
    "ReturnQuery",
    "Returns",
    "Setting",
    "StepPopulation",
    "StepProblem",
    "Trajectories",
    "TrajectoryPopulation",
    "__version__",
    "envs",
    "learn",
    "learners",
    "privatizers",
    "run",
    "run_seeds",
]


def __getattr__(name: str) -> Any:
    if name in ("envs", "learners", "privatizers"):
        return import_module(f"shufflerl.{name}")
    if name in _HOME_OF:
        return getattr(import_module(f"shufflerl.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'shufflerl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


# Gymnasium learns of our environments when it was imported before us; otherwise `import shufflerl.envs.gym` tells it.
if "gymnasium" in sys.modules:
    import_module("shufflerl.envs")
