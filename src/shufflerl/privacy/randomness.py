"""Exact samplers on the operating system's random source, for what leaves a device.

No seed can be given to any of these, and no seeded generator can be passed where they are used: a deployed randomizer
cannot be made predictable by a wrong argument. Probabilities are exact fractions and every draw has exactly the stated
law: no floating point rounds a probability, so the accountant's law is the law.
"""

from __future__ import annotations

import os
import secrets
from fractions import Fraction

import numpy as np

from shufflerl.checks import IntArray


def uniform(bound: int, size: int) -> IntArray:
    """Independent uniform whole numbers in [0, bound)."""
    limit = (1 << 64) - (1 << 64) % bound  # largest multiple of bound: beyond it the remainder would be biased
    kept = np.empty(0, dtype=np.uint64)
    while len(kept) < size:
        drawn = np.frombuffer(os.urandom(8 * (size - len(kept))), dtype=np.uint64)
        kept = np.concatenate([kept, drawn if limit == 1 << 64 else drawn[drawn < np.uint64(limit)]])
    return (kept % np.uint64(bound)).astype(np.int64)


def permutation(size: int) -> IntArray:
    """A uniform permutation: the order of random keys, drawn again should two be equal."""
    while True:
        keys = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        order = np.argsort(keys)
        if size < 2 or (np.diff(keys[order]) != 0).all():
            return order.astype(np.int64)


def bernoulli(probability: Fraction) -> bool:
    """True with exactly this probability."""
    return secrets.randbelow(probability.denominator) < probability.numerator


def poisson(mean: Fraction) -> int:
    """A Poisson count, as a sum of independent pieces of mean at most one half."""
    pieces = -(-2 * mean.numerator // mean.denominator)
    return sum(_small_poisson(mean / pieces) for _ in range(pieces))


def _small_poisson(mean: Fraction) -> int:
    """Poisson for a mean below one, by von Neumann's method.

    Draw g with P(g) = (1 - mean) mean^g and keep it if g random keys happen to be in order, which has probability 1/g!:
    what is kept has P(g) proportional to mean^g / g!.
    """
    while True:
        count = 0
        factorial = 1
        while bernoulli(mean):
            count += 1
            factorial *= count
        if secrets.randbelow(factorial) == 0:
            return count


def fair_bits(count: int) -> int:
    """How many of `count` fair coins show heads."""
    return secrets.randbits(count).bit_count() if count else 0
