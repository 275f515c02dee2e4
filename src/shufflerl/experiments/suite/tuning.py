"""How UCBVI's constants were chosen: on environments and seeds that are never reported, one choice per budget."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shufflerl.experiments.cells import Result, canonical
from shufflerl.experiments.suite.analysis import geometric_mean

#: (scale, batch), and the geometric mean over environments of its regret relative to the best choice in each.
Ranking = list[tuple[dict[str, float], float]]


def ranking(results: Iterable[Result]) -> dict[float | None, Ranking]:
    """For every budget the choices of parameters, best first."""
    regrets: dict[float | None, dict[str, dict[str, list[float]]]] = {}
    chosen: dict[str, dict[str, float]] = {}
    for result in results:
        setting = result.cell.setting
        assert result.regret is not None
        choice = canonical(setting.learner_parameters)
        chosen[choice] = setting.learner_parameters
        by_place = regrets.setdefault(setting.epsilon, {}).setdefault(choice, {})
        by_place.setdefault(canonical([setting.env, setting.env_parameters]), []).append(result.regret)
    return {epsilon: _ranked(by_choice, chosen) for epsilon, by_choice in regrets.items()}


def _ranked(regrets: dict[str, dict[str, list[float]]], chosen: dict[str, dict[str, float]]) -> Ranking:
    means = {
        choice: {place: float(np.mean(runs)) for place, runs in by_place.items()}
        for choice, by_place in regrets.items()
    }
    places = next(iter(means.values())).keys()
    best = {place: min(by_place[place] for by_place in means.values()) for place in places}
    scores = {
        choice: geometric_mean(by_place[place] / best[place] for place in places) for choice, by_place in means.items()
    }
    return [(chosen[choice], score) for choice, score in sorted(scores.items(), key=lambda item: item[1])]
