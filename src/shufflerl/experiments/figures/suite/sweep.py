"""A part of the suite: one K, few seeds. Constants are the suite's own, chosen on environments apart."""

from __future__ import annotations

from shufflerl.experiments import suite
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Size

EPISODES = 20_000
BUDGETS = {"full": (5.0, 1.0, 0.5, 0.1), "quick": (1.0, 0.1)}
SEEDS = {"full": 5, "quick": 2}
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "full": tuple(suite.ENVIRONMENTS),
    "quick": ("RiverSwim 4/6", "DeepSea 5", "dense", "sparse homogeneous", "bandit"),
}


def cells(size: Size, _: Chosen) -> list[Cell]:
    """Every contender in every environment at every budget."""
    return suite.cells(
        environments={name: suite.ENVIRONMENTS[name] for name in ENVIRONMENTS[size.name]},
        budgets=BUDGETS[size.name],
        episodes=(EPISODES,),
        seeds=SEEDS[size.name],
    )
