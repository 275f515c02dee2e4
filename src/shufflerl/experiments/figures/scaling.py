"""How time and memory grow with states, actions and steps: measurements of this machine, no results.

Random environments that grow from one shape in one of X, A and H at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, Figure, Size, Table
from shufflerl.experiments.figures.lines import DELTA, OPTIMISTIC, SDP_PE, UCBVI, UCBVI_JDP
from shufflerl.experiments.setting import Setting
from shufflerl.plots import new_figure

EPISODES = 2_000
EPSILON = 1.0
LINES = (OPTIMISTIC, SDP_PE, UCBVI, UCBVI_JDP)
SHAPE = {"X": 4, "A": 2, "H": 6}
VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "full": {"X": (4, 8, 16, 32), "A": (2, 4, 8, 16, 32), "H": (6, 12, 24, 48, 96)},
    "quick": {"X": (4, 16), "A": (2, 8), "H": (6, 24)},
}


@dataclass(frozen=True)
class Point:
    """One measurement to make: a line on an environment of shape X, A, H."""

    line: str
    states: int
    actions: int
    horizon: int

    @property
    def name(self) -> str:
        """A name for its file."""
        return f"{self.line}-{self.states}-{self.actions}-{self.horizon}"

    @property
    def setting(self) -> Setting:
        """What is run."""
        line = next(line for line in LINES if line.name == self.line)
        return Setting(
            env="random",
            learner=line.learner,
            privatizer=line.privatizer,
            episodes=EPISODES,
            epsilon=EPSILON if line.private else None,
            delta=DELTA if line.private else None,
            env_parameters={"n_states": self.states, "n_actions": self.actions, "horizon": self.horizon},
        )


def grown(line: str, axis: str, value: int) -> Point:
    """The shape with one of its figures replaced."""
    shape = SHAPE | {axis: value}
    return Point(line, shape["X"], shape["A"], shape["H"])


def points(size: Size) -> list[Point]:
    """Every line at every shape, each once."""
    every = [
        grown(line.name, axis, value)
        for line in LINES
        for axis, values in VALUES[size.name].items()
        for value in values
    ]
    return list(dict.fromkeys(every))


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


FIGURE = Figure("scaling", "Scaling of time and memory", analyse, points=points)
