"""SDP-PE with the constants of the proof and with its practical defaults, with and without privacy, for K up to 1e16.

Counts of 1e16 users cost what counts of 100 do. The practical constants are the learner's defaults at every K, not
tuned: this figure is about what the constants of the proof cost.
"""

from __future__ import annotations

from shufflerl.experiment import Setting
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Size
from shufflerl.experiments.figures.lines import DELTA

ENV = "riverswim"
EPSILON = 1.0
CONSTANTS = ("paper", "practical")
SEEDS = {"full": 5, "quick": 2}
EPISODES = {
    "full": tuple(round(10 ** (half / 2)) for half in range(6, 33)),
    "quick": (10**3, 10**6, 10**12, 10**15, 10**16),
}
#: The proof's policies one by one, or a product set that holds at least these, eliminates a little later and spares a
#: quick reproduction the time to compile the other.
POLICIES = {"full": {}, "quick": {"policies": "product"}}


def setting(size: Size, constants: str, episodes: int, *, private: bool) -> Setting:
    """One line at one K."""
    return Setting(
        ENV,
        "sdp-pe",
        "shuffle" if private else "none",
        episodes,
        EPSILON if private else None,
        DELTA if private else None,
        learner_parameters={"constants": constants} | POLICIES[size.name],
    )


def cells(size: Size, _: Chosen) -> list[Cell]:
    """Both constants, with and without privacy, at every K."""
    return [
        Cell(setting(size, constants, episodes, private=private), seed)
        for constants in CONSTANTS
        for private in (False, True)
        for episodes in EPISODES[size.name]
        for seed in range(SEEDS[size.name])
    ]
