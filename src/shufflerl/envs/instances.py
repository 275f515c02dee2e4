"""One draw of a random environment for all seeds: what a benchmark names and reports."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.seeding import stream


def of_instance(rng: np.random.Generator, instance: int | None) -> np.random.Generator:
    """What to draw an environment from: the given stream, or that of the seed `instance` if there is one."""
    return rng if instance is None else stream(checks.whole("instance", instance, least=1), "environment")
