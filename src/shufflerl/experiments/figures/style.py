"""One look for all figures: colours that colour-blind readers tell apart, legends beside the data, no clutter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments.compare import band, interval
from shufflerl.plots import new_figure, styled_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from shufflerl.experiments.figures.lines import Line

#: Of text, axes and reference lines. The report gives these the colour of its text, in light and in dark.
INK = "#333334"

WIDTH = 7.0

_STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.9,
    "lines.markersize": 5.5,
    "svg.fonttype": "path",  # a page that is read anywhere cannot count on fonts
    "svg.hashsalt": "shufflerl",  # the same figure is the same file
}


def styled() -> AbstractContextManager[None]:
    """Draw in this style."""
    return styled_by(_STYLE)


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


def thousands(axis: Any) -> None:
    """Whole numbers with their commas."""
    axis.set_major_formatter("{x:,.10g}")


def legend_below(drawing: Drawing, axes: Axes, columns: int) -> None:
    """One legend under all panels, where it covers no data; in fewer columns if the figure is too narrow."""
    handles, labels = axes.get_legend_handles_labels()
    for count in range(columns, 0, -1):
        legend = drawing.legend(handles, labels, loc="outside lower center", ncols=count)
        if count == 1 or legend.get_window_extent().width <= drawing.bbox.width:
            return
        legend.remove()
