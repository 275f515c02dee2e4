"""The figures and tables of a reproduction, in the report's order: each a module with its sweep and its analysis."""

from __future__ import annotations

from shufflerl.experiments.figures import (
    bandit,
    batches,
    bounds,
    messages,
    noise,
    poisoning,
    regret_curves,
    regret_epsilon,
    scaling,
    spectrum,
    suite,
    switches,
    theorem,
)
from shufflerl.experiments.figures.base import Figure

_PAPERS = (regret_epsilon, regret_curves, bandit, switches)
_OTHERS = (batches, bounds, noise, theorem, messages, scaling, spectrum, poisoning, suite)

FIGURES: tuple[Figure, ...] = tuple(figure.FIGURE for figure in _PAPERS + _OTHERS)
