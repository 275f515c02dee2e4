"""The accountant: against brute-force enumeration, an independent Fourier accountant, and the Gaussian limit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable
from decimal import Decimal

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from shufflerl import privatizers
from shufflerl.arrays import FloatArray
from shufflerl.errors import AccountingError, InvalidInputError, PrivacyWarning
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoNoise,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
)
from shufflerl.privacy import loss as loss_module
from shufflerl.privacy.accounting import (
    Budget,
    calibrate,
    calibrate_central,
    calibrate_dummies,
    calibrate_gaussian,
    calibrate_laplace,
    calibrate_unary,
    paper_noise,
    paper_tau,
    uncut,
    warn_if_weak,
)
from shufflerl.privacy.loss import NUMERIC_FLOOR, PrivacyLoss, privacy_loss
from tests.support.examples import random_mdp

Lattice = PoissonNoise | BinomialNoise | DiscreteLaplace | TruncatedLaplace

HORIZON, DELTA = 6, 1e-5
FULL_RELEASE = 4 * HORIZON - 2  # transitions of all but the last layer, rewards of all


def pmf(noise: Lattice) -> FloatArray:
    """Probabilities of 0, 1, 2, ..., as far as they matter, and one zero beyond; of uncut Laplace noise, moved up."""
    if isinstance(noise, DiscreteLaplace | TruncatedLaplace):
        furthest = noise.shift if isinstance(noise, TruncatedLaplace) else math.ceil(60 * noise.scale)
        weights = np.exp(-np.abs(np.arange(-furthest, furthest + 1)) / noise.scale)
        return np.append(weights / weights.sum(), 0.0)
    counts = np.arange(math.ceil(noise.mean + 12 * noise.sd + 30))
    if isinstance(noise, PoissonNoise):
        return np.append(stats.poisson.pmf(counts, noise.mean), 0.0)
    return np.append(stats.binom.pmf(counts[: noise.trials + 1], noise.trials, noise.probability), 0.0)


@functools.cache
def transcripts(noise: Lattice, changed: int) -> tuple[FloatArray, FloatArray]:
    """Probabilities of every joint value of the changed counters, under the data and under its neighbour.

    Nothing of the accountant is used: half of the counters are one higher in the neighbour, half one lower.
    """
    masses = pmf(noise)
    shifted = np.append(0.0, masses[:-1])
    data, neighbour = np.ones(1), np.ones(1)
    for _ in range(changed // 2):
        for here, there in ((masses, shifted), (shifted, masses)):
            data = np.multiply.outer(data, here).ravel()
            neighbour = np.multiply.outer(neighbour, there).ravel()
            possible = data + neighbour > 1e-26
            data, neighbour = data[possible], neighbour[possible]
    return data, neighbour


def true_delta(data: FloatArray, neighbour: FloatArray, epsilon: float) -> float:
    return float(np.maximum(data - math.exp(epsilon) * neighbour, 0.0).sum())


def fourier_deltas(noise: Lattice, changed: int, epsilons: FloatArray) -> list[float]:
    """Delta = E[(1 - e^(epsilon - loss))+] as a Fourier series: no grid of losses, every atom where it is.

    The function of the loss is continued with a period that holds the composed loss; its coefficients have a closed
    form, and what is expected of each term is the characteristic function of one loss to the power of their number.
    """
    masses = pmf(noise)
    masses = masses[masses > 1e-22]
    ratios = np.diff(np.log(masses))
    period = 44 * math.sqrt(changed) / noise.sd
    frequencies = 2 * math.pi * np.arange(4001) / period
    down = np.exp(1j * np.multiply.outer(frequencies, ratios)) @ masses[1:]
    up = np.exp(-1j * np.multiply.outer(frequencies, ratios)) @ masses[:-1]
    characteristic = (down * up) ** (changed // 2)
    assert abs(characteristic[-1]) < 1e-4, "the series must have converged"
    infinite = 1 - (masses[1:].sum() * masses[:-1].sum()) ** (changed // 2)

    def delta(epsilon: float) -> float:
        room = period / 2 - epsilon
        turn = np.exp(-1j * frequencies * epsilon)
        whole = np.append(room, turn[1:] * -np.expm1(-1j * frequencies[1:] * room) / (1j * frequencies[1:]))
        decay = turn * -np.expm1(-(1 + 1j * frequencies) * room) / (1 + 1j * frequencies)
        terms = ((whole - decay) * characteristic).real / period
        return float(infinite + terms[0] + 2 * terms[1:].sum())

    return [delta(epsilon) for epsilon in epsilons]


SMALL: list[tuple[Lattice, int]] = [
    (PoissonNoise(3.7), 2),
    (PoissonNoise(12.25), 2),
    (PoissonNoise(60.0), 2),
    (BinomialNoise(9, 0.5), 2),
    (BinomialNoise(200, 0.1), 2),
    (BinomialNoise(90, 0.8), 2),
    (PoissonNoise(9.5), 4),
    (BinomialNoise(30, 0.4), 4),
    (DiscreteLaplace(2.0), 2),
    (DiscreteLaplace(0.7), 4),
    (TruncatedLaplace(2.0, 23), 2),
    (TruncatedLaplace(1.5, 4), 2),
    (TruncatedLaplace(0.8, 10), 4),
]


@pytest.mark.parametrize(("noise", "changed"), SMALL, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.5, 1.0, 2.0, 4.0])
def test_matches_exact_enumeration_and_never_falls_below(noise: Lattice, changed: int, epsilon: float) -> None:
    loss = privacy_loss(noise, changed)
    truth = true_delta(*transcripts(noise, changed), epsilon)
    assert loss.delta(epsilon) >= truth
    assert loss.delta(epsilon) == pytest.approx(truth, rel=1e-3, abs=1e-14)
    first, last = pmf(noise)[[0, -2]]
    impossible = 1 - ((1 - first) * (1 - last)) ** (changed // 2)
    if epsilon > 0 and truth > max(1.01 * impossible, NUMERIC_FLOOR):  # nearer to them delta says nothing of epsilon
        assert epsilon * (1 - 1e-9) <= loss.epsilon(truth) <= 1.01 * epsilon


@pytest.mark.parametrize(("noise", "changed"), SMALL, ids=str)
def test_both_directions_of_the_neighbouring_relation_cost_the_same(noise: Lattice, changed: int) -> None:
    data, neighbour = transcripts(noise, changed)
    for epsilon in (0.2, 1.0):
        assert true_delta(data, neighbour, epsilon) == pytest.approx(true_delta(neighbour, data, epsilon), rel=1e-9)


def test_a_single_direction_would_not_be_symmetric() -> None:
    masses = pmf(PoissonNoise(12.25))
    shifted = np.append(0.0, masses[:-1])
    assert true_delta(masses, shifted, 1.0) != pytest.approx(true_delta(shifted, masses, 1.0), rel=0.1)


@pytest.mark.parametrize(
    ("noise", "changed"),
    [
        (PoissonNoise(307.1), FULL_RELEASE),
        (PoissonNoise(88.0), FULL_RELEASE),
        (BinomialNoise(800, 0.2), FULL_RELEASE),
        (BinomialNoise(10**6, 4e-4), FULL_RELEASE),
        (PoissonNoise(100.0), 398),
    ],
    ids=str,
)
def test_matches_an_independent_fourier_accountant(noise: Lattice, changed: int) -> None:
    loss = privacy_loss(noise, changed)
    epsilons = np.array([0.4, 1.7, 3.8]) * math.sqrt(changed) / noise.sd
    for epsilon, truth in zip(epsilons, fourier_deltas(noise, changed, epsilons), strict=True):
        assert 1e-6 < truth < 0.7
        assert truth <= loss.delta(epsilon) <= truth * (1 + 2e-4)
        assert epsilon <= loss.epsilon(truth) <= epsilon * (1 + 2e-4)


@pytest.mark.parametrize(("mean", "changed"), [(33.6, 2), (306.0, 22), (5500.0, 198)])
def test_rounding_of_the_composition_stays_within_its_allowance(mean: float, changed: int) -> None:
    """Direct convolution of positive numbers has no cancellation, so it shows what the Fourier transform loses.

    The peer lets nobody read the masses on its grid, so its attributes are read here.
    """
    noise = PoissonNoise(mean)
    gap = 1 / noise.sd / (5 if changed > FULL_RELEASE else 50)
    masses, down, up = loss_module.outcome_losses(noise)
    pmfs = [loss_module.connected_dots(masses, values, gap) for values in (down, up)]
    exact = np.ones(1)
    for each in pmfs:
        power, times = each._probs, changed // 2
        while times:
            if times % 2:
                exact = np.convolve(exact, power)
            times //= 2
            if times:
                power = np.convolve(power, power)
    lowest = (pmfs[0]._lower_loss + pmfs[1]._lower_loss) * (changed // 2)
    losses = (np.arange(len(exact)) + lowest) * gap
    composed = pmfs[0].self_compose(changed // 2, 1e-16).compose(pmfs[1].self_compose(changed // 2, 1e-16))
    for epsilon in np.linspace(0, 9, 19) * math.sqrt(changed) / noise.sd:
        high = losses > epsilon
        infinite = 1 - ((1 - pmfs[0]._infinity_mass) * (1 - pmfs[1]._infinity_mass)) ** (changed // 2)
        truth = infinite + float((exact[high] * -np.expm1(epsilon - losses[high])).sum())
        error = abs(float(composed.get_delta_for_epsilon(float(epsilon))) - truth)
        assert error <= loss_module.rounding(changed) / 2 + 4e-16


@pytest.mark.parametrize("changed", [2, 398])
@pytest.mark.parametrize("noise", [PoissonNoise(1e12), BinomialNoise(4 * 10**12, 0.5), BinomialNoise(10**17, 1e-5)])
def test_huge_noise_meets_its_gaussian_limit_from_above(noise: Noise, changed: int) -> None:
    loss = privacy_loss(noise, changed)
    limit = privacy_loss(GaussianNoise(noise.sd), changed)
    for delta in (1e-7, 1e-9):
        assert 1 <= loss.epsilon(delta) / limit.epsilon(delta) <= 1.01 or limit.epsilon(delta) == 0 == loss.epsilon(
            delta
        )


def test_lumping_outcomes_into_blocks_only_adds_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    laws: list[Noise] = [PoissonNoise(1e6), BinomialNoise(10**7, 0.2)]
    for noise, changed in itertools.product(laws, (2, 22)):
        exact = privacy_loss(noise, changed)
        with monkeypatch.context() as patch:
            patch.setattr(loss_module, "_BLOCKS_PER_DEVIATION", 250)
            lumped = privacy_loss.__wrapped__(noise, changed)  # past the cache
        for epsilon in np.array([0.0, 1.0, 3.0, 5.0]) * math.sqrt(changed) / noise.sd:
            assert exact.delta(epsilon) < lumped.delta(epsilon) < 1.2 * exact.delta(epsilon)


@pytest.mark.parametrize(("changed", "sd"), [(2, 0.7), (22, 17.5), (22, 4.0), (398, 4800.0)])
def test_gaussian_loss_agrees_with_the_peer(changed: int, sd: float) -> None:
    ours = privacy_loss(GaussianNoise(sd), changed)
    peer = privacy_loss_mechanism.GaussianPrivacyLoss(sd, sensitivity=math.sqrt(changed))
    for epsilon in (0.0, 0.01, 0.3, 1.0, 4.0):
        assert ours.delta(epsilon) == pytest.approx(peer.get_delta_for_epsilon(epsilon), rel=1e-7, abs=1e-13)
    for delta in (1e-3, 1e-5, 1e-9):
        assert peer.get_delta_for_epsilon(ours.epsilon(delta)) == pytest.approx(delta, rel=1e-5)


def test_gaussian_delta_keeps_its_digits_far_out() -> None:
    """delta(eps) = E[(1 - e^(eps - L))+], L ~ Normal(mu^2/2, mu^2), integrated where nothing cancels."""
    mu, epsilon = 0.3, 4.0
    losses = np.linspace(epsilon, epsilon + 3, 400_001)
    density = np.exp(-(((losses - mu**2 / 2) / mu) ** 2) / 2) / (mu * math.sqrt(2 * math.pi))
    truth = np.trapezoid(density * -np.expm1(epsilon - losses), losses)
    assert truth < 1e-38
    assert privacy_loss(GaussianNoise(1.0), 2).delta(0.0) > 0.5
    assert privacy_loss(GaussianNoise(math.sqrt(2) / mu), 2).delta(epsilon) == pytest.approx(truth, rel=1e-6)


def test_no_noise_is_no_privacy() -> None:
    loss = privacy_loss(NoNoise(), 2)
    assert loss.epsilon(0.5) == math.inf
    assert loss.delta(100.0) == 1.0
    # Noise that hardly ever comes hides as little.
    assert privacy_loss(PoissonNoise(1e-30), 2).epsilon(0.9) == math.inf
    assert privacy_loss(PoissonNoise(1e-3), 22).delta(5.0) > 0.99


LOSSES: list[Noise] = [PoissonNoise(50.0), BinomialNoise(300, 0.3), GaussianNoise(7.0), TruncatedLaplace(4.0, 90)]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    noise=st.sampled_from(LOSSES),
    half=st.integers(1, 40),
    near=st.floats(0, 8),
    far=st.floats(0, 8),
    exponents=st.tuples(st.floats(-10, -1), st.floats(-10, -1)),
)
def test_delta_falls_with_epsilon_and_they_invert_each_other(
    noise: Noise, half: int, near: float, far: float, exponents: tuple[float, float]
) -> None:
    loss = privacy_loss(noise, 2 * half)
    near, far = sorted((near, far))
    assert loss.delta(near) >= loss.delta(far) - 1e-15
    assert 0 <= loss.delta(far) <= 1
    small, large = (10**exponent for exponent in sorted(exponents))
    assert loss.epsilon(small) >= loss.epsilon(large)
    if math.isfinite(loss.epsilon(small)):
        assert loss.delta(loss.epsilon(small)) <= small * (1 + 1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(half=st.integers(1, 30), mean=st.floats(15, 1e5), factor=st.floats(1.05, 3), epsilon=st.floats(0.05, 3))
def test_more_noise_or_fewer_changes_cost_less(half: int, mean: float, factor: float, epsilon: float) -> None:
    def delta(mean: float, changed: int, participations: int = 1) -> float:
        return privacy_loss(PoissonNoise(mean), changed, participations).delta(epsilon)

    slack = 1e-13  # both figures carry an allowance for rounding of about this size
    assert delta(factor * mean, 2 * half) <= delta(mean, 2 * half) + slack
    assert delta(mean, 2 * half) <= delta(mean, 2 * half + 2) + slack
    assert delta(mean, 2 * half) <= delta(mean, 2 * half, 2) + slack
    assert delta(mean, 2 * half, 3) == delta(mean, 6 * half)


@pytest.mark.parametrize(
    ("noise", "changed"),
    [(DiscreteLaplace(3.88), FULL_RELEASE), (TruncatedLaplace(3.88, 60), FULL_RELEASE), (DiscreteLaplace(80.0), 398)],
    ids=str,
)
def test_laplace_losses_are_a_binomial_count(noise: DiscreteLaplace | TruncatedLaplace, changed: int) -> None:
    """Every counter loses 1/scale up or down, or, at the cut, all: summed with forty digits, never below."""
    with mpmath.workdps(40):
        p = mpmath.exp(-1 / mpmath.mpf(noise.scale))
        cut = mpmath.mpf(0)
        if isinstance(noise, TruncatedLaplace):
            weights = [p ** abs(z) for z in range(-noise.shift, noise.shift + 1)]
            cut = weights[0] / mpmath.fsum(weights)
        for epsilon in (0.0, 1.0, 3.0, 5.0):
            truth = 1 - (1 - cut) ** changed
            for ups in range(changed + 1):
                loss = (2 * ups - changed) / mpmath.mpf(noise.scale)
                mass = mpmath.binomial(changed, ups) * p ** (changed - ups) / (1 + p) ** changed * (1 - cut) ** changed
                truth += mass * max(mpmath.mpf(0), 1 - mpmath.exp(epsilon - loss))
            stated = privacy_loss(noise, changed).delta(epsilon)
            assert truth <= stated <= truth * (1 + 1e-9) + 1e-12


#: Standard deviations at delta 1e-5, k changed counters: epsilon 0.5, 1 and 5.
LAPLACE = {2: (5.64, 2.80, 0.44), 4: (11.3, 5.64, 1.06), 8: (22.6, 11.3, 2.23), 12: (31.9, 16.6, 3.37)}


@pytest.mark.parametrize(
    ("changed", "epsilon", "sd"),
    [(k, epsilon, sd) for k, row in LAPLACE.items() for epsilon, sd in zip((0.5, 1.0, 5.0), row, strict=True)],
)
def test_servers_draw_the_law_of_least_variance(changed: int, epsilon: float, sd: float) -> None:
    budget = Budget(epsilon, DELTA)
    laplace, poisson = calibrate_laplace(budget, changed), calibrate(budget, changed)
    assert laplace.sd == pytest.approx(sd, rel=0.01)
    dummies = calibrate_dummies(budget, changed)
    own = uncut(dummies)
    for law in (laplace, dummies, own):
        assert privacy_loss(law, changed).delta(epsilon) <= DELTA
    assert privacy_loss(DiscreteLaplace(0.999 * laplace.scale), changed).delta(epsilon) > DELTA
    for law in (dummies, own):
        assert law.sd <= 1.002 * min(laplace.sd, poisson.sd)
    # One charge for both: what the dummies cost, the coordinator's own noise costs at most.
    for at in (0.1 * epsilon, 0.5 * epsilon, epsilon):
        assert privacy_loss(own, changed).delta(at) <= privacy_loss(dummies, changed).delta(at)
    if isinstance(dummies, TruncatedLaplace):
        assert own == DiscreteLaplace(dummies.scale)
        shorter = TruncatedLaplace(dummies.scale, dummies.shift - 1)
        assert privacy_loss(shorter, changed).delta(epsilon) > DELTA, "there are no more dummies than needed"
    assert calibrate_dummies(budget, changed) is dummies


def test_a_cut_is_counted_exactly() -> None:
    """What can come only of one of two neighbours gives it away: on each changed counter, with the end's mass."""
    noise, p = TruncatedLaplace(2.0, 4), math.exp(-0.5)
    end = p**4 / (1 + 2 * sum(p**z for z in range(1, 5)))
    assert privacy_loss(noise, 2).delta(50.0) == pytest.approx(1 - (1 - end) ** 2, rel=1e-12)
    assert privacy_loss(noise, 2).epsilon(1e-5) == math.inf
    assert privacy_loss(DiscreteLaplace(2.0), 2).epsilon(1e-5) < 1.0 + 1e-9


