"""From draws to the budget: what a privatizer draws against what it promises, by an accountant of the tests' own.

Nothing of `privacy.accounting` is used, and of a privatizer only what it shows to everybody: what it releases, what it
certifies, what its ledger says was spent. Draws must fit the law that their release states, and what this law costs,
computed here, must be within what was promised. Noise may be correlated over time, of which no law is stated: there the
covariance of the draws themselves is accounted for.

Seeds are fixed. Over all seeds a right privatizer fails `check` with probability below 1e-4: each of at most a hundred
statistics is further off than allowed with probability 1e-6.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import fft, optimize, stats

from shufflerl.arrays import FloatArray
from shufflerl.counts import Batch, CountQuery, Counts, Release
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
)
from shufflerl.privatizers.base import BudgetedPrivatizer

DELTA = 1e-9
LEVEL = 1e-6
#: A normal statistic is so many deviations off with that probability.
FAR = 5.0
#: Batches of a run, where one user may be in any of them.
BATCHES = 5
#: Draws of noise per batch, all counters of all runs together.
DRAWS = 4000


@dataclass(frozen=True)
class Case:
    """Batches of so many users, of whom one takes part in batches that ask `asks`, one after the other."""

    users: int
    epsilon: float
    asks: tuple[str, ...] = ("all",)
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """Three steps, 432 counters."""
        return Problem(horizon=3, n_states=6, n_actions=4, episodes=BATCHES * self.users)

    @property
    def batches(self) -> tuple[str, ...]:
        """What the batches of a run ask: all the same if the user's do."""
        return self.asks if len(set(self.asks)) > 1 else self.asks[:1] * BATCHES

    def query(self, ask: str) -> CountQuery:
        steps: dict[str, tuple[Sequence[int], Sequence[int]]] = {
            "all": ((0, 1), (0, 1, 2)),
            "most": ((0,), (0, 2)),
            "part": ((1,), ()),
        }
        return CountQuery(self.problem, *steps[ask])

    def learner(self, *, running_sums: bool) -> Learner:
        learner = UCBVI(self.problem, 0, batch=self.users)
        learner.reads_running_sums = running_sums  # type: ignore[misc]
        return learner


#: With a pencil: for each family and step that is asked for, a replaced user leaves one counter and enters another.
CHANGED = {"all": 2 * (2 + 3), "most": 2 * (1 + 2), "part": 2 * 1}

#: Makes a privatizer for a case, by a seed.
Make = Callable[[Case, int], BudgetedPrivatizer]


@dataclass(frozen=True)
class Run:
    """Some runs: one of the privatizers, what it released, and errors[t][run, counter] of all."""

    privatizer: BudgetedPrivatizer
    releases: list[Release]
    errors: list[FloatArray]


def check(make: Make, case: Case) -> None:
    """What is drawn keeps to what is promised: by certificate, ledger and budget."""
    run = _played(make, case)
    laws = [release.noise for release in run.releases]
    if isinstance(laws[0], UnaryNoise):
        _check_unary(run, case)
        return
    for law, errors in zip(laws, run.errors, strict=True):
        assert_fits(law, errors)
    promised = _promised(run.privatizer, case)
    if isinstance(laws[0], GaussianNoise):
        spent = gaussian_epsilon(_least_mu(run, case))
    else:
        changed = [CHANGED[ask] for ask in case.asks]
        seats = zip(*(_seats(law) for law in laws[: len(changed)]), strict=True)
        spent = max(
            lattice_epsilon([(_honest(law, case), k) for law, k in zip(seen, changed, strict=True)]) for seen in seats
        )
    assert spent <= promised, f"What is drawn costs epsilon {spent:.6g}; promised is {promised:.6g}."


