"""No privacy: the true counts. For baselines and tests."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.counts import Counts, Query, Release
from shufflerl.noise import NoNoise
from shufflerl.privatizers.base import Privatizer


class NoPrivacy(Privatizer):
    """Releases true counts; it keeps no record, so one may serve many learners."""

    draws_ahead: ClassVar[bool] = True

    def release(self, counts: Counts) -> Release:
        """Pass the counts on as they are."""
        return Release(counts.batch, counts.values.astype(np.float64), NoNoise(), 0.0)

    def expected_noise(self, query: Query) -> NoNoise:
        """None at all."""
        return NoNoise()

    def noise_of_episodes(self, query: Query, batches: range) -> tuple[FloatArray, FloatArray]:
        """No rows: nothing is added."""
        return np.empty((0, query.size)), np.empty(0)

    def certificate(self, query: Query) -> None:
        """Nothing is guaranteed."""
