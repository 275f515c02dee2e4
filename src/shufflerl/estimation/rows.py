"""How often (h, x, a) was visited, from both families of counters, and how far the noise can carry that astray.

At a step where both families are asked, every visit is counted twice: once in S = sum_x' y(x') over the D next states
that can follow, of noise variance D s^2, and once in Y = y(r=0) + y(r=1), of noise variance 2 s^2. The mean of least
variance weighs each by the inverse of its own.
"""

from __future__ import annotations

import functools
import math
from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.counts import CountQuery, Release
from shufflerl.noise import (
    MAX_COUNT,
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    NoNoise,
    PoissonNoise,
    TruncatedLaplace,
    Whole,
    reach,
)

#: A weighted sum of independent counters: (how many, weight of each) per family.
Terms = tuple[tuple[int, float], ...]

_COUNTER: Terms = ((1, 1.0),)

# Bounds are at most this much, relatively, above the smallest that passes.
_TOLERANCE = 1e-4
# Cells over which one family is summed out; each is taken at its worse end, 0.02 of that family's deviation away.
_CELLS = 1024
# Distribution functions are right to this much; tails below it are left to Chernoff's bound.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Visits:
    """Estimates of N[h, x, a] and their noise variances; both are nan at steps that were not asked."""

    estimate: FloatArray
    variance: FloatArray


def visits(release: Release) -> Visits:
    """The unbiased estimate of every N_h(x, a) that a release allows.

    Both families: N = (2 S + D Y) / (D + 2), of variance 2 D s^2 / (D + 2). One family: its own sum, S or Y.
    """
    query = release.batch.table_query
    transitions, rewards = release.tables
    moved = np.zeros(rewards.shape[:-1])
    moved[:-1] = transitions.sum(axis=-1)
    paid = rewards.sum(axis=-1)
    n_successors = successors(query).astype(np.float64)
    has_moves = _asked(query, query.transition_steps)
    has_pays = _asked(query, query.reward_steps)
    cases = [has_moves & has_pays, has_moves, has_pays]
    estimate = np.select(cases, [(2 * moved + n_successors * paid) / (n_successors + 2), moved, paid], np.nan)
    copies = np.select(
        cases, [2 * n_successors / (n_successors + 2), n_successors, np.full_like(n_successors, 2.0)], np.nan
    )
    return Visits(checks.frozen(estimate), checks.frozen(copies * release.noise.variance))


def successors(query: CountQuery) -> IntArray:
    """D[h, x, a]: how many next states are counted; zero at steps whose transitions are not asked."""
    counted = np.zeros((query.horizon, query.n_states, query.n_actions), dtype=np.int64)
    steps = list(query.transition_steps)
    counted[steps] = query.n_states if query.support is None else query.support[steps].sum(axis=-1)
    return counted


def precision(noise: Noise, query: CountQuery, failure: float) -> float:
    """The paper's E: with probability 1 - failure every counter and every estimate of N is within E/4 of the truth.

    The smallest E (to a relative 1e-4) whose failures, added up over all of them, stay within `failure`. The reward
    R = y(r=1) is a counter, so it is within E/4 too, where the paper asks for E. Never below 1: without noise E = 0
    would leave rows 0/0.

    >>> from shufflerl.mdp import Problem
    >>> query = CountQuery.everything(Problem(horizon=6, n_states=4, n_actions=2, episodes=1))
    >>> round(precision(GaussianNoise(10.0), query, 0.05))
    166
    >>> precision(NoNoise(), query, 0.05)
    1.0
    """
    return _precision(noise, query, checks.real("failure", failure, above=0, below=1))


@functools.lru_cache(maxsize=256)
def _precision(noise: Noise, query: CountQuery, failure: float) -> float:
    return max(4 * joint_bound(noise, sums(query), failure), 1.0)


def sums(query: CountQuery) -> Mapping[Terms, int]:
    """All that E speaks of, by kind, with how many there are of each: every counter and every estimate of N."""
    found = Tally({_COUNTER: query.size})
    n_successors = successors(query)
    for step in sorted({*query.transition_steps, *query.reward_steps}):
        for number, rows in zip(*np.unique(n_successors[step], return_counts=True), strict=True):
            found[visit_terms(int(number), rewards=step in query.reward_steps)] += int(rows)
    return found


def visit_terms(n_successors: int, *, rewards: bool) -> Terms:
    """The estimate of one N as a weighted sum of counters: D transitions (none: 0) and, where asked, two rewards."""
    if n_successors and rewards:
        return (n_successors, 2 / (n_successors + 2)), (2, n_successors / (n_successors + 2))
    return ((2, 1.0),) if rewards else ((n_successors, 1.0),)


