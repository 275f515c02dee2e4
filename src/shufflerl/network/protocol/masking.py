"""Counts under a mask, modulo 2^w: the sum of masked vectors less the sum of masks is the sum of counts.

A mask is the key stream of AES-128 in counter mode under a fresh random seed. To all who do not have the seed a masked
vector is random bytes, whatever is counted in it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import ArrayLike, NDArray

from shufflerl.errors import InvalidInputError
from shufflerl.network.protocol import wire

#: Counters modulo 2^16 or 2^32.
Words = NDArray[np.unsignedinteger]

# What all that honest users do stays below but with probability exp(-35); `Source.stated` has what that costs.
EXPONENT = 35.0
OVERFLOW = math.exp(-EXPONENT)


def max_poisson(mean: float, cases: float) -> int:
    """What none of so many Poisson counts of this mean exceeds, but with probability below exp(-35).

    By Chernoff: P(count >= x) <= exp(-(x ln(x/mean) - x + mean)) for x above the mean, where the exponent grows with x.
    """
    exponent = EXPONENT + math.log(cases)
    low = math.ceil(mean)
    high = math.ceil(mean + exponent / 3 + math.sqrt(exponent**2 / 9 + 2 * exponent * mean)) + 1  # by Bernstein
    rare = bisect.bisect_left(
        range(low, high), True, key=lambda x: x > mean and x * math.log(x / mean) - x + mean >= exponent
    )
    return low + rare - 1


def word_bytes(low: int, high: int) -> int:
    """Bytes of a counter in a masked vector, 2 or 4: honest sums, from `low` to `high`, take at most half of the range.

    They then cannot wrap, and the other half shows that somebody was not honest.
    """
    for size in (2, 4):
        if high - low < 2 ** (8 * size - 1):
            return size
    raise InvalidInputError(
        f"A counter of the batch may reach {high:,} with its noise; masked sums end at 2^31. Send tags, or ask fewer "
        "users at once."
    )


def signed(counts: Words, low: int) -> NDArray[np.int64]:
    """Counters modulo their range as the numbers from `low` on that they stand for."""
    size = counts.dtype.type
    return (counts - size(low % 2 ** (8 * counts.itemsize))).astype(np.int64) + low


def words(data: bytes | memoryview, size: int) -> Words:
    """The counters in bytes, `size` bytes each, little-endian."""
    return np.frombuffer(data, dtype=f"<u{size}")


def zeros(counters: int, size: int) -> Words:
    """A sum of no vectors."""
    return np.zeros(counters, dtype=f"<u{size}")


def mask(seed: bytes, counters: int, size: int) -> Words:
    """The mask of a seed."""
    if len(seed) != wire.SEED_BYTES:
        raise InvalidInputError(f"The seed of a mask has {len(seed)} bytes; expected {wire.SEED_BYTES}.")
    stream = Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()
    return words(stream.update(bytes(counters * size)), size)


def masked(tags: ArrayLike, seed: bytes, counters: int, size: int) -> bytes:
    """How often each counter is named by the tags, under a mask."""
    counts = np.bincount(np.asarray(tags, dtype=np.int64), minlength=counters)
    return (counts.astype(f"<u{size}") + mask(seed, counters, size)).tobytes()


def sum_of_masks(seeds: Iterable[bytes], counters: int, size: int) -> Words:
    """All masks of a batch together."""
    total = zeros(counters, size)
    for seed in seeds:
        total += mask(seed, counters, size)
    return total
