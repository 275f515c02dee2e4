"""The accountant in floating point: never below the truth, which mpmath has with digits to spare."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special

from shufflerl.errors import InvalidInputError
from shufflerl.noise import (
    BinomialNoise,
    GaussianNoise,
    Noise,
    PoissonNoise,
    UnaryNoise,
)
from shufflerl.privacy import loss as loss_module
from shufflerl.privacy.accounting import (
    Budget,
    calibrate_gaussian,
    calibrate_unary,
)
from shufflerl.privacy.loss import privacy_loss
from tests.privacy.test_accounting import DELTA

# What the accountant says in floating point is held against mpmath, with digits to spare; where it must not be below
# the truth there is no tolerance.
DIGITS = 80


def gaussian_delta(mu: Any, epsilon: float) -> Any:
    """Phi(-a) - e^epsilon Phi(-b), by definition; mu may be exact."""
    with mpmath.workdps(DIGITS):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        return (mpmath.erfc(near / mpmath.sqrt(2)) - mpmath.exp(epsilon) * mpmath.erfc(far / mpmath.sqrt(2))) / 2


def unary_delta(flip: float, epsilon: float) -> Any:
    with mpmath.workdps(DIGITS):
        return max(mpmath.mpf(0), 1 - mpmath.mpf(flip) - mpmath.exp(epsilon) * mpmath.mpf(flip)) / 2


def exact_mu(sd: float, losses: int) -> Any:
    with mpmath.workdps(DIGITS):
        return mpmath.sqrt(losses) / mpmath.mpf(sd)


EXPONENTS = st.floats(-12, 3)


@settings(max_examples=200)
@given(sd=st.floats(-3, 12), half=st.integers(1, 500), far=st.floats(0, 1))
@example(sd=0.0, half=1, far=0.0)
@example(sd=10.0, half=1, far=0.0)
@example(sd=3.0, half=11, far=0.99)
@example(sd=0.24, half=1, far=0.5)
@example(sd=-100.0, half=1, far=0.5)
def test_gaussian_delta_is_never_below_the_truth(sd: float, half: int, far: float) -> None:
    """From delta = 1 to 1e-300, from a mu of 1e-12 to thousands; and at most a relative 1e-9 above."""
    noise = GaussianNoise(10**sd)
    mu = math.sqrt(2 * half) / noise.sd
    epsilon = min(mu * (mu / 2 + 37) * far, 1e4)
    stated, truth = privacy_loss(noise, 2 * half).delta(epsilon), gaussian_delta(exact_mu(noise.sd, 2 * half), epsilon)
    assert stated >= truth
    assert stated <= truth * (1 + 1e-9)


def test_where_the_truth_is_below_all_numbers_the_least_of_them_is_stated() -> None:
    for epsilon in (60.0, 1e3, 1e9, 1e300):
        assert 0 < privacy_loss(GaussianNoise(math.sqrt(2)), 2).delta(epsilon) < 1e-300


@settings(max_examples=200)
@given(exponent=EXPONENTS, near=st.floats(-1, 1), digits=st.floats(0, 17))
@example(exponent=0.0, near=0.0, digits=17.0)
def test_unary_delta_is_never_below_the_truth(exponent: float, near: float, digits: float) -> None:
    """Also where next to nothing of it is left: flips around the one at which delta vanishes, to the last digit."""
    epsilon = 10**exponent
    flip = float(special.expit(-epsilon)) * (1 + near * 10**-digits)
    if not 0 < flip < 0.5:
        return
    stated, truth = privacy_loss(UnaryNoise(1, 3, flip), 2).delta(epsilon), unary_delta(flip, epsilon)
    assert truth <= stated <= truth + 1e-14


@settings(max_examples=100)
@given(sd=st.floats(-2, 9), half=st.integers(1, 500), exponent=st.floats(-300, -1e-9))
def test_gaussian_epsilon_is_never_below_the_truth(sd: float, half: int, exponent: float) -> None:
    """Where the epsilon stated is spent, the true delta is within the one that was given, and hardly less would do."""
    noise, delta = GaussianNoise(10**sd), 10**exponent
    epsilon, mu = privacy_loss(noise, 2 * half).epsilon(delta), exact_mu(noise.sd, 2 * half)
    assert gaussian_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon * (1 - 1e-8)) > delta * (1 - 1e-8)


@settings(max_examples=100)
@given(flip=st.floats(-300, math.log10(0.49)), delta=st.floats(-18, -0.01))
@example(flip=-308.0, delta=math.log10(0.5))
def test_unary_epsilon_is_never_below_the_truth(flip: float, delta: float) -> None:
    noise, allowed = UnaryNoise(1, 3, 10**flip), 10**delta
    epsilon = privacy_loss(noise, 2).epsilon(allowed)
    assert unary_delta(noise.flip, epsilon) <= allowed
    if epsilon > 0:
        assert unary_delta(noise.flip, epsilon * (1 - 1e-9) - 1e-14) > allowed - 1e-14


@settings(max_examples=100)
@given(epsilon=st.floats(-9, 3), delta=st.floats(-30, -0.1), half=st.integers(1, 200))
def test_what_is_calibrated_keeps_to_the_budget_exactly(epsilon: float, delta: float, half: int) -> None:
    budget = Budget(10**epsilon, 10**delta)
    noise = calibrate_gaussian(budget, 2 * half)
    assert gaussian_delta(exact_mu(noise.sd, 2 * half), budget.epsilon) <= budget.delta
    assert gaussian_delta(exact_mu(noise.sd * (1 - 1e-8), 2 * half), budget.epsilon) > budget.delta * (1 - 1e-9)
    try:
        flip = calibrate_unary(budget)
    except InvalidInputError:  # too small a budget for a report that says anything
        return
    assert unary_delta(flip, budget.epsilon) <= budget.delta


@pytest.mark.parametrize(
    "noise", [PoissonNoise(3.7), PoissonNoise(21.0), BinomialNoise(9, 0.5), BinomialNoise(60, 0.8)]
)
def test_composed_delta_is_never_below_the_truth(noise: PoissonNoise | BinomialNoise) -> None:
    """Both counters enumerated with fifty digits, down to deltas at which the accountant's own rounding shows."""
    with mpmath.workdps(50):
        if isinstance(noise, PoissonNoise):
            mean, most = mpmath.mpf(noise.mean), math.ceil(noise.mean + 14 * noise.sd + 40)
            masses = [mpmath.exp(-mean) * mean**q / mpmath.factorial(q) for q in range(most)]
        else:
            p, most = mpmath.mpf(noise.probability), noise.trials + 1
            masses = [mpmath.binomial(noise.trials, q) * p**q * (1 - p) ** (noise.trials - q) for q in range(most)]
        here, there = [*masses, mpmath.mpf(0)], [mpmath.mpf(0), *masses]
        pairs = [(a * d, b * c) for a, b in zip(here, there, strict=True) for c, d in zip(here, there, strict=True)]
        for epsilon in (0.0, 0.3, 2.5, 6.0):
            factor = mpmath.exp(epsilon)
            truth = mpmath.fsum(max(mpmath.mpf(0), one - factor * other) for one, other in pairs)
            assert privacy_loss(noise, 2).delta(epsilon) >= truth


