"""Budgets at RiverSwim's shape, and horizons at one budget. Nothing is run: noise follows from accounting."""

from __future__ import annotations

STATES, ACTIONS, HORIZON = 4, 2, 6
USERS = 20_000
EPSILON = 1.0
EPSILONS = {"full": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), "quick": (0.1, 1.0, 10.0)}
HORIZONS = {"full": (1, 2, 4, 8, 16, 32, 64), "quick": (2, 8, 32)}
