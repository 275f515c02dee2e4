"""The shuffle protocol in the paper's three pieces: randomizer, shuffler, analyzer.

A message is one tag: the number of one counter, raised by one. There is no other kind of message. A user sends the
tags of its own visits and, for every counter, a random number of noise tags; all tags of a batch are permuted
together. What the coordinator sees is then equivalent to the noisy counts: given those, the order is uniform and says
nothing. (Were a user's bit and its noise added up and sent as one integer, as the paper has it, the multiset of these
integers would give single users away.)

This is what a device runs: randomness comes from the operating system and takes no seed. Simulations draw the noise of
all users on a counter at once (`Noise.sample`), which has the same law; `tests/privacy/test_protocol.py` shows it.

Where the servers add the noise, a user sends its own tags alone, one of each family and step; the shuffler adds dummies
to them and mixes each family and step by itself (`mix`), the coordinator counts and adds noise of its own. Both draw by
`noise_counts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Query, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.noise import BinomialNoise, DiscreteLaplace, PoissonNoise, TruncatedLaplace
from shufflerl.privacy import randomness
from shufflerl.returns import Returns


@dataclass(frozen=True)
class Protocol:
    """What all users of a batch agree on: the counters asked for, how many users there are, and their noise.

    `noise` is the law of all users' noise on one counter together; each adds its share of it. It is sized so that the
    shares of `honest_fraction` of the users suffice; from fewer reports nothing is released.
    """

    query: Query
    users: int
    noise: PoissonNoise | BinomialNoise
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what users cannot agree on: noise that is not made of bits, or that they cannot share."""
        checks.whole("users", self.users, least=1)
        object.__setattr__(self, "honest_fraction", checks.fraction("honest_fraction", self.honest_fraction))
        if not isinstance(self.noise, PoissonNoise | BinomialNoise):
            raise InvalidInputError(
                f"{self.noise!r} cannot be sent as bits; expected PoissonNoise or BinomialNoise, of which every user "
                "can add its share."
            )
        if isinstance(self.noise, BinomialNoise):
            bits, left = divmod(self.noise.trials, self.users)
            if left or (bits > 1 and self.noise.probability != 0.5):
                raise InvalidInputError(
                    f"{self.noise.trials} noise bits of probability {self.noise.probability:g} cannot be shared among "
                    f"{self.users} users; expected fair bits, the same number for each, or one bit of any probability."
                )

    @cached_property
    def rate(self) -> Fraction:
        """Expected noise tags per user and counter."""
        if isinstance(self.noise, PoissonNoise):
            return Fraction(self.noise.mean) / self.users
        return Fraction(self.noise.probability) * (self.noise.trials // self.users)

    @property
    def min_reports(self) -> int:
        """Reports whose noise suffices."""
        # Forgive the rounding of the product: a tenth of ten users is one.
        return max(1, math.ceil(self.honest_fraction * self.users * (1 - 1e-12)))

    @property
    def messages_per_user(self) -> float:
        """Expected tags of a user. Their number depends on no data, but tells noise: what is sent is padded."""
        return float(self.query.touched_counters + float(self.rate) * self.query.size)


def randomize(protocol: Protocol, episode: Trajectories | Returns) -> IntArray:
    """The randomizer: one user's tags, true and noise, in increasing order so that the order tells nothing."""
    return np.sort(draw(protocol, episode))


def draw(protocol: Protocol, episode: Trajectories | Returns) -> IntArray:
    """The randomizer's tags in an order that does tell, for whoever only counts them and sends the counts."""
    if len(episode) != 1:
        raise InvalidInputError(f"The randomizer was given {len(episode)} trajectories; expected one user's.")
    true = protocol.query.tags(episode)[0]
    return np.concatenate([true, noise_tags(protocol)])


def noise_tags(protocol: Protocol) -> IntArray:
    """The noise that one user draws, as tags."""
    size = protocol.query.size
    if isinstance(protocol.noise, PoissonNoise):
        # Independent Poisson(rate) on each of C counters is one Poisson(C rate) total, each tag uniform.
        return randomness.uniform(size, randomness.poisson(size * protocol.rate))
    bits = protocol.noise.trials // protocol.users
    if protocol.noise.probability == 0.5:
        return np.repeat(np.arange(size), [randomness.fair_bits(bits) for _ in range(size)])
    return np.flatnonzero(randomness.bernoulli(protocol.rate, size))


def shuffle(reports: Iterable[IntArray]) -> IntArray:
    """The shuffler: all tags of a batch in a uniformly random order."""
    tags = np.concatenate([np.empty(0, dtype=np.int64), *reports])
    return tags[randomness.permutation(len(tags))]


def analyze(protocol: Protocol, tags: ArrayLike, reports: int) -> FloatArray:
    """The analyzer: unbiased counts from the tags of `reports` users: count, subtract the expected noise."""
    given = np.asarray(tags)
    if given.shape == (0,):
        given = np.empty(0, dtype=np.int64)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise InvalidInputError(
            f"The tags have shape {given.shape} and type {given.dtype}; expected a row of integers."
        )
    if given.size and not 0 <= given.min() <= given.max() < protocol.query.size:
        raise InvalidInputError(
            f"A tag lies in [{given.min()}, {given.max()}] but outside [0, {protocol.query.size - 1}]; "
            "discard reports with such tags before counting."
        )
    return unbiased(protocol, np.bincount(given, minlength=protocol.query.size), reports)


def unbiased(protocol: Protocol, counts: IntArray, reports: int) -> FloatArray:
    """The second half of the analyzer: the tags of `reports` users, counted, less the expected noise.

    Fewer reports than the noise was sized for are refused, as their counts would carry too little of it.
    """
    checks.whole("reports", reports, least=1)
    if not protocol.min_reports <= reports <= protocol.users:
        raise InvalidInputError(
            f"reports is {reports}; expected at least {protocol.min_reports}, or the noise would fall short of what "
            f"it was sized for, and at most the {protocol.users} users of the batch."
        )
    return counts.astype(np.float64) - reports * float(protocol.rate)


def noise_counts(law: PoissonNoise | DiscreteLaplace | TruncatedLaplace, size: int) -> IntArray:
    """What a server adds to each of so many counters: whole numbers, `law.mean` on average; of dummies none below 0."""
    if isinstance(law, PoissonNoise):
        return randomness.poissons(Fraction(law.mean), size)
    if isinstance(law, TruncatedLaplace):
        return law.shift + randomness.truncated_laplace(Fraction(law.scale), law.shift, size)
    return randomness.discrete_laplace(Fraction(law.scale), size)


def mix(query: Query, tags: IntArray) -> IntArray:
    """The shuffler, where it adds the noise: the order in which it hands tags on, uniform in each family and step."""
    order = randomness.permutation(len(tags))
    return order[np.argsort(query.groups[tags[order]], kind="stable")]
