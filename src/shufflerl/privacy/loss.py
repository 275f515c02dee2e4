"""What a release costs: exact privacy loss of each noise law, pessimistic composition.

Neighbours are two runs in which one user is replaced (`certificate.NEIGHBOURS`). In its batch that user leaves one
counter of every family and layer of the release and enters another, so `changed` = k counters move by one, k/2 of them
down and k/2 up (fewer where old and new trajectory agree, which only loses less). Every counter carries its own
independent noise, so the loss of the release is the sum of k independent losses, over m participations of one user k*m
of them. All of this holds whatever was released before, so it does not matter that batches depend on earlier releases;
those the user has no part in lose nothing.

We say what one counter loses, exactly; Google's `dp-accounting` composes and answers. Every figure is an upper bound:
whatever is rounded, cut off or lost to floating point is rounded against us (see `_composed`).
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first used, which most processes never do

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole
from shufflerl.errors import AccountingError, InvalidInputError
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoNoise,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
    reach,
)

#: No delta below this is certified: the composition's rounding error would be a visible part of the answer.
NUMERIC_FLOOR = 1e-12

# Outcomes left out of one counter's loss, together about this probable, count as infinite loss.
_TAIL = 1e-18
# Mass the composition may cut off where its grid would be longer than this; it counts as infinite loss too. Where to
# cut takes forty moments of every loss to find out, ten times the work of a short composition itself.
_TRUNCATION, _LONG = 1e-16, 2**16
# Loss grid: this gap, unless that makes fewer or more than so many of one counter's loss deviation. Connecting the dots
# widens the variance of each loss by (gap/deviation)^2 / 6 of it, at most 0.007%, and epsilon by half of that.
_GAP = 1e-4
_MIN_GAPS, _MAX_GAPS = 50, 200
# Outcomes closer than this part of the noise's deviation share one loss, the highest among them.
_BLOCKS_PER_DEVIATION = 50_000
# Relative error of an outcome's probability: 2e-9 from the midpoint rule inside a block, 9e-9 from summing logarithms.
_MASS_ERROR = 2e-8
# Absolute error of the Fourier composition in units of rounding per composed loss; measured against direct convolution
# it stays below 0.5 (`privacy/test_accounting.py` repeats the measurement).
_ROUNDINGS_PER_LOSS = 4
# Sums, products, quotients and roots are right to half of this, relatively; exp and log of the C library to all of it.
_ULP = sys.float_info.epsilon
#: The Mills ratio is right to this, relatively: erfcx of SciPy to 5 units
#: (`privacy/test_accounting_rounding.py` repeats the measurement), its argument and factor to 3 more.
MILLS_ERROR = 16 * _ULP


class PrivacyLoss(ABC):
    """The privacy loss of a release: for which pairs (epsilon, delta) it is differentially private.

    delta = E[max(0, 1 - e^(epsilon - loss))], which is at most P(loss > epsilon) and often far below it.
    """

    def delta(self, epsilon: float) -> float:
        """A delta at which the release is (epsilon, delta) private; never below the truth."""
        return _certified_delta(self, real("epsilon", epsilon, above=0, closed=True))

    def epsilon(self, delta: float) -> float:
        """An epsilon at which the release is (epsilon, delta) private; never below the truth, infinite if none is.

        It is certified: `loss.delta(loss.epsilon(delta)) <= delta`.
        """
        return _certified_epsilon(self, real("delta", delta, above=0, below=1))

    @abstractmethod
    def _delta(self, epsilon: float) -> float:
        """Never below the truth."""

    @abstractmethod
    def _epsilon(self, delta: float) -> float:
        """The inverse, up to rounding."""


@functools.lru_cache(maxsize=256)
def _certified_delta(loss: PrivacyLoss, epsilon: float) -> float:
    """Remembered, as every node of a process checks the same announcement, and sums over a whole grid."""
    return min(1.0, loss._delta(epsilon))


@functools.lru_cache(maxsize=256)
def _certified_epsilon(loss: PrivacyLoss, delta: float) -> float:
    """Remembered, as every look at a running system asks for all that its ledger holds."""
    found = loss._epsilon(delta)
    # It may be a rounding beside the least. Twelve digits of it give a calibrated budget back as it was.
    epsilon, step = float(f"{found:.12g}"), _ULP
    while math.isfinite(epsilon) and loss._delta(epsilon) > delta:
        epsilon, step = max(found, sys.float_info.min) * (1 + step), 2 * step
    return epsilon


class _Unprotected(PrivacyLoss):
    """Exact counts: what one user did is certain."""

    def _delta(self, epsilon: float) -> float:
        return 1.0

    def _epsilon(self, delta: float) -> float:
        return math.inf


@dataclass(frozen=True)
class _GaussianLoss(PrivacyLoss):
    """Composed Gaussian noise: the loss is Normal(mu^2/2, mu^2), in closed form."""

    mu: float

    def _delta(self, epsilon: float) -> float:
        return gaussian_delta(self.mu, epsilon)

    def _epsilon(self, delta: float) -> float:
        if gaussian_delta(self.mu, 0.0) <= delta:
            return 0.0
        # The loss's tail beyond epsilon bounds delta: P(loss > epsilon) <= exp(-a^2/2), a = epsilon/mu - mu/2.
        highest = self.mu * math.sqrt(-2 * math.log(delta)) + self.mu**2 / 2
        return root(lambda epsilon: gaussian_delta(self.mu, epsilon) - delta, 0.0, highest)


@dataclass(frozen=True)
class UnaryLoss(PrivacyLoss):
    """Unary encoding with the own bit a fair coin and the others ones with probability `flip`.

    Two users' reports differ in two bits. Of their four values only (1, 0) is likelier under the first: (1 - q)/2
    against q/2. So delta(epsilon) = (1 - q - e^epsilon q)/2, and none is left from epsilon = ln((1 - q)/q) on.
    """

    flip: float

    def _delta(self, epsilon: float) -> float:
        if epsilon + math.log(self.flip) > 1:
            return 0.0
        root = math.exp(epsilon / 2)  # its square may overflow
        # From below: one unit for each root and half of one for each product, of which the first may be so small that
        # its last digit is more than that. The difference is exact.
        grown = math.nextafter(root * self.flip, 0.0) * root * (1 - 4 * _ULP)
        return _float_above(max(Fraction(0), 1 - Fraction(self.flip) - Fraction(grown)) / 2)

    def _epsilon(self, delta: float) -> float:
        likelier = 1 - self.flip - 2 * delta
        return math.log(likelier) - math.log(self.flip) if likelier > self.flip else 0.0


@dataclass(frozen=True, eq=False)
class _ComposedLoss(PrivacyLoss):
    """Losses of whole-numbered noise, composed on a grid by `dp-accounting`."""

    pmf: Any
    losses: int

    def _delta(self, epsilon: float) -> float:
        return float(self.pmf.get_delta_for_epsilon(epsilon)) + rounding(self.losses)

    def _epsilon(self, delta: float) -> float:
        refuse_below_floor(delta, self.losses)
        return float(self.pmf.get_epsilon_for_delta(delta - rounding(self.losses)))


@functools.lru_cache(maxsize=256, typed=True)
def privacy_loss(noise: Noise, changed: int, participations: int = 1) -> PrivacyLoss:
    """The loss of releasing counters under `noise` when a replaced user moves `changed` of them, half up, half down.

    `participations` is the number of such releases one user may take part in. Only one direction of the neighbouring
    relation need be accounted: swapping the two data sets turns every +1 into a -1, and as there are as many of either,
    the composed loss is the same.
    """
    losses = even_changes(changed) * whole("participations", participations, least=1)
    if isinstance(noise, NoNoise):
        return _Unprotected()
    if isinstance(noise, GaussianNoise):
        return _GaussianLoss(math.sqrt(losses) / noise.sd * (1 + 2 * _ULP))  # three roundings, half a unit each
    if isinstance(noise, PoissonNoise | BinomialNoise):
        return _composed(noise, losses)
    if isinstance(noise, DiscreteLaplace | TruncatedLaplace):
        return _laplace_loss(noise, losses)
    if isinstance(noise, UnaryNoise) and losses == 2:
        return UnaryLoss(noise.flip)
    raise InvalidInputError(
        f"The loss of {noise!r} over {losses} changed counters is not known; expected Poisson, binomial, Laplace or "
        "Gaussian noise, or unary encoding of one report, which changes 2."
    )


def failure_delta(failure: float, epsilon: float) -> float:
    """What delta grows by if noise may fail, with this probability at most in either of two neighbours.

    If two releases are (epsilon, delta)-indistinguishable but for an event of probability p in either, they are so with
    delta + p + e^epsilon p. Of several releases the probabilities add up.
    """
    return (1 + math.exp(min(epsilon, 700.0))) * failure * (1 + 4 * _ULP)


def epsilon_beside(failure: float, delta: float, about: float, epsilon: Callable[[float], float]) -> float:
    """An epsilon at delta if noise may fail too; `epsilon` tells it for what failing leaves of delta.

    Failing takes more of delta the larger epsilon is. As long as epsilon is no more than `about`, that counts; if it is
    more, what is told may be up to a hundredth too much.
    """
    if not failure:
        return epsilon(delta)
    while (left := math.nextafter(delta - failure_delta(failure, about), 0.0)) > 0:
        found = epsilon(left)
        if found <= about:
            return found
        about = 1.01 * found
    return math.inf


def even_changes(changed: int) -> int:
    """How many counters move, if as many can move up as down."""
    changed = whole("changed", changed, least=2)
    if changed % 2:
        raise InvalidInputError(
            f"changed is {changed}; expected an even number: a replaced user leaves a counter for each it enters."
        )
    return changed


def rounding(losses: int) -> float:
    """What the Fourier composition of so many losses may lose to floating point; added to every delta."""
    return _ROUNDINGS_PER_LOSS * sys.float_info.epsilon * losses / 2


def refuse_below_floor(delta: float, losses: int) -> None:
    """Refuse a delta of which rounding would be a visible part."""
    floor = max(NUMERIC_FLOOR, 10 * rounding(losses))
    if delta < floor:
        raise AccountingError(
            f"delta is {delta:g}; below {floor:.2g} the accountant's rounding error would show in the answer, so it "
            f"certifies nothing there. Use a delta of at least {floor:.2g}."
        )


def _composed(noise: PoissonNoise | BinomialNoise, losses: int) -> PrivacyLoss:
    """Compose losses/2 counters that move down and losses/2 that move up, never below the truth.

    One counter's loss is replaced by one that dominates it: its delta is at least as large at every epsilon, negative
    ones included. Domination survives composition, as the delta of a sum of independent losses, E[delta_1(epsilon -
    L_2)], grows with delta_1 and likewise with delta_2. What composition itself cuts off is added as infinite loss,
    what it may lose to rounding is added by `_ComposedLoss`.
    """
    masses, down, up = outcome_losses(noise)
    deviation = 1 / noise.sd
    gap = min(max(_GAP, deviation / _MAX_GAPS), deviation / _MIN_GAPS)
    composed = None
    for values in (down, up):
        pmf = connected_dots(masses, values, gap)
        if pmf is None:
            return _Unprotected()
        if losses > 2:
            pmf = _self_composed(pmf, losses // 2)
        composed = pmf if composed is None else composed.compose(pmf)
    return _ComposedLoss(composed, losses)


def _laplace_loss(noise: DiscreteLaplace | TruncatedLaplace, losses: int) -> PrivacyLoss:
    """Of Laplace noise every count loses 1/scale one way or the other, so a grid of that gap holds each loss exactly.

    Let p = exp(-1/scale). The neighbour's counter one higher ("down"), counts up to 0 lose 1/scale, probability
    1/(1+p), and the others -1/scale. Cut to [-n, n], a count of -n loses everything: the neighbour cannot produce it.
    Up to the common factor 1 + p - 2p^(n+1) that has probability (1-p) p^n, and what is left is (1 - p^n) of 1 and p.
    The law is symmetric, so "up" loses the same. The gap is rounded up, and so is every mass.
    """
    from dp_accounting.pld import pld_pmf

    gap = 1 / noise.scale * (1 + 4 * _ULP)  # rounded up, its multiples too
    p, u = math.exp(-1 / noise.scale), -math.expm1(-1 / noise.scale)
    edge = math.exp(-noise.shift / noise.scale) if isinstance(noise, TruncatedLaplace) else 0.0
    # Roundings of 1/scale and shift/scale are relative to exponents, which are at most `worst` units off.
    worst = _ULP * (16 + 2 / noise.scale + (noise.shift / noise.scale if isinstance(noise, TruncatedLaplace) else 0.0))
    everything = (1 + p - 2 * p * edge) / (1 + worst)
    finite = np.array([p, 0.0, 1.0]) * ((1 - edge) / everything)
    pmf = pld_pmf.DensePLDPmf(gap, -1, finite, u * edge / everything, pessimistic_estimate=True)
    return _ComposedLoss(_self_composed(pmf, losses), losses)


def _self_composed(pmf: Any, times: int) -> Any:
    return pmf.self_compose(times, tail_mass_truncation=_TRUNCATION if times * pmf.size > _LONG else 0.0)


def outcome_losses(noise: PoissonNoise | BinomialNoise) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Probabilities p(q) of the noise counts that matter, and what each reveals about a counter that moves by one.

    With r(q) = ln p(q)/p(q-1), a count q loses r(q) when the neighbour's counter is one higher ("down": data + q equals
    data + 1 + (q-1)) and -r(q+1) when it is one lower ("up"). Poisson: r(q) = ln(mean/q). Binomial: r(q) = ln[(n-q+1)/q
    * p/(1-p)]. At the ends of the support, q = 0 and q = n, the neighbour cannot produce the value: infinite loss.

    Only counts within Bernstein's reach of the mean are listed; the rest, at most `_TAIL`, is left to the caller. Where
    the noise is so wide that there are too many, neighbouring counts form a block that loses what its worst member
    loses; r falls in q, so that is the first of the block for "down" and the last for "up".
    """
    most: float
    if isinstance(noise, BinomialNoise):
        exact_mean, most = noise.trials * Fraction(noise.probability), noise.trials
        unset_bits = noise.trials * (1 - noise.probability)
    else:  # the limit of infinitely many rare bits
        exact_mean, most, unset_bits = Fraction(noise.mean), math.inf, math.inf
    centre = round(exact_mean)
    furthest = math.ceil(reach(noise.variance, _TAIL))
    first, last = max(-centre, -furthest), int(min(furthest, most - centre))
    block = max(1, int(noise.sd / _BLOCKS_PER_DEVIATION))
    starts = np.arange(first, last + 1 + block, block)  # of every block, and of the one after the last
    # Distances from the mean, so that no digits are lost where counts are huge and their logarithms all but equal.
    distance = starts + float(centre - exact_mean)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratios = np.log1p((1 - distance) / unset_bits) - np.log1p(distance / noise.mean)
    if centre + first == 0:
        ratios[0] = math.inf
    if centre + last == most:
        ratios[-1] = -math.inf
    # p(q) is the product of its ratios. Between the middles of two blocks lie `block` ratios around the second's start.
    logarithms = np.concatenate(([0.0], np.cumsum(block * ratios[1:-1])))
    masses = np.exp(logarithms - logarithms.max())
    return masses * ((1 + _MASS_ERROR) / masses.sum()), ratios[:-1], -ratios[1:]


