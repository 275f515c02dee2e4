"""The statistics of an audit: p-values of draws against their declared law, and bounds on epsilon from errors."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from scipy import special, stats

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.noise import GaussianNoise, Whole
from shufflerl.privacy.accounting import Budget, calibrate_gaussian
from shufflerl.privacy.loss import privacy_loss

_CELLS = 32


def bonferroni(*p_values: float) -> float:
    """The p-value of several tests together, whatever their dependence (Bonferroni)."""
    return min(1.0, len(p_values) * float(min(p_values)))


def two_sided(score: float) -> float:
    """The p-value of a standard normal score."""
    return 2 * float(stats.norm.sf(abs(score)))


def chi_square(observed: IntArray | FloatArray, expected: float | FloatArray) -> float:
    """The p-value of counts in cells against what is expected there."""
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), observed.size - 1))


def scores_fit(scores: FloatArray) -> float:
    """The p-value of independent standard normal scores, by the sum of their squares."""
    return float(stats.chi2.sf((scores**2).sum(), scores.size))


def fit(noise: FloatArray, law: Whole) -> float:
    """The p-value of a chi-square test that these are draws of a law of whole counts, less its mean."""
    observed, probabilities = cells(noise, law)
    return chi_square(observed, probabilities * noise.size) if len(observed) > 1 else 1.0


def cells(noise: FloatArray, law: Whole) -> tuple[IntArray, FloatArray]:
    """How many draws fall into cells of about equal probability, and these probabilities."""
    wanted = min(_CELLS, noise.size // 20)
    values, masses = outcomes(law)
    ends = np.unique(np.searchsorted(np.cumsum(masses), np.arange(1, wanted) / wanted))
    # Cell i holds what is above ends[i-1] and up to ends[i]; the last one is left out if hardly anything is beyond it.
    probabilities = np.diff(law.cdf(values[ends]), prepend=0.0, append=1.0)
    if probabilities[-1] * noise.size < 5:
        ends, probabilities = ends[:-1], np.append(probabilities[:-2], probabilities[-2:].sum())
    between = np.searchsorted(values[ends], noise.ravel() - 0.5)  # half a count lower: sums of floats are not whole
    return np.bincount(between, minlength=len(ends) + 1), probabilities


@functools.lru_cache(maxsize=64)
def outcomes(law: Whole) -> tuple[FloatArray, FloatArray]:
    """The noise that a law of whole counts may be, less its mean, and how probable each is."""
    reach = math.ceil(law.bound(1e-12))
    values = np.arange(math.floor(law.mean) - reach, math.ceil(law.mean) + reach + 1).astype(np.float64) - law.mean
    return values, np.diff(law.cdf(values), prepend=0.0)


def tails_fit(noise: FloatArray, law: Whole) -> float:
    """The p-value of the most extreme of some draws of a law of whole counts, exact for each of them."""
    return bonferroni(*np.minimum(1.0, 2 * np.minimum(law.cdf(noise), 1 - law.cdf(noise - 1))))


def spread_fit(noise: FloatArray, law: Whole, each: int = 1) -> tuple[float, float]:
    """The p-values that sums of `each` draws vary too little, and too much.

    Their variance is about chi-square, of fewer degrees by the kurtosis. Of few sums of Laplace noise the first is
    right or larger than that, the second too small by some factor far out.
    """
    values, masses = outcomes(law)
    excess = float((values**4 * masses).sum()) / law.variance**2 - 3
    degrees = 2 * noise.size / (2 + excess / each)
    ratio = degrees * float((noise**2).mean()) / (each * law.variance)
    return float(stats.chi2.cdf(ratio, degrees)), float(stats.chi2.sf(ratio, degrees))


def mean_fit(values: FloatArray, variance: float, groups: IntArray) -> float:
    """The p-value of a chi-square test that centred values of this variance are so in the sum of every group."""
    sizes = np.bincount(groups.ravel())
    sums = np.bincount(groups.ravel(), values.ravel())[sizes > 0]
    return scores_fit(sums / np.sqrt(sizes[sizes > 0] * variance))


def highest_rate(errors: int, samples: int, level: float) -> float:
    """Clopper-Pearson: the error rate is below this with confidence 1 - level."""
    return 1.0 if errors == samples else float(stats.beta.isf(level, errors + 1, samples - errors))


def lowest_mu(false_alarms: int, misses: int, *, samples: int, level: float) -> float:
    """The mu that so many errors show a Gaussian mechanism to have at least, with confidence 1 - level."""
    rates = (highest_rate(errors, samples, level / 2) for errors in (false_alarms, misses))
    return max(0.0, -sum(float(special.ndtri(rate)) for rate in rates))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """What a Gaussian mechanism of this mu spends."""
    return 0.0 if mu == 0 else privacy_loss(GaussianNoise(math.sqrt(2) / mu), 2).epsilon(delta)


def lowest_epsilon(false_alarms: int, misses: int, *, samples: int, delta: float, level: float) -> float:
    """What so many errors show epsilon to be at least, whatever the law of the noise.

    Privacy means 1 - misses <= exp(epsilon) * false_alarms + delta for every test, and likewise with the two swapped.
    """
    rates = [highest_rate(errors, samples, level / 2) for errors in (false_alarms, misses)]
    success = max((1 - one - delta) / other for one, other in (rates, reversed(rates)))
    return math.log(success) if success > 1 else 0.0


def refutable_epsilon(samples: int, budget: Budget, level: float) -> float:
    """The least epsilon of a Gaussian mechanism that its mu shows to be above the budget in nine of ten audits."""
    claimed = math.sqrt(2) / calibrate_gaussian(budget, 2).sd
    # The most errors of either kind that still refute the claim: the bound falls in their number.
    below = functools.partial(lowest_mu, samples=samples, level=level)
    most = bisect.bisect_left(range(samples), True, key=lambda errors: below(errors, errors) <= claimed) - 1
    if most < 0:
        return math.inf
    # At this rate either kind of error stays within that number with probability 0.95.
    return gaussian_epsilon(-2 * float(special.ndtri(highest_rate(most, samples, 0.95))), budget.delta)


def refutable_by_response(samples: int, budget: Budget, level: float) -> float:
    """The least epsilon of randomized response that `lowest_epsilon` puts above the budget in nine of ten audits."""

    def accepts(errors: int) -> bool:
        return lowest_epsilon(errors, errors, samples=samples, delta=budget.delta, level=level) <= budget.epsilon

    most = bisect.bisect_left(range(samples), True, key=accepts) - 1
    if most < 0:
        return math.inf
    rate = highest_rate(most, samples, 0.95)
    return math.log((1 - rate - budget.delta) / rate)


def visible_shortfall(noise_tags: float, level: float) -> float:
    """The share of so many noise tags, on average, that the test of message counts misses in nine of ten audits."""
    found = stats.norm.isf(level / 2 / 5) + stats.norm.isf(0.1)  # the mean overall is one of five tests
    return float(found / math.sqrt(noise_tags))
