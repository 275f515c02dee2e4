"""Figures. Matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shufflerl.errors import InvalidInputError, MissingExtraError
from shufflerl.experiment import Run, Setting

try:
    import matplotlib as mpl

    mpl.use("Agg")  # figures go to files; no screen is needed
    from matplotlib.figure import Figure
except ImportError as missing:
    raise MissingExtraError("Figures need matplotlib; install it with: pip install 'shufflerl[plots]'.") from missing

#: Okabe-Ito: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def regret_curve(setting: Setting, runs: list[Run], path: Path) -> None:
    """Save cumulative regret against episodes: the mean over seeds, one standard deviation around it, every seed."""
    if any(run.optimal_value is None for run in runs):
        raise InvalidInputError("This environment's optimal value is unknown, so there is no regret to plot.")
    grid = np.linspace(0, setting.episodes, 400)
    curves = np.stack([np.interp(grid, *run.history.curve) for run in runs])
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(grid, curves.T, color=COLOURS[0], alpha=0.25, linewidth=0.7)
    mean = curves.mean(axis=0)
    axes.plot(grid, mean, color=COLOURS[0], linewidth=2.2, label=f"mean of {len(runs)} seeds")
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
    axes.set(xlabel="episodes", ylabel="cumulative expected regret", xlim=(0, setting.episodes), ylim=(0, None))
    axes.set_title(f"{setting.learner} on {setting.env}, privacy: {setting.privatizer}", loc="left")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left" if mean[200] < 0.6 * mean[-1] else "lower right")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the figure whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format=path.suffix.lstrip(".") or "png", dpi=160)
    except ValueError as reason:
        raise InvalidInputError(
            f"Cannot write {path.name}: {reason}. Use a name ending in .png, .svg or .pdf."
        ) from None
    partial.replace(path)