@pytest.mark.parametrize("participations", [1, 3])
def test_a_trusted_server_draws_the_law_of_least_variance(participations: int) -> None:
    for epsilon, changed in itertools.product((0.1, 1.0, 5.0), (2, 8, 22)):
        budget = Budget(epsilon, DELTA)
        noise = calibrate_central(budget, changed, participations)
        assert privacy_loss(noise, changed, participations).delta(epsilon) <= DELTA
        gaussian = calibrate_gaussian(budget, changed, participations)
        laplace = calibrate_laplace(budget, changed, participations)
        assert noise.variance == min(gaussian.variance, laplace.variance)
    assert calibrate_central(Budget(1.0, 1e-20), 2) == calibrate_gaussian(Budget(1.0, 1e-20), 2)


@pytest.mark.parametrize("epsilon", [100.0, 800.0, 1e7, 1e200])
def test_servers_noise_of_huge_budgets(epsilon: float) -> None:
    dummies = calibrate_dummies(Budget(epsilon, DELTA), 22)
    for law in (dummies, uncut(dummies)):
        assert privacy_loss(law, 22).delta(epsilon) <= DELTA


def test_servers_noise_of_tiny_budgets_is_poisson() -> None:
    for epsilon in (1e-3, 1e-9):
        assert calibrate_dummies(Budget(epsilon, DELTA), 22) == calibrate(Budget(epsilon, DELTA), 22)
    with pytest.raises(InvalidInputError, match="scale of"):
        calibrate_laplace(Budget(1e-16, DELTA), 22)


