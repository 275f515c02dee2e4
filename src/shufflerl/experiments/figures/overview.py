"""The paper's own figures as one picture: what a report begins with, and what there is first of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shufflerl.experiments.figures.base import Evidence, Panel
from shufflerl.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

NAME = "overview"
COLUMNS = 3


def draw(panels: Sequence[Panel], evidence: Evidence) -> Drawing:
    """Every panel with its letter, and one legend in the place after the last."""
    drawing = new_figure(13.0, 3.9 * math.ceil((len(panels) + 1) / COLUMNS))
    drawing.set_layout_engine("constrained", h_pad=0.15)  # a row's titles apart from the axis above them
    places = drawing.subplots(math.ceil((len(panels) + 1) / COLUMNS), COLUMNS, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for letter, axes, panel in zip("abcdefgh", places, panels, strict=False):
        panel.draw(axes, evidence)
        axes.set_title(f"({letter}) {panel.title}")
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    places[len(panels)].legend(handles.values(), handles.keys(), loc="center left", borderaxespad=0)
    return drawing
