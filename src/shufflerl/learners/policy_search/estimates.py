"""What noisy counts of returns tell of the policies that users played: each one's distance from the mean of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shufflerl.arrays import FloatArray


@dataclass(frozen=True)
class ArmEstimates:
    """What noisy counts tell: the mean over all arms and each arm's distance from it, in widths of the window."""

    mean: float
    error: float  # of the mean
    arms: FloatArray
    variance: float  # of an arm's distance
    inherited: float  # the share of the arms' own differences that is in this variance
    law: FloatArray  # of returns over points
    noise: float  # variance on each counter

    @property
    def signal(self) -> float:
        """Variance of the arms' own differences: what users and noise do not explain.

        Users' returns are spread as those of all arms together, of which the arms' own differences are a part.
        """
        return max((float(self.arms.var(ddof=1)) - self.variance) / (1 - self.inherited), 0.0)

    @property
    def reliability(self) -> float:
        """The share of the arms' differences that is their own: all of it where they tell more than users could."""
        return min(1.0, self.signal / max(float(self.arms.var(ddof=1)), 1e-12))

    def users_for(self, variance: float) -> float:
        """Users per arm that give its distance such a variance, within a tenth; a million if none do."""
        tilt = _tilt(self.law)
        users = 1.0
        while users < 1e6 and users**2 * float((tilt**2 / (users * self.law + self.noise + 1e-9)).sum()) * variance < 1:
            users *= 1.1
        return users

    @classmethod
    def of(cls, counts: FloatArray, expected: FloatArray, noise: float, unbiased: bool = False) -> ArmEstimates:
        """From counts[arm, point] of so many expected users of each arm.

        Arms are compared by the linear estimate of least variance for small shifts of the law of returns over points,
        q: with x its points, weights are q (x - mean) / (users q + noise), between "each user alike", right without
        noise, and "each counter alike", right where noise is all. That users draw their arms themselves cancels to
        first order, as what is expected of each point goes with the users that an arm is estimated to have.

        Good arms differ in rare bad returns, which is no small shift: those weights count what noise nearly hides too
        little there. An `unbiased` estimate counts each user alike whatever the noise.
        """
        users, count = float(expected.sum()), counts.shape[1]
        points = np.linspace(0.0, 1.0, count)
        floor = min(0.02, math.sqrt(noise * len(counts)) / users)
        law = np.maximum(counts.sum(axis=0) / users, floor)
        law /= law.sum()
        mean = float(law @ points)
        around = points - mean
        total = max(float(law @ around**2), 1e-6)
        each = expected[:, None]
        spread = each * law + noise + 1e-9
        tilt = _tilt(law)
        weights = tilt / (each * law + 1e-9 if unbiased else spread)
        weights /= np.maximum(each * (weights @ tilt)[:, None], 1e-12)
        # The users of each arm: what was drawn where it is known, what was expected where noise hides it.
        trust = expected / (expected + count * noise)
        there = np.maximum(expected + trust * (counts.sum(axis=1) - expected), 0.0)
        scale = np.where(there > 0, expected / np.maximum(there, 0.5), 0.0)
        return cls(
            mean=mean,
            error=math.sqrt(total / users + noise * len(counts) * float((around**2).sum()) / users**2),
            arms=scale * ((counts - there[:, None] * law) * weights).sum(axis=1),
            variance=float((weights**2 * spread).sum(axis=1).mean()),
            inherited=min(0.9, float((weights**2 * each * law).sum(axis=1).mean()) / total),
            law=law,
            noise=noise,
        )


def _tilt(law: FloatArray) -> FloatArray:
    """How each point's share changes as the mean of a law over points moves: by exponential tilting."""
    around = np.linspace(0.0, 1.0, len(law))
    around = around - law @ around
    tilted: FloatArray = law * around / max(float(law @ around**2), 1e-6)
    return tilted