@pytest.mark.parametrize("changed", [2, 4, 12, 22, 398])
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 2.0, 10.0])
def test_calibration_is_certified_and_wastes_nothing(changed: int, epsilon: float) -> None:
    noise = calibrate(Budget(epsilon, DELTA), changed)
    assert privacy_loss(noise, changed).delta(epsilon) <= DELTA
    assert privacy_loss(PoissonNoise(noise.mean * 0.9999), changed).delta(epsilon) > DELTA
    assert calibrate(Budget(epsilon, DELTA), changed) is noise


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    epsilon=st.floats(-2, 1).map(lambda e: 10**e),
    delta=st.floats(-11, -0.5).map(lambda e: 10**e),
    half=st.integers(1, 100),
    participations=st.integers(1, 3),
)
def test_calibration_over_the_whole_range(epsilon: float, delta: float, half: int, participations: int) -> None:
    noise = calibrate(Budget(epsilon, delta), 2 * half, participations)
    assert privacy_loss(noise, 2 * half, participations).delta(epsilon) <= delta
    assert privacy_loss(PoissonNoise(0.99 * noise.mean), 2 * half, participations).delta(epsilon) > delta


@pytest.mark.parametrize("changed", [12, 22, 398])
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 2.0])
def test_one_bit_noise_is_as_small_as_a_trusted_servers(changed: int, epsilon: float) -> None:
    budget = Budget(epsilon, DELTA)
    assert 1 <= calibrate(budget, changed).sd / calibrate_gaussian(budget, changed).sd <= 1.02


