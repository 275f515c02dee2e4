"""Exact samplers on the operating system's random source, for what leaves a device.

No seed can be given to any of these, and no seeded generator can be passed where they are used: a deployed randomizer
cannot be made predictable by a wrong argument. Probabilities are exact fractions and, if that source is perfect, every
draw has exactly the stated law: no floating point rounds a probability, so the accountant's law is the law.
"""

from __future__ import annotations

import math
import os
import secrets
from fractions import Fraction

import numpy as np

from shufflerl.arrays import BoolArray, IntArray
from shufflerl.errors import ContractError

#: About so many units of Poisson counts are drawn at once, so that memory stays bounded.
_AT_ONCE = 1 << 20


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
            rising = int(np.count_nonzero(bernoulli(piece, climbing)))
            total += height * (climbing - rising)
            height += 1
            if not rising:
                break
            climbing = int(np.count_nonzero(bernoulli(Fraction(1, height), rising))) if height > 1 else rising
            waiting += rising - climbing
    return total


def poissons(mean: Fraction, size: int) -> IntArray:
    """Independent Poisson counts of one mean: their sum is Poisson, and given it each unit falls anywhere alike."""
    counts = np.zeros(size, dtype=np.int64)
    some = max(1, _AT_ONCE // math.ceil(max(mean, Fraction(1))))
    for first in range(0, size, some):
        slots = min(some, size - first)
        counts[first : first + slots] = np.bincount(uniform(slots, poisson(slots * mean)), minlength=slots)
    return counts


def discrete_laplace(scale: Fraction, size: int) -> IntArray:
    """Independent whole numbers z of probability in proportion to exp(-|z|/scale) (Canonne, Kamath and Steinke 2020).

    With scale = t/s, X = U + t V has probability in proportion to exp(-X/t) if U is uniform below t and accepted with
    probability exp(-U/t), and V counts events of probability 1/e before the first that fails. Then floor(X/s) is
    geometric with ratio exp(-s/t). It gets a sign; a negative zero, the second of two, is drawn again.
    """
    t, s = scale.numerator, scale.denominator
    if not 0 < t < 1 << 53 or s > 1 << 62:
        raise ContractError(f"The scale {scale} is no positive fraction of whole numbers below 2^53 and 2^62.")
    kept = np.empty(0, dtype=np.int64)
    while (missing := size - len(kept)) > 0:
        below = uniform(t, 2 * missing + 8)
        below = below[decays(below, t)]
        # Sums stay below 2^63 unless 1,000 events of probability 1/e happen in a row.
        distances = (below + t * streaks(len(below))) // s
        negative = uniform(2, len(distances)) == 1
        drawn = np.where(negative, -distances, distances)[~(negative & (distances == 0))]
        kept = np.concatenate([kept, drawn[:missing]])
    return kept


def truncated_laplace(scale: Fraction, shift: int, size: int) -> IntArray:
    """Independent draws of `discrete_laplace` given that they lie in [-shift, shift]: others are drawn again."""
    kept = np.empty(0, dtype=np.int64)
    while len(kept) < size:
        drawn = discrete_laplace(scale, size - len(kept))
        kept = np.concatenate([kept, drawn[np.abs(drawn) <= shift]])
    return kept


def decays(numerators: IntArray, denominator: int) -> BoolArray:
    """Independent events of probabilities exp(-x), x = numerator/denominator at most one, by von Neumann's method.

    Events of probability x/1, x/2, x/3, ... all happen up to the j-th with probability x^j/j!; so the number of the
    first that fails is odd with probability 1 - x + x^2/2 - x^3/6 + ... = exp(-x).
    """
    odd = np.zeros(len(numerators), dtype=np.bool_)
    running, number = np.arange(len(numerators)), 1
    while len(running):
        happens = uniform(denominator, len(running)) < numerators[running]
        if number > 1:
            happens[happens] = uniform(number, int(happens.sum())) == 0
        odd[running[~happens]] = number % 2 == 1
        running, number = running[happens], number + 1
    return odd


def streaks(size: int) -> IntArray:
    """How many events of probability 1/e happen before the first that does not."""
    counts, running = np.zeros(size, dtype=np.int64), np.arange(size)
    while len(running):
        running = running[decays(np.ones(len(running), dtype=np.int64), 1)]
        counts[running] += 1
    return counts


def fair_bits(count: int) -> int:
    """How many of `count` fair coins show heads."""
    return secrets.randbits(count).bit_count() if count else 0
