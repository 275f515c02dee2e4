"""CMA-ES (Hansen 2016) on noisy values, in plain arrays that can be saved and restored exactly.

The package `cma` keeps its state in objects that can only be pickled; these are the same equations and constants, but
for the weights. Those of `cma` go by rank. Under noise these go by how far a value is above the mean of all: where most
values are alike but for noise, ranks would be those of the noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray

#: Above so many parameters only variances are adapted, not covariances (Ros & Hansen 2008).
MAX_FULL = 30


class CMAES:
    """A normal law over parameters that moves towards those that rank best: mean, step size and covariance."""

    def __init__(self, parameters: int, population: int, sigma: float = 1.0) -> None:
        d = parameters
        self.population = population
        self.separable = d > MAX_FULL
        ranked = math.log((population + 1) / 2) - np.log(np.arange(1, population // 2 + 1))
        mass = float(ranked.sum() ** 2 / (ranked**2).sum())  # as rates are set by: that of weights by rank
        self._path_rate = (mass + 2) / (d + mass + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (d + 1)) - 1) + self._path_rate
        self._shape_rate = (4 + mass / d) / (d + 4 + 2 * mass / d)
        faster = (d + 2) / 3 if self.separable else 1.0
        self._one_rate = min(0.5, faster * 2 / ((d + 1.3) ** 2 + mass))
        self._many_rate = min(1 - self._one_rate, faster * 2 * (mass - 2 + 1 / mass) / ((d + 2) ** 2 + mass))
        self._length = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))
        self.mean = np.zeros(d)
        self.sigma = sigma
        self.covariance: NDArray[Any] = np.ones(d) if self.separable else np.eye(d)
        self.path = np.zeros(d)
        self.shape_path = np.zeros(d)
        self.updates = 0

    def _axes(self) -> tuple[FloatArray, FloatArray]:
        """Principal axes, in columns, and deviations along them."""
        values, axes = np.linalg.eigh(self.covariance)
        return axes, np.sqrt(np.maximum(values, 1e-20))

    def place(self, draws: FloatArray) -> FloatArray:
        """Parameters[g, i] of standard normal draws[g, i]."""
        if self.separable:
            placed: FloatArray = self.mean + self.sigma * draws * np.sqrt(self.covariance)
            return placed
        axes, deviations = self._axes()
        return self.mean + self.sigma * (draws * deviations) @ axes.T

    def update(self, draws: FloatArray, values: FloatArray, ranked: bool = False) -> None:
        """Move towards the draws whose values are above the mean, in proportion; or by rank, as `cma` does."""
        above = np.maximum(values - values.mean(), 0.0)
        if ranked:
            above = np.maximum(math.log((len(values) + 1) / 2) - np.log(1 + (-values).argsort().argsort()), 0.0)
        if not above.any():
            return
        weights = above / above.sum()
        mass = float(1 / (weights**2).sum())
        if self.separable:
            steps, step = draws * np.sqrt(self.covariance), weights @ draws
        else:
            axes, deviations = self._axes()
            steps, step = (draws * deviations) @ axes.T, axes @ (weights @ draws)
        moved = weights @ steps
        self.updates += 1
        self.mean = self.mean + self.sigma * moved
        keep = 1 - self._path_rate
        self.path = keep * self.path + math.sqrt((1 - keep**2) * mass) * step
        length = float(np.linalg.norm(self.path))
        usual = (1.4 + 2 / (len(self.mean) + 1)) * self._length
        straight = length / math.sqrt(1 - keep ** (2 * self.updates)) < usual
        fade = self._shape_rate * (2 - self._shape_rate)
        self.shape_path = (1 - self._shape_rate) * self.shape_path + straight * math.sqrt(fade * mass) * moved
        left = 1 - self._one_rate - self._many_rate + (not straight) * self._one_rate * fade
        if self.separable:
            self.covariance = left * self.covariance + self._one_rate * self.shape_path**2
            self.covariance += self._many_rate * (weights @ steps**2)
        else:
            self.covariance = left * self.covariance + self._one_rate * np.outer(self.shape_path, self.shape_path)
            self.covariance += self._many_rate * (steps.T * weights) @ steps
        self.sigma *= math.exp(min(1.0, self._path_rate / self._damping * (length / self._length - 1)))

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What must survive a restart: JSON values and arrays."""
        arrays = {"mean": self.mean, "covariance": self.covariance, "path": self.path, "shape_path": self.shape_path}
        return {"sigma": self.sigma, "updates": self.updates}, arrays

    def load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `state` gave."""
        self.sigma, self.updates = values["sigma"], values["updates"]
        for name in ("mean", "covariance", "path", "shape_path"):
            setattr(self, name, arrays[name])
