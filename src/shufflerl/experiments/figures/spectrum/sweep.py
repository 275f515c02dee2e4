"""Nodes on three channels, eight slots a session; as many nodes as there are, with and without privacy."""

from __future__ import annotations

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, family, on
from shufflerl.experiments.figures.lines import OPTIMISTIC, OPTIMISTIC_FREE, PE, SDP_PE

ENV = "spectrum"
EPSILON = 1.0
LINES = (OPTIMISTIC, OPTIMISTIC_FREE, SDP_PE, PE)
EPISODES = {
    "full": (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000),
    "quick": (10_000, 100_000),
}
#: Constants are chosen at this K and kept at every other.
TUNED_AT = 100_000


def families(_: Size) -> list[Family]:
    """Each line."""
    return [family(line, ENV, EPSILON, TUNED_AT) for line in LINES]


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants at every K."""
    return on(size, [own.setting(chosen[own], k) for own in families(size) for k in EPISODES[size.name]])
