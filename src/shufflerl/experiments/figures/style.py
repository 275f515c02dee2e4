"""One look for all figures: colours that colour-blind readers tell apart, legends beside the data, no clutter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments.compare import band, interval
from shufflerl.plots import INK, legend_below, new_figure, styled, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from shufflerl.experiments.figures.lines import Line

__all__ = ["INK", "curve", "estimates", "legend_below", "look", "means", "panels", "styled", "thousands"]

WIDTH = 7.0


def panels(count: int = 1, *, height: float = 4.2, width: float = WIDTH) -> tuple[Drawing, list[Axes]]:
    """A figure with so many panels side by side."""
    drawing = new_figure(width, height)
    return drawing, list(drawing.subplots(1, count, squeeze=False)[0])


def look(line: Line) -> dict[str, Any]:
    """How a line is drawn, in every figure."""
    return {"color": line.colour, "linestyle": line.dashes, "label": line.name}


def curve(axes: Axes, line: Line, x: FloatArray, curves: FloatArray) -> None:
    """Mean of curves[seed, point] with one standard deviation over seeds around it."""
    axes.plot(x, curves.mean(axis=0), **look(line))
    if len(curves) > 1:
        axes.fill_between(x, *band(curves, "sd"), color=line.colour, alpha=0.18, linewidth=0)


def means(axes: Axes, line: Line, x: Sequence[float], values: Sequence[FloatArray], **more: Any) -> None:
    """A marker at the mean of each group of values, with its 95% interval."""
    found = [interval(own) for own in values]
    low = [own.mean if own.low is None else own.low for own in found]
    high = [own.mean if own.high is None else own.high for own in found]
    estimates(axes, line, x, [own.mean for own in found], low, high, **more)


def estimates(
    axes: Axes,
    line: Line,
    x: Sequence[float],
    mean: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    **more: Any,
) -> None:
    """A marker at each mean, with its interval."""
    # Rounding may put a bound of a constant on the wrong side of its mean by a hair.
    errors = np.maximum([np.subtract(mean, low), np.subtract(high, mean)], 0)
    drawn: dict[str, Any] = {"marker": line.marker, "capsize": 2.5} | look(line) | more
    axes.errorbar(x, mean, yerr=errors, **drawn)
