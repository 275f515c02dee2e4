"""Random environments that grow from one shape in one of X, A and H at a time."""

from __future__ import annotations

from dataclasses import dataclass

from shufflerl.experiment import Setting
from shufflerl.experiments.figures.base import Size
from shufflerl.experiments.figures.lines import DELTA, OPTIMISTIC, SDP_PE, UCBVI, UCBVI_JDP

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
            "random",
            line.learner,
            line.privatizer,
            EPISODES,
            EPSILON if line.private else None,
            DELTA if line.private else None,
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
