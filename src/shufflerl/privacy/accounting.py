"""Budgets, and the least noise that keeps a release within one; what noise costs is told by `loss`."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import scipy  # its parts are loaded when they are first used, which most processes never do

from shufflerl.checks import real, whole
from shufflerl.errors import AccountingError, InvalidInputError, PrivacyWarning
from shufflerl.noise import (
    MAX_COUNT,
    MAX_SCALE,
    MIN_SCALE,
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    PoissonNoise,
    TruncatedLaplace,
)
from shufflerl.privacy.loss import UnaryLoss, even_changes, gaussian_delta, privacy_loss, refuse_below_floor, root

Law = TypeVar("Law", bound=Noise)

#: Above this epsilon the guarantee says little: e^10 = 22,000.
WEAK_EPSILON = 10.0

# Calibrated sizes are multiples of each other by this much more than one, so at most that above the least certified.
_STEP = 5e-5
# The part of delta that the cut of a Laplace law may take: so little costs no noise, and less only costs dummies.
_CUT = 0.01
# Budgets with more epsilon are calibrated as if they had this much: beyond, the closed form loses its digits.
_LARGEST_GAUSSIAN = 1e6


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) guarantee, asked for or given."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        """Refuse what is no guarantee at all."""
        object.__setattr__(self, "epsilon", real("epsilon", self.epsilon, above=0))
        object.__setattr__(self, "delta", real("delta", self.delta, above=0, below=1))


def warn_if_weak(budget: Budget, users: int) -> None:
    """Say in a `PrivacyWarning` what a budget means that is allowed but protects little; it names the user's line."""
    users = whole("users", users, least=1)
    if budget.epsilon > WEAK_EPSILON:
        factor = f"{math.exp(budget.epsilon):.2g}" if budget.epsilon < 700 else "beyond 1e300"
        warnings.warn(
            f"epsilon is {budget.epsilon:g}: an observer's odds about one user may change by a factor of "
            f"e^{budget.epsilon:g} = {factor}. Values up to 1 protect well, above {WEAK_EPSILON:g} hardly.",
            PrivacyWarning,
            stacklevel=_frames_inside(),
        )
    if budget.delta > 1 / users:
        warnings.warn(
            f"delta is {budget.delta:g} with {users} users: publishing the data of {budget.delta * users:.3g} users at "
            f"random would be allowed. Use a delta well below 1/{users} = {1 / users:.2g}.",
            PrivacyWarning,
            stacklevel=_frames_inside(),
        )


