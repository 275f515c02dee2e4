"""Noise laws: what is added to every counter of a release, how far it reaches, and how it is drawn.

All laws are centred: `PoissonNoise(mean)` is the law of Poisson(mean) - mean. A learner reads `variance` and `bound`;
the simulator draws with `sample`; what a law costs in privacy is the accountant's business (`accounting`). Laws of
whole counts (`Whole`) have a `mean`: the expected count, which whoever reads the counters subtracts.

>>> PoissonNoise(100.0).sd
10.0
>>> PoissonNoise(100.0).bound(0.05)
20.0
"""

from shufflerl.noise.bits import BinomialNoise, PoissonNoise, reach
from shufflerl.noise.laplace import MAX_SCALE, MIN_SCALE, DiscreteLaplace, NoiseSum, Part, TruncatedLaplace, Whole
from shufflerl.noise.law import MAX_COUNT, Noise, NoNoise
from shufflerl.noise.real_valued import GaussianNoise, UnaryNoise, on_lattice

__all__ = [
    "MAX_COUNT",
    "MAX_SCALE",
    "MIN_SCALE",
    "BinomialNoise",
    "DiscreteLaplace",
    "GaussianNoise",
    "NoNoise",
    "Noise",
    "NoiseSum",
    "Part",
    "PoissonNoise",
    "TruncatedLaplace",
    "UnaryNoise",
    "Whole",
    "on_lattice",
    "reach",
]