def connected_dots(masses: FloatArray, losses: FloatArray, gap: float) -> Any:
    """A loss on the grid of multiples of `gap` that dominates the given one; None if nothing finite is left.

    Each mass goes to the two grid points around its loss so that its probability under both neighbours stays: this is
    the pessimistic connect-the-dots discretisation of Doroshenko et al. (2022), written per outcome, where it needs no
    differences of nearly equal deltas. Rounding every loss up instead would add losses*gap/2 to epsilon.
    """
    # Slow to import, and most of the package does without it.
    from dp_accounting.pld import pld_pmf

    # Outcomes that hardly occur but lose much would only lengthen the grid.
    kept = np.isfinite(losses) & (masses > _TAIL * masses.max())
    infinite = float(masses[~kept].sum()) + _TAIL
    if infinite >= 1 or not kept.any():
        return None
    masses, losses = masses[kept], losses[kept]
    cells = np.floor(losses / gap)
    higher = np.clip(masses * (np.expm1(cells * gap - losses) / math.expm1(-gap)), 0.0, masses)
    lowest = int(cells.min())
    index = (cells - lowest).astype(np.int64)
    size = int(index.max()) + 2
    on_grid = np.bincount(index, masses - higher, size) + np.bincount(index + 1, higher, size)
    return pld_pmf.DensePLDPmf(gap, lowest, on_grid, infinite, pessimistic_estimate=True)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta = Phi(-a) - e^eps Phi(-b), a = eps/mu - mu/2 and b = a + mu, from above, to a relative 1e-9 at any size.

    Both terms share the density phi(a) = e^eps phi(b), so that delta = phi(a) (M(a) - M(b)), M(t) = int_0^inf
    exp(-ts - s^2/2) ds the Mills ratio. Where mu is small and this difference loses its digits, it is bounded by the
    trapezoid under its slope: -M'(t) = 1 - t M(t) is convex (M is completely monotone), so M(a) - M(b) is at most mu
    times the mean of the slopes at a and b.
    """
    # Three roundings of at most half a unit of eps/mu + mu/2. Delta falls in a at any mu, so a is taken from below.
    near = epsilon / mu - mu / 2 - 2 * _ULP * (epsilon / mu + mu / 2)
    if not near < 39:  # infinite minus infinite as well
        return math.ulp(0.0)  # Phi(-39) < 1e-331
    if near < -39:
        return 1.0
    far = near + mu
    # Half a unit of the exponent for its square, less than 8 for exp, division and constant; and below the normal
    # range of numbers the last digit itself.
    density = math.exp(-near * near / 2) / math.sqrt(2 * math.pi)
    density = density * (1 + _ULP * (near * near / 2 + 8)) + 4 * math.ulp(0.0)
    if near < -1:
        # No digits are lost: delta is above 0.6. Of the two terms one is below 1, the other, as far > 1 and phi is
        # small where the exponent is large, below 0.2, each right to less than the error of the Mills ratio.
        return float(scipy.special.ndtr(-near)) - density * _mills(far) + 2 * MILLS_ERROR
    difference = _mills(near) * (1 + MILLS_ERROR) - _mills(far) * (1 - MILLS_ERROR)
    trapezoid = mu * (_slope(near) + _slope(far)) / 2
    return math.nextafter(density * min(difference, trapezoid) * (1 + 4 * _ULP), math.inf)  # eight roundings above


def _mills(t: float) -> float:
    """M(t) = (1 - Phi(t)) / phi(t)."""
    return math.sqrt(math.pi / 2) * float(scipy.special.erfcx(t / math.sqrt(2)))


def _slope(t: float) -> float:
    """-M'(t) = 1 - t M(t), rounded up."""
    product = t * _mills(t)
    return 1 - product + abs(product) * MILLS_ERROR


def root(excess: Callable[[float], float], low: float, high: float) -> float:
    """The point of [low, high] at which the falling `excess` is zero, up to rounding."""
    return float(scipy.optimize.brentq(excess, low, high, xtol=1e-300, rtol=1e-14))


def _float_above(exact: Fraction) -> float:
    """The least number of floating point that is not below."""
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