def joint_bound(noise: Noise, wanted: Mapping[Terms, int], failure: float) -> float:
    """The smallest t, to a relative 1e-4, at which P(|sum| > t) added up over the wanted sums is within `failure`."""
    if isinstance(noise, NoNoise):
        return 0.0
    if not isinstance(noise, GaussianNoise | Whole):
        # Its counters need not be independent: a sum is off by no more than its weights times the worst counter.
        members = sum(number * sum(copies for copies, _ in terms) for terms, number in wanted.items())
        longest = max(sum(copies * weight for copies, weight in terms) for terms in wanted)
        return longest * noise.bound(failure / members)
    law = noise
    if isinstance(law, NoiseSum) and all(isinstance(part, PoissonNoise) for part in law.parts):
        law = PoissonNoise(law.mean)

    def passes(distance: float) -> bool:
        return sum(number * tail(law, terms, distance) for terms, number in wanted.items()) <= failure

    low, high = 0.0, law.sd
    while not passes(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE * max(high, law.sd):
        middle = (low + high) / 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def tail(noise: GaussianNoise | Whole, terms: Terms, distance: float) -> float:
    """P(|sum of weighted independent noises| > distance), or a little more: exact for Gaussian noise.

    For sums of bits the smaller of two upper bounds: the distribution function, with one family summed out, and
    Chernoff's, which still holds where that function is lost in rounding. For other laws of whole counts Chernoff's.
    """
    if isinstance(noise, GaussianNoise):
        sd = noise.sd * math.sqrt(sum(copies * weight**2 for copies, weight in terms))
        return float(2 * special.ndtr(-distance / sd))
    bound = min(1.0, chernoff(noise, terms, distance))
    if not isinstance(noise, PoissonNoise | BinomialNoise):
        return bound
    size = noise.trials if isinstance(noise, BinomialNoise) else noise.mean
    if bound > _ROUNDING and size * max(copies for copies, _ in terms) <= MAX_COUNT:
        bound = min(bound, _summed_out(noise, terms, distance) + _ROUNDING)
    return bound


def chernoff(noise: Whole, terms: Terms, distance: float) -> float:
    """P(sum > t) <= exp(K(s) - s t) for every s > 0, K the sum's cumulant generating function; likewise P(sum < -t).

    Every s gives a bound, so taking the best of a grid around Bernstein's s = t / (variance + weight t / 3) can lose
    nothing but tightness: with steps of 4%, about 0.05% of the exponent. Of Laplace noise only an s below 1/scale gives
    one: there the grid is of these.
    """
    variance = noise.variance * sum(copies * weight**2 for copies, weight in terms)
    steepest = max(weight for _, weight in terms)
    s = distance / (variance + steepest * distance / 3) * np.geomspace(1 / 4, 64, 129)
    parts = noise.parts if isinstance(noise, NoiseSum) else (noise,)
    if scales := [part.scale for part in parts if isinstance(part, DiscreteLaplace | TruncatedLaplace)]:
        s = np.arange(1, 257) / 257 / (steepest * max(scales))
    exponents = [sum(copies * _cumulants(noise, sign * weight * s) for copies, weight in terms) for sign in (1.0, -1.0)]
    return float(sum(np.exp(np.minimum(exponent - s * distance, 0.0).min()) for exponent in exponents))


def _cumulants(noise: Whole, s: FloatArray) -> FloatArray:
    """ln E exp(s noise), exactly; of Laplace noise, as if it were not cut, which is more."""
    if isinstance(noise, NoiseSum):
        return np.asarray(sum(_cumulants(part, s) for part in noise.parts))
    if isinstance(noise, DiscreteLaplace | TruncatedLaplace):
        rate = 1 / noise.scale  # (1-p)^2 / ((1 - p e^s) (1 - p e^-s)), p = e^-rate
        return np.asarray(2 * np.log(-np.expm1(-rate)) - np.log(np.expm1(s - rate) * np.expm1(-s - rate)))
    if isinstance(noise, PoissonNoise):
        return np.asarray(noise.mean * (np.expm1(s) - s))
    return np.asarray(noise.trials * (np.log1p(noise.probability * np.expm1(s)) - noise.probability * s))


def _summed_out(noise: PoissonNoise | BinomialNoise, terms: Terms, distance: float) -> float:
    """P(|a U + b V| > t) <= sum over cells of V of P(cell) P(U beyond, with V at the end of its cell nearer to t)."""
    (copies, a), *others = terms
    first = noise.repeated(copies)
    if not others:
        return float(1 - first.cdf(distance / a) + first.cdf(-distance / a))
    ((other_copies, b),) = others
    second = noise.repeated(other_copies)
    span = reach(second.variance, 1e-16)
    edges = np.linspace(-span, span, _CELLS + 1)
    # Cell i lies between edges[i-1] and edges[i]; the first and the last are open and count in full where they must.
    cells = np.diff(second.cdf(edges), prepend=0.0, append=1.0)
    above = np.append(1 - first.cdf((distance - b * edges) / a), 1.0)
    below = np.insert(first.cdf((-distance - b * edges) / a), 0, 1.0)
    return float(cells @ (above + below))


def _asked(query: CountQuery, steps: tuple[int, ...]) -> BoolArray:
    """Whether a step is among the given ones, shaped to go with [h, x, a]."""
    asked = np.zeros((query.horizon, 1, 1), dtype=np.bool_)
    asked[list(steps)] = True
    return np.broadcast_to(asked, (query.horizon, query.n_states, query.n_actions))
