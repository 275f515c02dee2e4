"""Messages per user against the users of a batch."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.messages.analysis import analyse

FIGURE = Figure("messages", "Messages per user", analyse)
