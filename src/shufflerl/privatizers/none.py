"""No privacy: the true counts. For baselines and tests; its certificate is none."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shufflerl.counts import Counts, Release
from shufflerl.privacy.noise import Silent


class NoPrivacy:
    """Releases true counts."""

    name: ClassVar[str] = "none"

    def release(self, counts: Counts) -> Release:
        """Pass the counts on as they are."""
        return Release(counts.batch, counts.values.astype(np.float64), Silent(), Silent())
