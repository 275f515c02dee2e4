"""Figures in the project's style, for whoever draws their own: `styled`, `new_figure`, `save_figure`.

>>> from shufflerl import plots
>>> with plots.styled():
...     figure = plots.new_figure(7.0, 4.2)
...     lines = figure.subplots().plot([1, 2, 3], [4, 2, 1], color=plots.COLOURS[0])
"""

from __future__ import annotations

import contextlib
import io
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shufflerl.errors import InvalidInputError, MissingExtraError

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure  # not pyplot's: figures go to files, and no screen is needed
    from matplotlib.ticker import LogLocator, NullFormatter
except ImportError as missing:
    raise MissingExtraError("Figures need matplotlib; install it with: pip install 'shufflerl[plots]'.") from missing

#: Okabe-Ito: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


SUFFIXES = (".png", ".svg", ".pdf")

#: Of text, axes and reference lines. Pages give these the colour of their text, in light and in dark.
INK = "#333334"

STYLE: dict[Any, Any] = {
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


class Picture(Figure):
    """A figure that notebooks show by themselves."""

    def _repr_png_(self) -> bytes:
        sink = io.BytesIO()
        self.savefig(sink, format="png", dpi=110)
        return sink.getvalue()


def new_figure(width: float, height: float) -> Picture:
    """An empty figure of that many inches."""
    return Picture(figsize=(width, height), layout="constrained")


def styled() -> AbstractContextManager[None]:
    """Draw in this style."""
    return mpl.rc_context(STYLE)


def thousands(axis: Any) -> None:
    """Whole numbers with their commas."""
    axis.set_major_formatter("{x:,.10g}")


def log_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis: powers of ten, and their doubles and fivefolds where there are few powers."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axis.set_minor_formatter(NullFormatter())


def legend_below(drawing: Figure, axes: Axes, columns: int) -> None:
    """One legend under all panels, where it covers no data; in fewer columns if the figure is too narrow."""
    handles, labels = axes.get_legend_handles_labels()
    for count in range(columns, 0, -1):
        legend = drawing.legend(handles, labels, loc="outside lower center", ncols=count)
        if count == 1 or legend.get_window_extent().width <= drawing.bbox.width:
            return
        legend.remove()


def check_path(path: Path) -> None:
    """Refuse a place that no figure could be written to."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(f"Cannot write {path.name!r}. Use a name ending in {', '.join(SUFFIXES)}.")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidInputError(f"Cannot write {path}: no file can be made there; choose another folder or name.")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lstrip(".")
        figure.savefig(partial, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
        partial.replace(path)
    except OSError as reason:
        raise InvalidInputError(f"Cannot write {path}: {reason.strerror}. Choose another place.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
