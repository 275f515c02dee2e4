"""Noise laws: against exact enumeration where they are small, against summed logarithms where they are huge."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    NoNoise,
    Part,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
    reach,
)

Lattice = PoissonNoise | BinomialNoise

LAWS: list[Noise] = [
    NoNoise(),
    PoissonNoise(0.3),
    PoissonNoise(33.3),
    PoissonNoise(1e15),
    BinomialNoise(1, 0.5),
    BinomialNoise(500, 0.03),
    BinomialNoise(10**17, 0.5),
    BinomialNoise(10**17, 1e-14),
    GaussianNoise(2.5),
    UnaryNoise(40, 4, 0.2113),
    DiscreteLaplace(0.4),
    DiscreteLaplace(16.7),
    DiscreteLaplace(1e12),
    TruncatedLaplace(2.0, 5),
    TruncatedLaplace(4.0, 45),
    TruncatedLaplace(1e9, 10**10),
    NoiseSum((PoissonNoise(7.3), DiscreteLaplace(2.0))),
    NoiseSum((TruncatedLaplace(2.0, 23), DiscreteLaplace(2.0))),
    NoiseSum((PoissonNoise(1e6), PoissonNoise(1e6))),
]

MEANS = st.floats(0.05, 300.0)
FAILURES = st.floats(-15, -0.1).map(lambda exponent: 10**exponent)


def pmf(law: Lattice | TruncatedLaplace) -> FloatArray:
    """Probabilities of 0, 1, 2, ... by the textbook formula, far into the tail."""
    if isinstance(law, TruncatedLaplace):
        weights = [math.exp(-abs(z) / law.scale) for z in range(-law.shift, law.shift + 1)]
        return np.array(weights) / math.fsum(weights)
    if isinstance(law, PoissonNoise):
        counts = range(math.ceil(law.mean + reach(law.variance, 1e-40)) + 20)
        logs = [q * math.log(law.mean) - law.mean - math.lgamma(q + 1) for q in counts]
        return np.array([math.exp(log) for log in logs])
    p = Fraction(law.probability)
    exact = [math.comb(law.trials, q) * p**q * (1 - p) ** (law.trials - q) for q in range(law.trials + 1)]
    return np.array([float(mass) for mass in exact])


def outside(law: Lattice | TruncatedLaplace, distance: float) -> float:
    """P(|noise| > distance), summed from the smallest term up."""
    masses = pmf(law)
    noise = np.arange(len(masses)) - law.mean
    return math.fsum(masses[np.abs(noise) > distance])


def test_all_laws_share_the_interface() -> None:
    for law in LAWS:
        assert law.sd == pytest.approx(math.sqrt(law.variance), rel=1e-14)
        assert law.repeated(1) == law
        assert law.repeated(3).variance == pytest.approx(3 * law.variance, rel=1e-14)
        assert law.cdf([[0.0, 1.0, 2.0]]).shape == (1, 3)
        assert law.cdf(-20 * law.sd - 60) < 1e-9
        assert law.cdf(30 * law.sd + 60) == pytest.approx(1.0, abs=1e-14)
        assert (np.diff(law.cdf(np.linspace(-6 * law.sd - 1, 6 * law.sd + 1, 401))) >= 0).all()


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_draws_follow_the_declared_law(law: Noise) -> None:
    draws = 20_000
    sample = np.sort(law.sample(np.random.default_rng(7), draws))
    # Dvoretzky-Kiefer-Wolfowitz: the empirical distribution strays further with probability 1e-9.
    radius = math.sqrt(math.log(2 / 1e-9) / (2 * draws))
    empirical = np.searchsorted(sample, sample, side="right") / draws
    assert np.abs(empirical - law.cdf(sample)).max() <= radius
    assert abs(sample.mean()) <= 6.2 * law.sd / math.sqrt(draws)
    assert law.sample(np.random.default_rng(7), (2, 3)).shape == (2, 3)
    np.testing.assert_array_equal(
        law.sample(np.random.default_rng(7), draws), law.sample(np.random.default_rng(7), draws)
    )


WIDE = [PoissonNoise(mean) for mean in (4999.5, 5001.0, 1e4, 1e6, 1e9, 1e12)]
WIDE_BITS = [
    BinomialNoise(20_002, 0.5),
    BinomialNoise(10**5, 0.3),
    BinomialNoise(10**9, 1e-4),
    BinomialNoise(10**13, 0.5),
]


@pytest.mark.parametrize("law", [*WIDE, *WIDE_BITS], ids=repr)
def test_draws_of_wide_laws_follow_them(law: Lattice) -> None:
    """Chi-square in fifty cells and dispersion, against SciPy, each failing by chance with probability 1e-6."""
    draws, level = 20_000, 1e-6
    peer = stats.poisson(law.mean) if isinstance(law, PoissonNoise) else stats.binom(law.trials, law.probability)
    noise = law.sample(np.random.default_rng(5), draws)
    counts = np.rint(noise + law.mean)
    np.testing.assert_allclose(counts - law.mean, noise, atol=1e-3)
    # Of variances beyond a million the cells are the limit's: SciPy loses digits there, the draws do not.
    edges = np.arange(1, 50) / 50
    if law.variance > 2e6:
        ends, masses = law.sd * stats.norm.ppf(edges), np.full(50, 1 / 50)
    else:
        ends = np.unique(peer.ppf(edges)) - law.mean
        masses = np.diff(peer.cdf(ends + law.mean), prepend=0.0, append=1.0)
    observed = np.bincount(np.searchsorted(ends + 1e-6, noise), minlength=len(masses))
    assert stats.chisquare(observed, draws * masses).pvalue > level
    spread = (noise**2).sum() / law.variance
    assert min(stats.chi2.sf(spread, draws), stats.chi2.cdf(spread, draws)) > level / 2


@pytest.mark.parametrize("law", [PoissonNoise(0.3), PoissonNoise(33.3), BinomialNoise(1, 0.5), BinomialNoise(60, 0.9)])
def test_distribution_function_is_exact(law: Lattice) -> None:
    masses = pmf(law)[:120]
    noise = np.arange(len(masses)) - law.mean
    np.testing.assert_allclose(law.cdf(noise), np.cumsum(masses), rtol=1e-11)
    np.testing.assert_allclose(law.cdf(noise + 0.4), np.cumsum(masses), rtol=1e-11)
    np.testing.assert_allclose(law.cdf(noise - 0.4), np.cumsum(masses) - masses, rtol=1e-9, atol=1e-15)
    assert law.cdf(-law.mean - 0.1) == 0.0


def test_a_drawn_value_counts_itself_in_spite_of_rounding() -> None:
    rng = np.random.default_rng(3)
    hard = 0
    for mean in rng.uniform(0.05, 300, 50):
        drawn = np.nextafter(np.arange(600) - mean, -math.inf)
        hard += int((drawn + mean < np.arange(600)).sum())
        np.testing.assert_array_equal(PoissonNoise(mean).cdf(drawn), PoissonNoise(mean).cdf(drawn + 0.4))
    assert hard > 100, "the sum must have been rounded down often enough"


@settings(deadline=None)
@given(mean=MEANS, failure=FAILURES)
def test_poisson_bound_is_the_smallest_that_holds(mean: float, failure: float) -> None:
    assert_smallest(PoissonNoise(mean), failure)


@settings(deadline=None, max_examples=50)
@given(trials=st.integers(1, 150), probability=st.floats(0.01, 0.99), failure=FAILURES)
def test_binomial_bound_is_the_smallest_that_holds(trials: int, probability: float, failure: float) -> None:
    assert_smallest(BinomialNoise(trials, probability), failure)


@settings(deadline=None)
@given(scale=st.floats(0.05, 40), scales=st.floats(1, 30), failure=FAILURES)
def test_bounds_of_laplace_laws_are_the_smallest_that_hold(scale: float, scales: float, failure: float) -> None:
    assert_smallest(TruncatedLaplace(scale, math.ceil(scale * scales)), failure)
    bound, p = DiscreteLaplace(scale).bound(failure), math.exp(-1 / scale)
    assert 2 * p ** (bound + 1) / (1 + p) <= failure * (1 + 1e-9)
    assert bound == 0 or 2 * p**bound / (1 + p) > failure * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(scale=st.floats(0.1, 60), scales=st.floats(1, 40))
def test_laplace_laws_are_exact(scale: float, scales: float) -> None:
    """Mean, variance and distribution function, from the probabilities summed one by one."""
    cut = TruncatedLaplace(scale, math.ceil(scale * scales))
    whole = TruncatedLaplace(scale, math.ceil(scale * 45))  # 1e-19 is left
    for law, same in ((cut, cut), (DiscreteLaplace(scale), whole)):
        masses, noise = pmf(same), np.arange(-same.shift, same.shift + 1, dtype=np.float64)
        assert law.variance == pytest.approx(float(noise**2 @ masses), rel=1e-12)
        np.testing.assert_allclose(law.cdf(noise), np.cumsum(masses), rtol=1e-9, atol=1e-19)
        np.testing.assert_array_equal(law.cdf(noise + 0.4), law.cdf(noise))
        tails = law.tails(np.asarray(noise + law.mean))[1]
        np.testing.assert_allclose(tails[:-1], np.cumsum(masses[::-1])[-2::-1], rtol=1e-9, atol=1e-18)
    assert cut.cdf(-cut.shift - 0.1) == 0.0
    assert cut.cdf(cut.shift) == 1.0


SUMS: list[tuple[Part, ...]] = [
    (PoissonNoise(3.7), PoissonNoise(12.25)),
    (PoissonNoise(9.5), TruncatedLaplace(1.3, 9)),
    (TruncatedLaplace(2.0, 23), TruncatedLaplace(2.0, 60)),
    (BinomialNoise(40, 0.3), PoissonNoise(0.4), TruncatedLaplace(0.4, 5)),
]


@pytest.mark.parametrize("parts", SUMS, ids=str)
def test_a_sum_is_the_convolution_of_its_parts(parts: tuple[Part, ...]) -> None:
    law, masses = NoiseSum(parts), np.ones(1)
    for part in parts:
        assert not isinstance(part, DiscreteLaplace)
        masses = np.convolve(masses, pmf(part))
    noise = np.arange(len(masses)) - law.mean
    assert law.mean == pytest.approx(sum(part.mean for part in parts), rel=1e-14)
    assert law.variance == pytest.approx(float(noise**2 @ masses), rel=1e-10)
    np.testing.assert_allclose(law.cdf(noise), np.cumsum(masses), rtol=1e-9, atol=2e-17)
    for failure in (0.3, 0.05, 1e-6, 1e-12):
        bound = law.bound(failure)
        assert math.fsum(masses[np.abs(noise) > bound + 1e-9]) <= failure
        assert math.fsum(masses[np.abs(noise) > bound - 1e-6]) > failure * (1 - 1e-5)


def test_a_wide_sum_is_known_to_a_fraction_of_its_deviation() -> None:
    """The sum of Poisson counts is Poisson: the bound holds, and is hardly larger."""
    law, exact = NoiseSum((PoissonNoise(3e6), PoissonNoise(1e6))), PoissonNoise(4e6)
    distances = law.sd * np.linspace(-5, 5, 41)
    np.testing.assert_allclose(law.cdf(distances), exact.cdf(distances), atol=1e-3)
    for failure in (0.05, 1e-6, 1e-12):
        assert exact.bound(failure) <= law.bound(failure) <= exact.bound(failure) + law.sd / 100


def assert_smallest(law: Lattice | TruncatedLaplace, failure: float) -> None:
    bound = law.bound(failure)
    assert outside(law, bound) <= failure * (1 + 1e-9)
    # Every smaller t has the same mass outside as some smaller distance the noise can take, or no mass inside at all.
    distances = np.abs(np.arange(math.ceil(law.mean + bound) + 2) - law.mean)
    smaller = distances[distances < bound * (1 - 1e-12)]
    if smaller.size:
        assert outside(law, float(smaller.max())) > failure * (1 - 1e-9)


@pytest.mark.parametrize("mean", [1e2, 12.5, 40.0])
def test_bound_at_whole_and_half_means(mean: float) -> None:
    for failure in (0.5, 0.05, 1e-6):
        assert_smallest(PoissonNoise(mean), failure)


@pytest.mark.parametrize(
    "law",
    [
        PoissonNoise(9e4),
        PoissonNoise(1.1e5),  # the other side of the switch to the asymptotic expansion
        PoissonNoise(1e6 + 0.25),
        PoissonNoise(1e8),  # SciPy's own upper tail is 28% too light here
        BinomialNoise(10**17, 1e-9),
        BinomialNoise(10**10, 0.5),
    ],
    ids=repr,
)
def test_tails_of_large_laws(law: Lattice) -> None:
    """Against probabilities built from their exact ratios and summed."""
    if isinstance(law, PoissonNoise):
        mean, odds, trials = Fraction(law.mean), 0.0, 0
    else:
        trials, p = law.trials, Fraction(law.probability)
        mean, odds = trials * p, float(p / (1 - p))
    centre, width = round(mean), math.ceil(14 * law.sd)
    steps = np.arange(-width + 1, width + 1)
    if isinstance(law, PoissonNoise):
        logs = -np.log1p((steps + float(centre - mean)) / law.mean)
    else:
        logs = np.log1p((steps + float(centre - mean)) / law.mean)
        logs = np.log1p((1 - steps - float(centre - mean)) / (law.mean / odds)) - logs
    weights = np.concatenate(([0.0], np.cumsum(logs)))
    masses = np.exp(weights - weights.max())
    masses /= masses.sum()
    noise = np.arange(-width, width + 1) + float(centre - mean)

    for near in (-2.0, -1.0, 0.0, 1.0):
        assert law.cdf(near) == pytest.approx(masses[noise <= near + 1e-6].sum(), rel=1e-8)
    for deviations in (1.0, 3.0, 6.0, 7.5):
        below = noise <= -deviations * law.sd
        assert law.cdf(-deviations * law.sd) == pytest.approx(masses[below].sum(), rel=1e-8)
    for failure in (0.05, 1e-6, 1e-9, 1e-15):
        bound = law.bound(failure)
        assert masses[np.abs(noise) > bound + 1e-6].sum() <= failure * (1 + 1e-8)
        assert masses[np.abs(noise) > bound - 1e-3].sum() > failure * (1 - 1e-8)


@pytest.mark.parametrize("law", [PoissonNoise(1e15), BinomialNoise(10**17, 0.5), BinomialNoise(10**17, 1e-3)], ids=repr)
@pytest.mark.parametrize("failure", [0.05, 1e-6, 1e-15])
def test_huge_laws_meet_their_gaussian_limit(law: Noise, failure: float) -> None:
    assert law.bound(failure) == pytest.approx(GaussianNoise(law.sd).bound(failure), rel=1e-6)


@pytest.mark.parametrize("failure", [0.5, 0.05, 1e-6, 1e-15])
def test_gaussian_bound_is_exact(failure: float) -> None:
    law = GaussianNoise(3.0)
    assert 2 * law.cdf(-law.bound(failure)) == pytest.approx(failure, rel=1e-12)


@pytest.mark.parametrize(("groups", "flip"), [(1, 0.3), (3, 0.05), (3, 0.2), (11, 0.45)])
def test_unary_variance_and_bound_hold_for_every_count_by_enumeration(groups: int, flip: float) -> None:
    """A user reports one of the groups, and then a fair coin where it touched the counter, else a flipped bit."""
    users = 12
    one = UnaryNoise(1, groups, flip)

    def errors(touched: bool) -> dict[float, float]:
        chance = 0.5 if touched else flip
        values = ((one.weight * (1 - flip), chance / groups), (-one.weight * flip, (1 - chance) / groups))
        found: dict[float, float] = {}
        for value, mass in (*values, (0.0, 1 - 1 / groups)):
            found[value - touched] = found.get(value - touched, 0.0) + mass
        return found

    variances = []
    for touched in (False, True):
        law = errors(touched)
        assert sum(value * mass for value, mass in law.items()) == pytest.approx(0.0, abs=1e-12)
        variances.append(sum(value**2 * mass for value, mass in law.items()))
    assert one.variance == pytest.approx(max(variances), rel=1e-12)
    assert UnaryNoise(users, groups, flip).variance == pytest.approx(users * max(variances), rel=1e-12)
    for count in (0, 5, users):
        sums = {0.0: 1.0}
        for user in range(users):
            law, added = errors(user < count), dict[float, float]()
            for (total, mass), (value, chance) in itertools.product(sums.items(), law.items()):
                key = round(total + value, 9)
                added[key] = added.get(key, 0.0) + mass * chance
            sums = added
        for failure in (0.3, 0.01, 1e-6):
            bound = UnaryNoise(users, groups, flip).bound(failure)
            assert sum(mass for value, mass in sums.items() if abs(value) > bound + 1e-6) <= failure
            assert bound == pytest.approx(one.weight * reach(users * max(variances) / one.weight**2, failure))


@pytest.mark.parametrize("law", [PoissonNoise(1.3), BinomialNoise(5, 0.2), TruncatedLaplace(1.5, 6)])
def test_repeated_is_the_sum_of_copies(law: Lattice | TruncatedLaplace) -> None:
    masses = pmf(law)
    summed = np.convolve(np.convolve(masses, masses), masses)[:30]
    noise = np.arange(len(summed)) - 3 * law.mean
    np.testing.assert_allclose(law.repeated(3).cdf(noise), np.cumsum(summed), rtol=1e-11)


def test_a_table_of_draws_is_that_of_its_rows() -> None:
    """Noise drawn ahead for many batches is the noise of the batches one by one."""
    for law in LAWS:
        if isinstance(law, UnaryNoise):  # drawn from the counts, never ahead
            continue
        table = law.sample(np.random.default_rng(2), (4, 7))
        rng = np.random.default_rng(2)
        np.testing.assert_array_equal(table, [law.sample(rng, 7) for _ in range(4)])


@given(variance=st.floats(1e-6, 1e15), failure=FAILURES)
def test_reach_holds_wherever_the_bound_is_known(variance: float, failure: float) -> None:
    assert reach(variance, failure) >= PoissonNoise(variance).bound(failure) - 1


def test_bound_holds_at_its_rate_on_draws() -> None:
    law = PoissonNoise(33.3)
    draws = law.sample(np.random.default_rng(11), 200_000)
    for failure in (0.2, 0.02):
        expected = outside(law, law.bound(failure))
        assert expected <= failure
        assert abs((np.abs(draws) > law.bound(failure)).mean() - expected) <= 6 * math.sqrt(expected / len(draws))


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, True, "one", None, 1e19])
def test_bad_means_and_deviations_are_refused(bad: object) -> None:
    with pytest.raises(InvalidInputError, match="mean of the noise"):
        PoissonNoise(bad)  # type: ignore[arg-type]
    if bad != 1e19:
        with pytest.raises(InvalidInputError, match="sd of the noise"):
            GaussianNoise(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trials", "probability"), [(0, 0.5), (-3, 0.5), (2.0, 0.5), (10**19, 0.5), (5, 0.0), (5, 1.0), (5, math.nan)]
)
def test_bad_binomials_are_refused(trials: object, probability: float) -> None:
    with pytest.raises(InvalidInputError, match=r"trials|probability"):
        BinomialNoise(trials, probability)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0, -1.0, 0.01, math.inf, math.nan, "one", 1e16])
def test_bad_scales_are_refused(scale: Any) -> None:
    with pytest.raises(InvalidInputError, match="scale of the noise"):
        DiscreteLaplace(scale)
    with pytest.raises(InvalidInputError, match="scale of the noise"):
        TruncatedLaplace(scale, 10)


def test_cuts_that_leave_no_law_and_sums_of_nothing_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="shift of at least the scale"):
        TruncatedLaplace(3.5, 3)
    for shift in (0, 1.5, 2**60):
        with pytest.raises(InvalidInputError, match="shift is"):
            TruncatedLaplace(0.5, shift)  # type: ignore[arg-type]
    for groups in (0, 1.5):
        with pytest.raises(InvalidInputError, match="groups is"):
            UnaryNoise(1, groups, 0.3)  # type: ignore[arg-type]
    for parts in ((), (GaussianNoise(1.0),), (NoNoise(), PoissonNoise(1.0))):
        with pytest.raises(InvalidInputError, match="parts of the noise"):
            NoiseSum(parts)  # type: ignore[arg-type]


def test_bad_failures_and_times_are_refused() -> None:
    for law, failure in itertools.product(LAWS, (0.0, 1.0, -0.1, math.nan)):
        with pytest.raises(InvalidInputError, match="failure"):
            law.bound(failure)
    for law, times in itertools.product(LAWS, (0, -1, 1.5)):
        with pytest.raises(InvalidInputError, match="times"):
            law.repeated(times)  # type: ignore[arg-type]
