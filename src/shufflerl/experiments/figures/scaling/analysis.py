"""Time and memory against X, A and H."""

from __future__ import annotations

from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, Table
from shufflerl.experiments.figures.scaling.sweep import EPISODES, LINES, SHAPE, VALUES, grown
from shufflerl.plots import new_figure

_LONG = {"X": "states X", "A": "actions A", "H": "steps H"}


def analyse(evidence: Evidence) -> Analysis:
    """Draw the measurements; they judge no claim."""
    found = {timing.point: timing for timing in evidence.timings}
    told = all(timing.bytes is not None for timing in evidence.timings)
    drawing = new_figure(9.2, 5.6 if told else 3.4)
    grid = drawing.subplots(2 if told else 1, len(SHAPE), sharey="row", squeeze=False)
    rows = []
    for column, axis in enumerate(SHAPE):
        values = VALUES[evidence.size.name][axis]
        for line in LINES:
            own = [found[grown(line.name, axis, value)] for value in values]
            look = {**style.look(line), "marker": line.marker}
            grid[0, column].plot(values, [timing.seconds for timing in own], **look)
            sizes = [(timing.bytes or 0) / 2**20 for timing in own]
            if told:
                grid[1, column].plot(values, sizes, **look)
            rows += [
                (line.name, f"{axis} = {value}", f"{timing.seconds:.3f} s", f"{size:.1f} MiB" if told else "unknown")
                for value, timing, size in zip(values, own, sizes, strict=True)
            ]
        fixed = ", ".join(f"{name} = {value}" for name, value in SHAPE.items() if name != axis)
        grid[0, column].set_title(fixed)
        grid[-1, column].set_xlabel(_LONG[axis])
        for axes in grid[:, column]:
            axes.set(xscale="log", yscale="log", xticks=values)
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
    grid[0, 0].set_ylabel("processor seconds a run")
    if told:
        grid[1, 0].set_ylabel("memory a run takes (MiB)")
    style.legend_below(drawing, grid[0, 0], len(LINES))
    largest = VALUES[evidence.size.name]["X"][-1]
    taken = ", ".join(f"{line.name} {found[grown(line.name, 'X', largest)].seconds:.2g} s" for line in LINES)
    see = (
        f"Runs of {EPISODES:,} episodes on random environments, here, with {largest} states: {taken}. "
        "Product sets keep SDP-PE from the exponential growth of an enumerated set of policies."
    )
    return Analysis(drawing, see, table=Table(("line", "shape", "time", "memory"), tuple(rows)))