@pytest.mark.parametrize(
    ("epsilon", "changed", "sd"), [(1.0, FULL_RELEASE, 17.53), (0.1, FULL_RELEASE, 144.24), (1.0, 2, 5.77)]
)
def test_figures_of_the_design(epsilon: float, changed: int, sd: float) -> None:
    assert calibrate(Budget(epsilon, DELTA), changed).sd == pytest.approx(sd, rel=1e-3)


@given(epsilon=st.floats(-4, 2).map(lambda e: 10**e), delta=st.floats(-30, -0.1).map(lambda e: 10**e))
def test_gaussian_calibration_is_exact(epsilon: float, delta: float) -> None:
    noise = calibrate_gaussian(Budget(epsilon, delta), 6, 2)
    assert privacy_loss(noise, 6, 2).delta(epsilon) <= delta
    assert privacy_loss(GaussianNoise(noise.sd * (1 - 1e-6)), 12).delta(epsilon) > delta


def test_replacing_a_user_moves_two_counters_per_layer_and_family() -> None:
    """Correction 2: the paper composes over the H counters a user touches; a replaced user leaves H and enters H.

    One layer, one family: the neighbours' histograms differ by one user in counter A against one in counter B. What the
    two noisy counters reveal, enumerated, is the cost of two changes; one change alone costs much less.
    """
    noise = PoissonNoise(33.3)
    masses = pmf(noise)
    shifted = np.append(0.0, masses[:-1])
    in_a, in_b = np.multiply.outer(shifted, masses), np.multiply.outer(masses, shifted)
    truth = true_delta(in_a.ravel(), in_b.ravel(), 1.0)
    touched_only = max(true_delta(shifted, masses, 1.0), true_delta(masses, shifted, 1.0))
    assert touched_only < truth / 5
    assert truth <= privacy_loss(noise, 2).delta(1.0) <= 1.001 * truth

    # Noise calibrated for H changes, as the paper counts, breaks the budget of the 2H that there are.
    budget = Budget(1.0, DELTA)
    halved = calibrate(budget, HORIZON)
    loss = privacy_loss(halved, 2 * HORIZON)
    assert loss.epsilon(DELTA) > 1.4 * budget.epsilon
    assert loss.delta(budget.epsilon) > 50 * DELTA