def _played(make: Make, case: Case) -> Run:
    """Batches of users who all do the same."""
    queries = [case.query(ask) for ask in case.batches]
    mixture = Mixture(np.zeros((1, case.problem.horizon, case.problem.n_states), dtype=np.int32), [1.0])
    counts = [_all_alike(Batch(index, case.users, mixture, query)) for index, query in enumerate(queries)]
    errors: list[list[FloatArray]] = [[] for _ in queries]
    for seed in range(-(-DRAWS // min(query.size for query in queries))):
        privatizer = make(case, seed)
        releases = [privatizer.release(one) for one in counts]
        for here, release, one in zip(errors, releases, counts, strict=True):
            here.append(release.values - one.values)
        if case.users == 1 and privatizer.draws_ahead and queries[0] == queries[-1]:
            ahead, _ = make(case, 1000 + seed).noise_of_episodes(queries[0], range(len(queries)))
            for here, noise in zip(errors, ahead, strict=True):
                here.append(noise)
    return Run(privatizer, releases, [np.stack(here) for here in errors])


def _all_alike(batch: Batch) -> Counts:
    values = np.zeros(batch.query.size, dtype=np.int64)
    values[batch.query.group_starts] = batch.users
    return Counts(batch, values)


def _promised(privatizer: BudgetedPrivatizer, case: Case) -> float:
    """The epsilon that the ledger says was spent, when the certificate says no less and the budget allows it."""
    spent = privatizer.ledger.spent
    for ask in {*case.asks, "all"}:
        certificate = privatizer.certificate(case.query(ask))
        assert certificate.participations == len(case.asks)
        assert certificate.honest_fraction == case.parameters.get("gamma", 1.0)
        assert certificate.delta == DELTA
        assert certificate.epsilon <= case.epsilon
        if ask in case.asks:
            assert spent <= certificate.epsilon
    return spent


def assert_fits(law: Noise, errors: FloatArray) -> None:
    """These draws are of this law: their mean, their spread, and where they lie."""
    draws = np.sort(errors, axis=None)
    scores = draws / law.sd
    assert abs(scores.mean()) <= FAR / math.sqrt(len(draws)), f"the mean is {scores.mean():.3g} deviations off"
    # A sum of independent bits has a kurtosis of at most 3 + 1/variance, a Laplace law one of up to 6 + 1/variance.
    bits = isinstance(law, GaussianNoise | PoissonNoise | BinomialNoise)
    allowed = FAR * math.sqrt(((2 if bits else 5) + 1 / law.variance) / len(draws))
    spread = float((scores**2).mean())
    assert abs(spread - 1) <= allowed, f"the variance is {spread:.3g} times the stated one"
    # Dvoretzky-Kiefer-Wolfowitz.
    radius = math.sqrt(math.log(2 / LEVEL) / (2 * len(draws)))
    empirical = np.searchsorted(draws, draws, side="right") / len(draws)
    assert np.abs(empirical - law.cdf(draws)).max() <= radius, "the draws are not of the stated law"


def _least_mu(run: Run, case: Case) -> float:
    """The Gaussian mechanism that one user's batches are together: at least what the draws allow, and what is stated.

    A user who is in the batches S moves the noise's mean by one in each, on k counters: mu^2 = k 1_S' C^-1 1_S, C the
    covariance over time. In the local model every user adds its own part of the noise, and hides behind that alone.
    """
    share = case.users if run.privatizer.certificate(case.query("all")).model == "local" else 1
    changed = [CHANGED[ask] for ask in case.batches]
    stated = [share * k / release.noise.variance for k, release in zip(changed, run.releases, strict=True)]
    independent = all(release.added_variance == release.noise.variance for release in run.releases)
    count = run.errors[0].size
    if len(set(case.batches)) == 1:
        draws = np.stack([errors.ravel() for errors in run.errors])
        precision = share * changed[0] * np.linalg.inv(draws @ draws.T / count)
        chosen = [list(some) for some in itertools.combinations(range(len(changed)), len(case.asks))]
        drawn = max(precision[np.ix_(some, some)].sum() for some in chosen)
    else:
        drawn = sum(share * k / (errors**2).mean() for k, errors in zip(changed, run.errors, strict=True))
    by_law = sum(sorted(stated)[-len(case.asks) :]) if independent else 0.0
    return math.sqrt(max(by_law, drawn / (1 + FAR * math.sqrt(2 / count))))


def gaussian_epsilon(mu: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1), by the definition of Phi alone; below the truth by a hair."""

    def excess(epsilon: float) -> float:
        far = math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))
        return float(stats.norm.cdf(mu / 2 - epsilon / mu)) - far - DELTA

    return float(optimize.brentq(excess, 0, 1000, xtol=1e-12)) * (1 - 1e-6)


def _seats(law: Noise) -> tuple[Noise, ...]:
    """What protects from each of those who look: of a sum of two, whoever adds one part faces the other alone."""
    if not isinstance(law, NoiseSum):
        return (law,)
    assert len(law.parts) == 2, "whoever adds all the noise sees the counts"
    return law.parts


@dataclass(frozen=True)
class _Table:
    """A law on 0, 1, 2, ... by its probabilities, as SciPy would give it."""

    masses: FloatArray

    def mean(self) -> float:
        return float(np.arange(len(self.masses)) @ self.masses)

    def std(self) -> float:
        return math.sqrt((np.arange(len(self.masses)) - self.mean()) ** 2 @ self.masses)

    def pmf(self, counts: Any) -> FloatArray:
        return np.asarray(np.append(self.masses, 0.0)[np.minimum(counts, len(self.masses))])

    def logpmf(self, counts: Any) -> FloatArray:
        return np.asarray(np.log(self.pmf(counts)))


def _honest(law: Noise, case: Case) -> Any:
    """What is on a counter if only the honest fraction adds its noise."""
    fraction = case.parameters.get("gamma", 1.0)
    if isinstance(law, PoissonNoise):
        return stats.poisson(law.mean * fraction)
    if isinstance(law, BinomialNoise) and fraction == 1:
        return stats.binom(law.trials, law.probability)
    if isinstance(law, DiscreteLaplace | TruncatedLaplace) and fraction == 1:
        cut = isinstance(law, TruncatedLaplace)
        furthest = law.shift if isinstance(law, TruncatedLaplace) else math.ceil(50 * law.scale)
        weights = np.exp(-np.abs(np.arange(-furthest, furthest + 1)) / law.scale)
        return _Table(np.append([] if cut else [0.0], weights / weights.sum()))  # uncut, nothing ends at zero
    raise AssertionError(f"The tests cannot account for {law} of {fraction} of the users: teach them.")


def lattice_epsilon(laws: Sequence[tuple[Any, int]], failures: Sequence[float] = ()) -> float:
    """A lower bound on epsilon of noise of each of these laws on so many counters, half of them up, half down.

    With the probability of each failure, independently, everything is told.

    The thirty lines of docs/privacy-officer.md for any law of whole numbers: all losses rounded down, tails left out.
    Where zero is the end of a law, the neighbour cannot produce it.
    """
    gap = 1 / (400 * max(law.std() for law, _ in laws))
    parts, safe = [], math.prod(1 - failure for failure in failures)
    for law, changed in laws:
        counts = np.arange(max(0, math.floor(law.mean() - 12 * law.std())), math.ceil(law.mean() + 12 * law.std()) + 2)
        masses = law.pmf(counts)
        safe *= (1 - float(law.pmf(0))) ** (changed // 2)
        possible = masses > 1e-20
        counts, masses = counts[possible], masses[possible]
        steps = np.diff(law.logpmf(counts))
        parts += [(steps, masses[1:], changed // 2), (-steps, masses[:-1], changed // 2)]
    cells = [np.floor(losses / gap).astype(np.int64) for losses, *_ in parts]
    furthest = sum(times * int(np.abs(cell).max()) for cell, (*_, times) in zip(cells, parts, strict=True))
    size = fft.next_fast_len(2 * furthest + 2, real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for cell, (_, masses, times) in zip(cells, parts, strict=True):
        spectrum *= fft.rfft(np.bincount(cell % size, masses, size)) ** times
    composed = np.clip(fft.irfft(spectrum, size), 0, None) * math.prod(1 - failure for failure in failures)
    losses = gap * (np.arange(size) - size * (np.arange(size) > furthest))

    def excess(epsilon: float) -> float:
        return float((composed * -np.expm1(np.minimum(epsilon - losses, 0))).sum()) + (1 - safe) - DELTA

    if excess(gap * furthest) > 0:
        return math.inf
    return 0.0 if excess(0) <= 0 else float(optimize.brentq(excess, 0, gap * furthest))


def _check_unary(run: Run, case: Case) -> None:
    """Two reports differ in two bits: nothing is hidden but by how often the bits that were not touched are ones.

    Of the four values of the two bits only (1, 0) is likelier under the first user, (1 - q)/2 against q/2.
    """
    law = run.releases[0].noise
    assert isinstance(law, UnaryNoise)
    q, groups = law.flip, len(run.releases[0].batch.query.group_starts)
    assert 1 - q - math.exp(_promised(run.privatizer, case)) * q <= 2 * DELTA + 1e-15
    touched = np.zeros(run.errors[0].shape[1], dtype=np.bool_)
    touched[run.releases[0].batch.query.group_starts] = True
    own, others = (np.concatenate([errors[:, which] for errors in run.errors]) for which in (touched, ~touched))
    if case.users == 1:
        # One group is reported, as bits less q in units of the weight; where nothing was reported, nothing is released.
        weight = groups / (0.5 - q)
        own = (own + 1) / weight
        for bits, probability in ((own[own != 0], 0.5), (others[others != 0] / weight, q)):
            ones = np.isclose(bits, 1 - q)
            assert (ones | np.isclose(bits, -q)).all()
            assert stats.binomtest(int(ones.sum()), ones.size, probability).pvalue > LEVEL
        return
    signal = (0.5 - q) ** 2
    for errors, variance in ((others, groups * q * (1 - q) / signal), (own, groups * (0.25 / signal + 1) - 1)):
        squares = (errors**2).mean(axis=1) / (case.users * variance)
        allowed = FAR * max(squares.std(), math.sqrt(2 / errors.shape[1])) / math.sqrt(len(squares))
        assert abs(squares.mean() - 1) <= allowed, f"the variance is {squares.mean():.3g} times the stated one"
