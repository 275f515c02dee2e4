"""Regret curves of one setting: what `shufflerl run --plot` draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shufflerl.errors import InvalidInputError
from shufflerl.experiments.setting import Run, Setting, described
from shufflerl.mdp import MDP
from shufflerl.plots import COLOURS, check_path, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(setting: Setting, seed: int, path: Path) -> None:
    """Refuse, before anything is run, a figure that could not be drawn or written in the end."""
    check_path(path)
    if not isinstance(setting.environment(seed), MDP):
        raise InvalidInputError(
            f"The optimal value of {setting.env} is unknown without a transition table, so there is no regret to plot."
        )


def draw(setting: Setting, runs: list[Run]) -> Figure:
    """Cumulative regret against episodes: the mean over seeds, one standard deviation around it, every seed."""
    if any(run.optimal_value is None for run in runs):
        raise InvalidInputError("This environment's optimal value is unknown, so there is no regret to plot.")
    grid, units = np.linspace(0, setting.episodes, 400), runs[0].units
    curves = np.stack([np.interp(grid, *run.history.curve) for run in runs]) * units.difference(1.0)
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    axes.plot(grid, curves.T, color=COLOURS[0], alpha=0.25, linewidth=0.7)
    mean = curves.mean(axis=0)
    label = f"mean of {len(runs)} seeds" if len(runs) > 1 else f"seed {runs[0].seed}"
    axes.plot(grid, mean, color=COLOURS[0], linewidth=2.2, label=label)
    if len(runs) > 1:
        spread = curves.std(axis=0, ddof=1)
        axes.fill_between(
            grid,
            mean - spread,
            mean + spread,
            color=COLOURS[0],
            alpha=0.15,
            linewidth=0,
            label="± 1 standard deviation",
        )
    axes.set(
        xlabel="episodes",
        ylabel=f"cumulative expected regret{'' if units.ours else ' in its own units'}",
        xlim=(0, setting.episodes),
        ylim=(0, None),
    )
    axes.set_title(_title(setting), loc="left")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left" if mean[200] < 0.6 * mean[-1] else "lower right")
    return figure


def regret_curve(setting: Setting, runs: list[Run], path: Path) -> None:
    """Draw the runs and save the figure, whole or not at all."""
    save_figure(draw(setting, runs), path)


def _title(setting: Setting) -> str:
    learner = described(setting.learner, setting.learner_parameters)
    budget = {name: getattr(setting, name) for name in ("epsilon", "delta") if getattr(setting, name) is not None}
    privatizer = described(setting.privatizer, budget | setting.privatizer_parameters)
    return f"{learner} on {described(setting.env, setting.env_parameters)}\nprivacy: {privatizer}"