@pytest.mark.parametrize(("epsilon", "sd", "ours"), [(1.0, 354, 17.53), (0.1, 3536, 144.24)])
def test_the_papers_constants_are_needlessly_noisy(epsilon: float, sd: float, ours: float) -> None:
    """Correction 3: tau is 20 times what the budget asks for and delivers a 25 times smaller epsilon."""
    budget = Budget(epsilon, DELTA)
    tau = paper_tau(budget, HORIZON, states=4, actions=2)
    noise = paper_noise(1000, tau)
    assert noise.sd == pytest.approx(sd, rel=2e-3)
    assert calibrate(budget, FULL_RELEASE).sd == pytest.approx(ours, rel=1e-3)
    assert 15 < noise.sd / calibrate(budget, FULL_RELEASE).sd < 80
    assert 0.01 * epsilon < privacy_loss(noise, FULL_RELEASE).epsilon(DELTA) < 0.04 * epsilon


def test_tau_is_the_papers() -> None:
    tau = paper_tau(Budget(0.5, 1e-4), horizon=3, states=5, actions=2)
    assert tau == pytest.approx(96 * math.log(2 / (1e-4 / 30)) / (0.5 / 9) ** 2, rel=1e-12)


def test_both_regimes_of_the_papers_noise() -> None:
    assert paper_noise(7, 100.0) == BinomialNoise(105, 0.5)  # 15 fair coins each
    assert paper_noise(100, 100.0) == BinomialNoise(100, 0.5)
    assert paper_noise(101, 100.0) == BinomialNoise(101, 100 / 202)
    assert paper_noise(10**15, 100.0) == BinomialNoise(10**15, 5e-14)
    # Among ever more users the bits become Poisson.
    few, many = (privacy_loss(law, 22).epsilon(DELTA) for law in (paper_noise(10**15, 800.0), PoissonNoise(400.0)))
    assert few == pytest.approx(many, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0, -1, math.inf, math.nan, "much"])
