"""The three private lines of the paper's table at its budget on RiverSwim, and the bounds it gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family, on, theory_settings
from shufflerl.experiments.figures.lines import SDP_PE, UCBVI_JDP, UCBVI_LDP, Line

ENV = "riverswim"
EPSILON = 1.0


@dataclass(frozen=True)
class Bound:
    """A line's bound: the leading term sqrt(XAH^3 K), which all share, and the cost of privacy."""

    line: Line
    model: str
    formula: str
    privacy: Callable[[int, int, int, int, float], float]  # of X, A, H, K, epsilon


def leading(states: int, actions: int, horizon: int, episodes: int) -> float:
    """sqrt(XAH^3 K), the lower bound without privacy up to constants."""
    return math.sqrt(states * actions * horizon**3 * episodes)


BOUNDS = (
    Bound(UCBVI_JDP, "ε-JDP", "√(XAH³K) + X²AH³/ε", lambda x, a, h, k, e: x**2 * a * h**3 / e),
    Bound(UCBVI_LDP, "ε-LDP", "√(XAH³K) + X²AH³√K/ε", lambda x, a, h, k, e: x**2 * a * h**3 * math.sqrt(k) / e),
    Bound(SDP_PE, "(ε, δ)-SDP", "√(XAH³K) + X³AH⁶/ε", lambda x, a, h, k, e: x**3 * a * h**6 / e),
)


def families(size: Size) -> list[Family]:
    """Each line of the table."""
    return [family(bound.line, ENV, EPSILON, size.episodes) for bound in BOUNDS]


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    own = families(size)
    return on(size, chosen_settings(own, chosen) + theory_settings(own))
