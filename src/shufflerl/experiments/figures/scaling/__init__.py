"""How time and memory grow with states, actions and steps: measurements of this machine, no results."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.scaling.analysis import analyse
from shufflerl.experiments.figures.scaling.sweep import points

FIGURE = Figure("scaling", "Scaling of time and memory", analyse, points=points)