def test_bad_epsilons_are_refused(epsilon: float) -> None:
    with pytest.raises(InvalidInputError, match="epsilon"):
        Budget(epsilon, DELTA)


@pytest.mark.parametrize("delta", [0, -1e-5, 1, 1.5, math.inf, math.nan, None])
def test_bad_deltas_are_refused(delta: float) -> None:
    with pytest.raises(InvalidInputError, match="delta"):
        Budget(1.0, delta)
    with pytest.raises(InvalidInputError, match="delta"):
        privacy_loss(PoissonNoise(30.0), 2).epsilon(delta)


@pytest.mark.parametrize("changed", [0, 1, 3, -2, 2.0, True])
def test_odd_changes_are_refused(changed: int) -> None:
    asked: list[Callable[[], object]] = [
        lambda: privacy_loss(NoNoise(), changed),
        lambda: privacy_loss(PoissonNoise(30.0), changed),
        lambda: calibrate(Budget(1.0, DELTA), changed),
        lambda: calibrate_gaussian(Budget(1.0, DELTA), changed),
        lambda: calibrate_laplace(Budget(1.0, DELTA), changed),
        lambda: calibrate_dummies(Budget(1.0, DELTA), changed),
    ]
    for ask in asked:
        with pytest.raises(InvalidInputError, match="changed"):
            ask()


