"""The window of returns that a batch tells apart."""

from __future__ import annotations

from dataclasses import dataclass

from shufflerl.arrays import FloatArray
from shufflerl.learners.policy_search.constants import C


@dataclass(frozen=True)
class ReturnWindow:
    """Its ends, the range that returns have, and how narrow it may become."""

    low: float
    high: float
    lowest: float
    highest: float
    narrowest: float

    def adapted(self, shares: FloatArray, mean: float, *, exact: bool) -> tuple[float, float]:
        """Its ends where a few of the returns are: outwards where more are, inwards where fewer.

        Noise on an arm's return goes with the window's width; but returns beyond its lower end count too little. The
        mean return, in widths and at most what it may be, tells sooner that the window is far too wide. Without noise
        there is no need to be narrow.
        """
        width = self.high - self.low
        kept = (0.0, 0.0) if exact else (C.bottom_share, C.top_share)
        down, up = (
            width * min(max(C.pace * (float(share) - few), -0.5), 1.0)
            for share, few in zip((shares[0], shares[-1]), kept, strict=True)
        )
        if mean < C.empty and not exact:
            up = -width / 2
        low, high = self.low - down, self.high + up
        short = max(0.0, self.narrowest - (high - low)) / 2
        low, high = max(low - short, self.lowest), min(high + short, self.highest)
        return min(low, self.highest - self.narrowest), max(high, self.lowest + self.narrowest)
