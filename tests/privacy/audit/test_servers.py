"""The audit of noise by the servers: planted faults are caught by the test that should catch them, in either seat.

Nothing here can be seeded. The sound system is tested at level 1e-5, so that it fails one run in 100,000 at most; every
fault is far beyond the level at which it is looked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shufflerl.arrays import IntArray
from shufflerl.counts import CountQuery
from shufflerl.noise import DiscreteLaplace, PoissonNoise, TruncatedLaplace
from shufflerl.privacy import protocol
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import ServersInMemory, audit, bench
from shufflerl.privacy.audit.observers import Observer
from shufflerl.privacy.audit.statistics import lowest_epsilon
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ServersNoise
from tests.support.examples import mostly_slow

BUDGET = Budget(5.0, 1e-5)  # of which six changed counters have Laplace noise
SAMPLES, LEVEL = 100, 1e-3

Laws = tuple[PoissonNoise | TruncatedLaplace, PoissonNoise | DiscreteLaplace]


def laws(budget: Budget, query: CountQuery) -> Laws:
    mechanism = ServersNoise(budget)
    return mechanism.dummies(query), mechanism.own(query)


def seeded(law: Any, rng: np.random.Generator, size: int) -> IntArray:
    """The right law from a generator that others know."""
    return np.asarray(np.rint(law.sample(rng, size) + law.mean), dtype=np.int64)


def no_dummies_on_one_counter() -> ServersInMemory:
    def draw(law: Any, size: int) -> IntArray:
        counts = protocol.noise_counts(law, size)
        counts[3] = round(law.mean)
        return counts

    return ServersInMemory(draw_dummies=draw)


def dummies_from_a_known_seed() -> ServersInMemory:
    return ServersInMemory(draw_dummies=lambda law, size: seeded(law, np.random.default_rng(0), size))


def dummies_from_few_seeds() -> ServersInMemory:
    calls = itertools.count()
    return ServersInMemory(draw_dummies=lambda law, size: seeded(law, np.random.default_rng(next(calls) % 20), size))


def coordinator_without_noise() -> ServersInMemory:
    return ServersInMemory(draw_own=lambda _, size: np.zeros(size, dtype=np.int64))


def coordinator_with_half_the_noise() -> ServersInMemory:
    return ServersInMemory(draw_own=lambda law, size: protocol.noise_counts(DiscreteLaplace(law.sd / 2), size))


def coordinator_from_a_known_seed() -> ServersInMemory:
    return ServersInMemory(draw_own=lambda law, size: seeded(law, np.random.default_rng(1), size))


def the_same_noise_twice() -> ServersInMemory:
    """The coordinator takes the dummies away again, and adds noise to what is left of them: one server's noise."""
    last: list[IntArray] = []

    def dummies(law: Any, size: int) -> IntArray:
        last[:] = [protocol.noise_counts(law, size)]
        return last[0]

    return ServersInMemory(draw_dummies=dummies, draw_own=lambda law, _: np.rint(last[0] - 18 + law.mean).astype(int))


def shared_by_all_counters() -> ServersInMemory:
    return ServersInMemory(draw_dummies=lambda law, size: np.repeat(protocol.noise_counts(law, 1), size))


def users_first() -> ServersInMemory:
    """Sorted by group and not mixed: dummies come last."""
    return ServersInMemory(mix=lambda query, tags: np.argsort(query.groups[tags], kind="stable"))


def mixed_across_groups() -> ServersInMemory:
    return ServersInMemory(mix=lambda query, tags: np.random.default_rng().permutation(len(tags)))


def half_where_asked_in_part() -> ServersInMemory:
    def calibrate(budget: Budget, query: CountQuery) -> Laws:
        dummies, own = laws(budget, query)
        return (dummies, own) if query.horizon == 2 else (PoissonNoise(dummies.variance / 4), own)

    return ServersInMemory(calibrate=calibrate)


#: Every fault, and the test that must find it.
FAULTS: dict[Callable[[], ServersInMemory], str] = {
    no_dummies_on_one_counter: "noise law, coordinator",
    dummies_from_a_known_seed: "freshness, coordinator",
    dummies_from_few_seeds: "freshness, coordinator",
    coordinator_without_noise: "noise law, shuffler",
    coordinator_with_half_the_noise: "noise law, shuffler",
    coordinator_from_a_known_seed: "freshness, shuffler",
    the_same_noise_twice: "two servers",
    shared_by_all_counters: "independence, coordinator",
    users_first: "permutation",
    mixed_across_groups: "schema",
    half_where_asked_in_part: "partial queries",
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("budget", [BUDGET, Budget(4.0, 1e-2)], ids=str)
def test_the_sound_system_passes(budget: Budget) -> None:
    report = audit(budget, samples=200, level=1e-5, system=ServersInMemory())
    assert report.passed, str(report)
    assert report.epsilon_lower_bound <= budget.epsilon
    assert {finding.name.partition(", ")[2] for finding in report.tests} == {"", "coordinator", "shuffler"}
    assert report.as_dict()["refutable_epsilon"] is None


@pytest.mark.parametrize(("fault", "finds"), mostly_slow(FAULTS.items(), quick=2))
def test_a_planted_fault_is_found(fault: Callable[[], ServersInMemory], finds: str) -> None:
    report = audit(BUDGET, samples=SAMPLES, level=LEVEL, system=fault())
    assert finds in report.failures, str(report)


def test_noise_that_is_left_out_shows_in_epsilon_too() -> None:
    """Without the coordinator's noise the shuffler knows every count."""
    report = audit(Budget(1.0, 1e-5), samples=SAMPLES, level=LEVEL, system=coordinator_without_noise())
    assert report.epsilon_lower_bound > 2
    assert "epsilon, shuffler" in report.failures


def test_a_cut_that_the_accountant_ignores_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummies cut at four scales, an accountant that takes them for uncut ones: what an end gives away tells."""

    def calibrate(budget: Budget, query: CountQuery) -> Laws:
        dummies, own = laws(budget, query)
        assert isinstance(dummies, TruncatedLaplace)
        return TruncatedLaplace(dummies.scale, math.ceil(4 * dummies.scale)), own

    def ignorant(noise: Any, changed: int, participations: int = 1) -> Any:
        uncut = DiscreteLaplace(noise.scale) if isinstance(noise, TruncatedLaplace) else noise
        return privacy_loss(uncut, changed, participations)

    monkeypatch.setattr(bench, "privacy_loss", ignorant)
    report = audit(BUDGET, samples=100, level=LEVEL, system=ServersInMemory(calibrate=calibrate))
    assert "calibration, coordinator" in report.failures
    monkeypatch.undo()
    report = audit(BUDGET, samples=100, system=ServersInMemory(calibrate=calibrate))
    assert "calibration, coordinator" in report.failures


@pytest.mark.slow
def test_looking_at_many_thresholds_costs_confidence() -> None:
    """The bound on epsilon is below what the luckiest of them, had it been the only one, would show."""
    system, level = ServersInMemory(), 0.1
    small = bench.Bench(CountQuery.everything(system.problem))
    with system.begin(BUDGET, 20, small.query) as session:
        played = small.play(session, 200)
    assert not isinstance(played, str)
    for observer in (Observer(played, name) for name in session.laws):
        assert isinstance(observer.law, TruncatedLaplace | DiscreteLaplace), "of which epsilon is bounded that way"
        alone = [
            lowest_epsilon(*observer.error_rates(quantile), samples=200, delta=BUDGET.delta, level=level)
            for quantile in np.linspace(-1.5, 1.5, 41)
        ]
        assert 0 < observer.tests(BUDGET, level)[0] < max(alone)