def test_other_bad_input_is_refused() -> None:
    class Unheard:
        pass

    with pytest.raises(InvalidInputError, match="participations"):
        privacy_loss(PoissonNoise(30.0), 2, participations=0)
    with pytest.raises(InvalidInputError, match="noise"):
        privacy_loss(Unheard(), 2)
    with pytest.raises(InvalidInputError, match="epsilon"):
        privacy_loss(PoissonNoise(30.0), 2).delta(-0.1)
    with pytest.raises(InvalidInputError, match="horizon"):
        paper_tau(Budget(1.0, DELTA), 0, 4, 2)
    with pytest.raises(InvalidInputError, match="users"):
        paper_noise(0, 10.0)
    with pytest.raises(InvalidInputError, match="tau"):
        paper_noise(10, 0.0)


def test_a_delta_below_the_numeric_floor_is_refused_not_guessed() -> None:
    loss = privacy_loss(PoissonNoise(300.0), 22)
    assert loss.epsilon(NUMERIC_FLOOR) > loss.epsilon(1e-9)
    with pytest.raises(AccountingError, match=r"at least 1e-12"):
        loss.epsilon(NUMERIC_FLOOR / 2)
    with pytest.raises(AccountingError, match="rounding error"):
        calibrate(Budget(1.0, 1e-13), 22)
    # Many participations pile up rounding errors: the floor rises with them.
    with pytest.raises(AccountingError, match="at least"):
        privacy_loss(PoissonNoise(1e6), 22, participations=1000).epsilon(NUMERIC_FLOOR)
    # The other question always has an honest answer: an upper bound that stays above the rounding error.
    assert 0 < loss.delta(50.0) < NUMERIC_FLOOR


def test_at_the_floor_the_answer_is_still_sharp() -> None:
    """The true delta of one moved pair, from tails that SciPy knows to full relative precision."""
    noise = PoissonNoise(400.0)

    def truth(epsilon: float) -> float:
        data, neighbour = transcripts(noise, 2)
        return true_delta(data, neighbour, epsilon)

    epsilon = float(optimize.brentq(lambda e: truth(e) - NUMERIC_FLOOR, 0.1, 3.0))
    assert epsilon <= privacy_loss(noise, 2).epsilon(NUMERIC_FLOOR) <= 1.01 * epsilon