def _frames_inside() -> int:
    """The `stacklevel` at which the function that asks must warn for the warning to name a line outside the package."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


@functools.lru_cache(maxsize=1024, typed=True)
def calibrate(budget: Budget, changed: int, participations: int = 1) -> PoissonNoise:
    """The least Poisson noise per counter, to a relative 5e-5 of its mean, that keeps a release within the budget.

    The result is certified: `privacy_loss(result, changed, participations).delta(budget.epsilon) <= budget.delta`.

    >>> round(calibrate(Budget(1.0, 1e-5), changed=22).sd, 1)
    17.5
    """
    losses = even_changes(changed) * whole("participations", participations, least=1)
    refuse_below_floor(budget.delta, losses)

    # The Gaussian answer is close (a Poisson variable's mean is its variance), but no mean can do at which an empty
    # counter, whose loss is infinite, is itself too probable: 1 - (1 - e^-mean)^(losses/2) > delta.
    gaussian = losses / _gaussian_mu(budget) ** 2
    empty = -math.log(-math.expm1(math.log1p(-budget.delta) / (losses / 2)))
    return _least(lambda mean: drawable(mean, budget), max(gaussian, empty), budget, losses)


def _least(law: Callable[[float], Law], guess: float, budget: Budget, losses: int) -> Law:
    """The law of the least size at which so many losses stay within the budget, of sizes `_STEP` apart.

    Sizes are rungs of one ladder, so that the same law is found whatever the last digits of delta are: those may differ
    from machine to machine, and runs would with them.
    """

    @functools.cache
    def excess(rung: int) -> float:
        return math.log(privacy_loss(law(math.exp(rung * _STEP)), losses).delta(budget.epsilon) / budget.delta)

    low = high = round(math.log(guess) / _STEP)
    reach = 200
    while excess(high) > 0:
        low, high, reach = high, high + reach, 2 * reach
    while excess(low) <= 0:
        low, high, reach = low - reach, low, 2 * reach
    halve = False
    while high - low > 1:  # all but linear between them: where a line would cross zero, or else in the middle
        crossing = low + (high - low) * (0.5 if halve else excess(low) / (excess(low) - excess(high)))
        rung = min(max(math.ceil(crossing), low + 1), high - 1)
        halve = not halve and rung not in (low + 1, high - 1)
        low, high = (rung, high) if excess(rung) > 0 else (low, rung)
    return law(math.exp(high * _STEP))


@functools.lru_cache(maxsize=1024, typed=True)
def calibrate_laplace(budget: Budget, changed: int, participations: int = 1) -> DiscreteLaplace:
    """The least discrete Laplace noise per counter, to a relative 5e-5 of its scale, within the budget; certified.

    Of few changed counters it is far below Poisson and Gaussian noise, whose tails pay for a delta it hardly needs.

    >>> round(calibrate_laplace(Budget(1.0, 1e-5), changed=2).sd, 2)
    2.8
    """
    losses = even_changes(changed) * whole("participations", participations, least=1)
    refuse_below_floor(budget.delta, losses)
    if privacy_loss(DiscreteLaplace(MIN_SCALE), losses).delta(budget.epsilon) <= budget.delta:
        return DiscreteLaplace(MIN_SCALE)
    pure = losses / budget.epsilon  # no loss is beyond epsilon there
    if pure >= MAX_SCALE:
        raise InvalidInputError(
            f"epsilon is {budget.epsilon:g} and delta {budget.delta:g}: this needs Laplace noise of a scale of "
            f"{pure:.2g}, and none beyond {MAX_SCALE:.2g} can be drawn. Use a larger epsilon or delta."
        )
    return _least(lambda scale: DiscreteLaplace(max(scale, MIN_SCALE)), pure, budget, losses)


@functools.lru_cache(maxsize=1024, typed=True)
def calibrate_dummies(budget: Budget, changed: int, participations: int = 1) -> PoissonNoise | TruncatedLaplace:
    """The noise of least variance, within the budget by itself, that can be sent as dummies: never below zero.

    Certified, the cut included. The cut is where it takes a hundredth of delta: the variance is then that of the law
    uncut, to a fraction of a percent, and what a wider one would cost is dummies.

    >>> calibrate_dummies(Budget(1.0, 1e-5), changed=2).shift
    22
    """
    losses = even_changes(changed) * whole("participations", participations, least=1)
    poisson = calibrate(budget, losses)
    share = Budget(budget.epsilon, budget.delta * (1 - _CUT))
    try:
        uncut = calibrate_laplace(share, losses)
    except InvalidInputError:  # too wide to be drawn; Poisson counts reach further
        return poisson
    if uncut.variance >= poisson.variance:
        return poisson

    def passes(shift: int) -> bool:
        return privacy_loss(TruncatedLaplace(uncut.scale, shift), losses).delta(budget.epsilon) <= budget.delta

    below, shift = math.ceil(uncut.scale) - 1, max(1, math.ceil(uncut.scale))
    while not passes(shift):
        below, shift = shift, 2 * shift
    while shift - below > 1:
        middle = (below + shift) // 2
        below, shift = (below, middle) if passes(middle) else (middle, shift)
    return TruncatedLaplace(uncut.scale, shift)


def uncut(dummies: PoissonNoise | TruncatedLaplace) -> PoissonNoise | DiscreteLaplace:
    """What a server that may subtract draws in place of such dummies.

    Without the cut the law loses less at every epsilon, so that one charge holds for both.
    """
    return DiscreteLaplace(dummies.scale) if isinstance(dummies, TruncatedLaplace) else dummies


def covers(own: Noise, dummies: PoissonNoise | TruncatedLaplace) -> bool:
    """Whether one charge, that of the dummies, holds for both servers however often a user takes part.

    It does if the other law is theirs uncut, or a wider one of its kind: that is theirs with more noise added. Of laws
    of two kinds the one that loses less in one run may lose more in many.
    """
    least = uncut(dummies)
    if isinstance(own, PoissonNoise) and isinstance(least, PoissonNoise):
        return own.mean >= least.mean
    return isinstance(own, DiscreteLaplace) and isinstance(least, DiscreteLaplace) and own.scale >= least.scale


def drawable(mean: float, budget: Budget) -> PoissonNoise:
    """Poisson noise of the mean that a budget needs; where that is too much to draw, say which budget needs it."""
    if mean >= MAX_COUNT:
        raise InvalidInputError(
            f"epsilon is {budget.epsilon:g} and delta {budget.delta:g}: this needs about {mean:.2g} noise tags per "
            f"counter, and no more than {MAX_COUNT:.0e} can be drawn. Use a larger epsilon or delta."
        )
    return PoissonNoise(mean)


@functools.lru_cache(maxsize=1024, typed=True)
def calibrate_gaussian(budget: Budget, changed: int, participations: int = 1) -> GaussianNoise:
    """The least Gaussian noise per counter that keeps a release within the budget (Balle and Wang 2018), certified."""
    losses = even_changes(changed) * whole("participations", participations, least=1)
    sd = math.sqrt(losses) / _gaussian_mu(budget)
    while privacy_loss(GaussianNoise(sd), changed, participations).delta(budget.epsilon) > budget.delta:
        sd *= 1 + 1e-14
    return GaussianNoise(sd)


def calibrate_central(budget: Budget, changed: int, participations: int = 1) -> GaussianNoise | DiscreteLaplace:
    """The noise of least variance that a trusted server may add, within the budget: Gaussian or discrete Laplace."""
    gaussian = calibrate_gaussian(budget, changed, participations)
    try:
        laplace = calibrate_laplace(budget, changed, participations)
    except (AccountingError, InvalidInputError):  # a budget that only Gaussian noise, known in closed form, can meet
        return gaussian
    return laplace if laplace.variance < gaussian.variance else gaussian


@functools.lru_cache(maxsize=1024, typed=True)
def calibrate_unary(budget: Budget) -> float:
    """The least probability of a one on the bits a user did not touch that keeps a unary report within the budget.

    Where any would do (delta of one half and more) or the least is too small a number, the smallest there is.
    """
    flip = max(sys.float_info.min, (1 - 2 * budget.delta) * float(scipy.special.expit(-budget.epsilon)))
    while UnaryLoss(flip).delta(budget.epsilon) > budget.delta:
        flip *= 1 + 1e-15
    if flip >= 0.5:
        raise InvalidInputError(
            f"epsilon is {budget.epsilon:g} and delta {budget.delta:g}: a unary report within this budget says "
            "nothing. Use a larger epsilon or delta."
        )
    return flip


def paper_tau(budget: Budget, horizon: int, states: int, actions: int) -> float:
    """The paper's noise threshold tau = 96 ln(2/beta') / eps'^2 with eps' = eps/(3H) and beta' = beta/(HXA).

    Its proof composes over the H counters of a family a user touches, where a replaced user changes 2H, and its
    constants are far from tight; what such noise truly costs is `privacy_loss(paper_noise(users, tau), changed)`.
    """
    horizon = whole("horizon", horizon, least=1)
    cells = horizon * whole("states", states, least=1) * whole("actions", actions, least=1)
    scale = 3 * horizon / budget.epsilon
    return 96 * math.log(2 * cells / budget.delta) * scale * scale


def paper_noise(users: int, tau: float) -> BinomialNoise:
    """The bits `users` users add to one counter in the paper's protocol: fair coins up to tau users, rare above."""
    users = whole("users", users, least=1)
    tau = real("tau", tau, above=0)
    if users <= tau:
        return BinomialNoise(math.ceil(Fraction(tau) / users) * users, 0.5)
    return BinomialNoise(users, tau / (2 * users))


def _gaussian_mu(budget: Budget) -> float:
    """The largest mu at which N(mu, 1) against N(0, 1) stays within the budget, up to epsilons of a million."""
    epsilon = min(budget.epsilon, _LARGEST_GAUSSIAN)

    def slack(inverse: float) -> float:
        return gaussian_delta(1 / inverse, epsilon) - budget.delta

    low = high = 1.0
    while slack(high) > 0:
        high *= 2
    while slack(low) <= 0:
        low /= 2
    return 1 / root(slack, low, high)
