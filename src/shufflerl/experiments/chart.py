"""Figures of a sweep: regret curves, or any figure of the runs against any axis, in panels, with bands."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.experiments.cells import Result, canonical, curve_episodes, flat, labels
from shufflerl.experiments.compare import Band, Group, band
from shufflerl.plots import COLOURS, legend_below, log_ticks, new_figure, styled, thousands
from shufflerl.registry import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What is known of a run beside its setting, by the names that the literature has for some.
MEASURED = {
    "regret": "own_regret",
    "reward": "own_reward",
    "switches": "switches",
    "batches": "batches",
    "distinct": "distinct",
    "policies": "policies",
    "seconds": "seconds",
    "X": "states",
    "A": "actions",
    "H": "horizon",
}
#: Along these axes settings differ by parameters of another name: which of them a line runs through.
_ALONG = dict.fromkeys(("batches", "switches", "distinct", "policies", "seconds"), "learner.") | dict.fromkeys(
    "XAH", "env."
)
_BANDS = {"sd": "± 1 standard deviation over seeds", "ci": "95% bootstrap interval of the mean"}
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 3


def value(result: Result, name: str) -> Any:
    """What a run's setting says, or what was measured of it, by its name: `epsilon`, `learner.batches`, `X`."""
    if name in MEASURED:
        return getattr(result, MEASURED[name])
    known = flat(result.cell.setting)
    if name not in known and "." not in name:
        raise UnknownNameError(f"There is no {name!r} in these results.{nearest(name, [*known, *MEASURED])}")
    return known.get(name)


def curves(groups: Sequence[Group], kind: Band) -> Figure:
    """Regret curves, one panel per group: the mean over seeds and its band."""
    shown = [group for group in groups if all(row.curves is not None for row in group.rows)]
    if not shown:
        raise InvalidInputError("The regret of these runs is unknown, so there are no curves to plot.")
    names = list(dict.fromkeys(row.label for group in shown for row in group.rows))
    with styled():
        figure, panels = _panels(len(shown), len(names))
        for axes, group in zip(panels, shown, strict=True):
            episodes = group.rows[0].setting.episodes
            grid = np.array(curve_episodes(episodes), np.float64)
            for row in group.rows:
                assert row.curves is not None
                _line(axes, names.index(row.label), row.label, grid, row.curves.T, kind, marker="")
            axes.set(xlabel="episodes", xlim=(0, episodes), ylim=(0, None), title=group.title)
            thousands(axes.xaxis)
            thousands(axes.yaxis)
        panels[0].set_ylabel("cumulative expected regret")
        _finish(figure, panels, len(names), f"mean of {len(shown[0].rows[0].seeds)} seeds; band: {_BANDS[kind]}")
    return figure


def chart(
    results: Sequence[Result],
    x: str,
    *,
    y: str = "regret",
    facet: str | None = None,
    log: str = "",
    kind: Band = "ci",
) -> Figure:
    """Figure `y` of the runs against `x`, a panel for each value of `facet`; `log` says which axes are logarithmic.

    A line runs through settings that differ in x alone. Where a setting has no x, as there is no epsilon without
    privacy, its line is level.
    """
    if not set(log) <= {"x", "y"}:
        raise InvalidInputError(f"log is {log!r}; expected x, y or xy.")
    points: dict[str, list[Result]] = {}
    for result in results:
        points.setdefault(canonical(flat(result.cell.setting)), []).append(result)
    each = list(points.values())
    settings = [runs[0].cell.setting for runs in each]
    if each and all(value(runs[0], x) is None for runs in each):
        raise UnknownNameError(f"No setting of these results says its {x!r}; choose what some of them differ in.")
    along = [name for one in settings for name in flat(one) if name.startswith(_ALONG.get(x, "\0"))]
    without = {x, *along, *([facet] if facet else [])}
    names = labels(settings, without)
    faces = [None if facet is None else value(runs[0], facet) for runs in each]
    with styled():
        panels_of = list(dict.fromkeys(map(canonical, faces)))
        looks = list(dict.fromkeys(names))
        figure, panels = _panels(len(panels_of), len(looks))
        for axes, face in zip(panels, panels_of, strict=True):
            for look in looks:
                own = [runs for runs, its, name in zip(each, faces, names, strict=True)
                       if canonical(its) == face and name == look]  # fmt: skip
                _draw(axes, looks.index(look), look, own, x, y, kind)
            if facet is not None:
                shown = json.loads(face)
                axes.set_title(f"{facet} = {shown:g}" if isinstance(shown, float) else f"{facet} = {shown}")
            axes.set(xlabel=x, **{f"{one}scale": "log" for one in log})
            for one, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
                thousands(axis)
                if one in log:
                    log_ticks(axis)
        panels[0].set_ylabel(y)
        _finish(figure, panels, len(looks), f"means over seeds; band: {_BANDS[kind]}")
    return figure


def _draw(axes: Axes, look: int, label: str, points: list[list[Result]], x: str, y: str, kind: Band) -> None:
    level = [runs for runs in points if value(runs[0], x) is None]
    rest = [runs for runs in points if value(runs[0], x) is not None]
    for runs in level:
        colour = COLOURS[look % len(COLOURS)]
        axes.axhline(np.mean([value(run, y) for run in runs]), color=colour, linestyle="--", label=label)
    if rest:
        order = sorted(rest, key=lambda runs: float(np.mean([value(run, x) for run in runs])))
        where = np.array([np.mean([value(run, x) for run in runs]) for runs in order])
        figures = [np.array([value(run, y) for run in runs], dtype=np.float64) for runs in order]
        _line(axes, look, label, where, figures, kind, marker="o")


def _line(
    axes: Axes, look: int, label: str, x: FloatArray, values: Sequence[FloatArray] | FloatArray, kind: Band, marker: str
) -> None:
    """The mean of values[point][seed] with its band, in the look of that number, the same in every panel."""
    colour, dashes = COLOURS[look % len(COLOURS)], _STYLES[look // len(COLOURS) % len(_STYLES)]
    axes.plot(x, [own.mean() for own in values], dashes, color=colour, label=label, marker=marker, markersize=4)
    if min(len(own) for own in values) > 1:
        same = len({len(own) for own in values}) == 1
        edges = band(np.array(values).T, kind) if same else np.array([band(own[:, None], kind) for own in values]).T[0]
        axes.fill_between(x, *edges, color=colour, alpha=0.15, linewidth=0)


def _panels(count: int, lines: int) -> tuple[Figure, list[Axes]]:
    columns = min(_COLUMNS, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    figure = new_figure(3.0 + 4.2 * columns, 3.6 * rows + 0.25 * math.ceil(lines / (2 * columns)))
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _finish(figure: Figure, panels: list[Axes], lines: int, about: str) -> None:
    figure.suptitle(about, x=0.01, ha="left", fontsize=11)
    fullest = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    legend_below(figure, fullest, max(1, min(4, lines)))