def test_weak_budgets_are_allowed_with_a_warning_that_says_what_they_mean() -> None:
    warn_if_weak(Budget(10.0, 1e-5), users=1000)
    warn_if_weak(Budget(1.0, 1e-3), users=1000)
    with pytest.warns(PrivacyWarning, match=r"e\^12 = 1.6e\+05"):
        warn_if_weak(Budget(12.0, 1e-5), users=1000)
    with pytest.warns(PrivacyWarning, match="data of 20 users"):
        warn_if_weak(Budget(1.0, 1e-2), users=2000)
    with pytest.warns(PrivacyWarning, match="hardly"):
        warn_if_weak(Budget(1e6, 1e-5), users=1000)


def test_a_warning_names_the_line_of_the_user() -> None:
    learner = UCBVI(random_mdp(0).problem(1000), 0)
    with pytest.warns(PrivacyWarning) as directly:
        warn_if_weak(Budget(12.0, 1e-2), users=1000)
    with pytest.warns(PrivacyWarning) as deep_inside:
        privatizers.make("shuffle", learner, epsilon=12.0, delta=1e-2, seed=0)
    assert [warning.filename for warning in (*directly, *deep_inside)] == 4 * [__file__]


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3, 0.5, 0.7, 1 - 1e-12])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 11.0, 300.0, 708.0, 720.0, 800.0, 1e6])
def test_unary_encoding_is_calibrated_at_any_budget(epsilon: float, delta: float) -> None:
    flip = calibrate_unary(Budget(epsilon, delta))
    loss = privacy_loss(UnaryNoise(100, 3, flip), 2)
    assert loss.delta(epsilon) <= delta
    assert loss.epsilon(delta) <= epsilon * (1 + 1e-12) + 1e-12
    exact = (1 - 2 * Decimal(delta)) / (1 + Decimal(epsilon).exp())
    assert flip == pytest.approx(max(float(exact), sys.float_info.min), rel=1e-9, abs=0)


@pytest.mark.parametrize("flip", [5e-324, 1e-310, 1e-300, 0.1])
def test_the_loss_of_any_unary_encoding_is_known(flip: float) -> None:
    loss = privacy_loss(UnaryNoise(100, 3, flip), 2)
    assert loss.delta(1e6) == 0.0
    assert loss.epsilon(0.6) == 0.0
    epsilon = loss.epsilon(0.25)
    assert epsilon == pytest.approx(math.log(0.5 - flip) - math.log(flip))
    assert loss.delta(epsilon) == pytest.approx(0.25)


def test_a_budget_that_leaves_a_unary_report_nothing_to_say_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="epsilon is 1e-20 and delta 1e-18: a unary report"):
        calibrate_unary(Budget(1e-20, 1e-18))
    flips = []
    for epsilon in np.geomspace(1e-15, 1e-14, 200).tolist():
        with contextlib.suppress(InvalidInputError):
            flips.append(calibrate_unary(Budget(epsilon, 1e-18)))
    assert 0 < len(flips) < 200
    assert max(flips) < 0.5  # at one half all bits are alike


def test_a_budget_that_needs_more_noise_than_can_be_drawn_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidInputError, match=r"epsilon is 1e-09 and delta 1e-11: .* no more than 1e\+18 can be drawn"
    ):
        calibrate(Budget(1e-9, 1e-11), 22)


@pytest.mark.parametrize("epsilon", [800.0, 1e7, 1e200])
def test_huge_epsilons_are_calibrated(epsilon: float) -> None:
    for noise in (calibrate(Budget(epsilon, DELTA), 22), calibrate_gaussian(Budget(epsilon, DELTA), 22)):
        assert privacy_loss(noise, 22).delta(epsilon) <= DELTA


def test_a_loss_is_one_kind_of_value() -> None:
    assert all(isinstance(privacy_loss(noise, 2), PrivacyLoss) for noise in [NoNoise(), *LOSSES])


def test_what_is_asked_again_is_not_accounted_again() -> None:
    """Every look at a running system asks for what its ledger holds."""
    asked: list[float] = []

    class Watched(PrivacyLoss):
        def _delta(self, epsilon: float) -> float:
            asked.append(epsilon)
            return math.exp(-epsilon)

        def _epsilon(self, delta: float) -> float:
            return -math.log(delta)

    loss = Watched()
    first = loss.epsilon(1e-5)
    so_far = len(asked)
    assert loss.epsilon(1e-5) == first
    assert len(asked) == so_far > 0
    assert loss.epsilon(1e-6) > first
    assert len(asked) > so_far
