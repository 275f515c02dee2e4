"""What can be read from a release: all of it post-processing, so none of it costs privacy.

`visits` estimates N_h(x, a) from both families, `precision` says how far a release can be off, and `consistent` turns
a release into the paper's private counts.
"""

from __future__ import annotations

from shufflerl.estimation.consistency import PrivateCounts, consistent
from shufflerl.estimation.rows import Visits, precision, visits

__all__ = ["PrivateCounts", "Visits", "consistent", "precision", "visits"]
