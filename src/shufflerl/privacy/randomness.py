"""Exact samplers on the operating system's random source, for what leaves a device.

No seed can be given to any of these, and no seeded generator can be passed where they are used: a deployed randomizer
cannot be made predictable by a wrong argument. Probabilities are exact fractions and, if that source is perfect, every
draw has exactly the stated law: no floating point rounds a probability, so the accountant's law is the law.
"""

from __future__ import annotations

import os
import secrets
from fractions import Fraction

import numpy as np

from shufflerl.arrays import BoolArray, IntArray


def uniform(bound: int, size: int) -> IntArray:
    """Independent uniform whole numbers in [0, bound)."""
    # Random bytes are what takes time here: as few as leave hardly any key to be drawn again.
    key = np.dtype(np.uint32 if bound <= 1 << 24 else np.uint64)
    keys = 1 << 8 * key.itemsize
    limit = keys - keys % bound  # largest multiple of bound: beyond it the remainder would be biased
    kept = np.empty(0, dtype=key)
    while len(kept) < size:
        drawn = np.frombuffer(os.urandom(key.itemsize * (size - len(kept))), dtype=key)
        kept = np.concatenate([kept, drawn if limit == keys else drawn[drawn < key.type(limit)]])
    return (kept % key.type(bound)).astype(np.int64)


def permutation(size: int) -> IntArray:
    """A uniform permutation: the order of random keys, drawn again should two be equal."""
    while True:
        keys = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        order = np.argsort(keys)
        if size < 2 or (np.diff(keys[order]) != 0).all():
            return order.astype(np.int64)


def bernoulli(probability: Fraction, size: int) -> BoolArray:
    """Independent events, each of exactly this probability.

    Compare 16 random bits with the first 16 of the probability; only where all agree do further bits decide.
    """
    first, rest = divmod(probability.numerator << 16, probability.denominator)
    if first >> 16:  # probability one
        return np.ones(size, dtype=np.bool_)
    drawn = np.frombuffer(os.urandom(2 * size), dtype=np.uint16)
    happens = drawn < first
    for tie in (drawn == first).nonzero()[0]:
        happens[tie] = secrets.randbelow(probability.denominator) < rest
    return happens


def poisson(mean: Fraction) -> int:
    """A Poisson count, as the sum of equal independent pieces of mean at most one half, by von Neumann's method.

    A piece of mean m climbs: it rises one step with probability m and survives its j-th step with probability 1/j. It
    stops at height g alive with probability (1 - m) m^g / g!; pieces that did not survive start again, so that heights
    have probabilities in proportion to m^g / g!, which is Poisson's law. Only how many pieces do what matters.
    """
    pieces = -(-2 * mean.numerator // mean.denominator)
    piece = mean / max(pieces, 1)
    waiting, total = pieces, 0
    while waiting:
        climbing, height, waiting = waiting, 0, 0
        while climbing:
            rising = int(bernoulli(piece, climbing).sum())
            total += height * (climbing - rising)
            height += 1
            climbing = int(bernoulli(Fraction(1, height), rising).sum())
            waiting += rising - climbing
    return total


def fair_bits(count: int) -> int:
    """How many of `count` fair coins show heads."""
    return secrets.randbits(count).bit_count() if count else 0
