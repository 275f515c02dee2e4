"""A user's own environment and privatizer, as small as can be."""

from __future__ import annotations

from typing import Any

import numpy as np

from shufflerl.mdp import MDP
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import CentralNoise
from shufflerl.privatizers.base import AdditivePrivatizer, Workload


def doors(rng: Any, *, pay=0.9):  # type: ignore[no-untyped-def]  # as users write them
    """Two doors, of which one pays."""
    del rng
    return MDP(np.empty((0, 1, 2, 1)), [[[0.1, pay]]], [1.0])


def quiet(budget: Budget, workload: Workload) -> AdditivePrivatizer:
    """The noise of a trusted server."""
    return AdditivePrivatizer(CentralNoise(budget), workload)


class Doors:
    """No environment."""

    def __init__(self, rng: Any) -> None:
        del rng