@pytest.mark.parametrize("noise", [PoissonNoise(50.0), PoissonNoise(3e7), BinomialNoise(300, 0.3), GaussianNoise(7.0)])
@pytest.mark.parametrize("changed", [2, 22])
def test_an_epsilon_is_certified_by_the_delta_that_is_stated(noise: Noise, changed: int) -> None:
    loss = privacy_loss(noise, changed)
    for delta in 10.0 ** np.linspace(-11, -0.3, 9):
        epsilon = loss.epsilon(float(delta))
        assert math.isinf(epsilon) or loss.delta(epsilon) <= delta


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.7, 1.0, 3.0, 10.0, 0.123456])
def test_a_calibrated_budget_comes_back_as_it_was(epsilon: float) -> None:
    """Not a rounding above it, which would be printed as a whole digit more."""
    noise = calibrate_gaussian(Budget(epsilon, DELTA), 22)
    assert privacy_loss(noise, 22).epsilon(DELTA) <= epsilon
    flip = calibrate_unary(Budget(epsilon, DELTA))
    assert privacy_loss(UnaryNoise(1, 3, flip), 2).epsilon(DELTA) <= epsilon


@pytest.mark.slow
def test_special_functions_are_as_precise_as_the_accountant_takes_them_to_be() -> None:
    """Half of the error allowed for; the rest is for the roundings around them."""
    points = np.concatenate([np.linspace(-1, 40, 3001), np.geomspace(1e-12, 1, 300), np.geomspace(1, 1e3, 300)])
    with mpmath.workdps(40):
        for t in points.tolist():
            x = mpmath.mpf(float(t) / math.sqrt(2))
            exact = mpmath.exp(x * x) * mpmath.erfc(x)
            assert abs(special.erfcx(float(x)) / exact - 1) <= loss_module.MILLS_ERROR / 2
            if t >= 1:
                assert abs(special.ndtr(t) / mpmath.ncdf(t) - 1) <= loss_module.MILLS_ERROR / 2
