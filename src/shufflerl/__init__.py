"""Online reinforcement learning under shuffle differential privacy."""

__version__ = "0.1.0"
