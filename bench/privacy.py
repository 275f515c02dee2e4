"""What privacy costs: noise beside the central model's, the accountant's time, and a privatizer's beside simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bench.measure import Figure, medians, seconds
from shufflerl import MDP, Batch, CountPopulation, CountQuery, Mixture, envs, learners, privatizers
from shufflerl.mdp import Problem
from shufflerl.noise import PoissonNoise
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, paper_noise, paper_tau
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.protocol import Protocol
from shufflerl.privatizers.base import Workload
from shufflerl.privatizers.central import CentralToeplitz, CentralTree

DELTA = 1e-5


def run() -> list[Figure]:
    """Noise, calibration time, privatizing time, continual counting and messages per user."""
    return [*noise(), *accountant(), *privatizing(), *continual(), *messages()]


def noise() -> list[Figure]:
    """Poisson noise beside the central Gaussian at the same budget, and the paper's constants beside ours."""
    worst = max(
        (calibrate(Budget(epsilon, DELTA), k).sd / calibrate_gaussian(Budget(epsilon, DELTA), k).sd, epsilon, k)
        for epsilon in (0.1, 0.5, 1.0, 2.0)
        for k in (12, 22, 46, 100, 398)
    )
    _, epsilon, k = worst
    figures = [
        Figure.at_most(
            1.02,
            f"noise sd, worst of k >= 12 and epsilon <= 2 (k={k}, epsilon={epsilon:g})",
            "",
            calibrate(Budget(epsilon, DELTA), k).sd,
            calibrate_gaussian(Budget(epsilon, DELTA), k).sd,
            "central Gaussian",
        )
    ]
    for epsilon, changed in ((1.0, 22), (0.1, 22), (1.0, 2)):
        budget = Budget(epsilon, DELTA)
        paper = paper_noise(1000, paper_tau(budget, 6, 4, 2)).sd
        ours = calibrate(budget, changed).sd
        what = f"noise sd, H=6, epsilon={epsilon:g}, {changed} changed counters"
        figures.append(Figure.at_most(0.1, what, "", ours, paper, "the paper's constants"))
    return figures


def accountant() -> list[Figure]:
    """Time of the slowest calibration up to H=100 and of one evaluation of delta, caches emptied."""
    cases = [(Budget(epsilon, DELTA), 4 * horizon - 2) for epsilon in (0.01, 0.1, 1.0, 10.0) for horizon in (6, 100)]

    def uncached(action: Callable[[], object]) -> float:
        privacy_loss.cache_clear()
        calibrate.cache_clear()
        return seconds(action)

    calibration = max(uncached(lambda b=b, k=k: calibrate(b, k)) for b, k in cases)  # type: ignore[misc]
    means = [(calibrate(b, k).mean, b, k) for b, k in cases]
    delta = max(
        uncached(lambda m=m, b=b, k=k: privacy_loss(PoissonNoise(m), k).delta(b.epsilon))  # type: ignore[misc]
        for m, b, k in means
    )
    cached = seconds(lambda: calibrate(*cases[0]), 1000)
    return [
        Figure.under(1.0, "slowest calibration up to H=100", "s", calibration),
        Figure.under(0.1, "slowest evaluation of delta", "s", delta),
        Figure.at_most(0.01, "a cached calibration", "s", cached, calibration, "the slowest"),
    ]


def privatizing() -> list[Figure]:
    """Time to privatize a batch beside the time to simulate its counts, for few and many users."""
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    figures = []
    for name in ("shuffle", "central", "local"):
        for users in (10**3, 10**12):
            learner = learners.make("ucbvi", mdp.problem(10**4), 0)
            learner.reads_running_sums = False  # type: ignore[misc]
            privatizer = privatizers.make(name, learner, epsilon=1.0, delta=DELTA, seed=1)
            population = CountPopulation(mdp, 2)
            mixture = Mixture.single(np.ones((mdp.horizon, mdp.n_states), dtype=int))
            query = CountQuery.everything(mdp.problem(users))
            number = iter(range(10**9))

            def batch(users: int = users, mixture: Mixture = mixture, query: CountQuery = query) -> Batch:
                return Batch(next(number), users, mixture, query)  # noqa: B023

            privatizer.release(population.play(batch()))
            played = [population.play(batch()) for _ in range(600)]
            ready = iter(played)
            again = Batch(0, users, mixture, query)
            ours, peer = medians(
                5,
                lambda _: 1e3 * seconds(lambda: privatizer.release(next(ready)), 100),  # noqa: B023
                lambda _: 1e3 * seconds(lambda: population.play(again), 100),  # noqa: B023
            )
            figures.append(Figure.at_most(5, f"privatize {users:.0e} users, {name}", "ms", ours, peer, "simulate"))
    return figures


def continual() -> list[Figure]:
    """Noise of a running sum after 20,000 batches in units of one release's."""
    figures = []
    for kind, most in ((CentralToeplitz, 4.3), (CentralTree, 14.5)):
        workload = Workload(CountQuery.everything(Problem(6, 4, 2, 20_000)), 20_000, 0)
        factor = math.sqrt(kind(Budget(1.0, DELTA), workload).factors(0, 20_000).max())
        figures.append(
            Figure.at_most(most, f"continual counting, {kind.name}, T=20,000", "sd", factor, 1.0, "one release")
        )
    return figures


def messages() -> list[Figure]:
    """Messages per user against users: they fall towards the user's own tags as the crowd grows."""
    figures = []
    for states in (4, 20, 100):
        query = CountQuery.everything(Problem(6, states, 2, 1))
        noise = calibrate(Budget(1.0, DELTA), query.changed_counters)
        for users in (10**3, 10**5, 10**7):
            ours = Protocol(query, users, noise).messages_per_user
            paper = Protocol(query, users, paper_noise(users, paper_tau(Budget(1.0, DELTA), 6, states, 2)))
            what = f"messages per user, X={states}, {users:,} users"
            figures.append(Figure.at_most(1, what, "", ours, paper.messages_per_user, "the paper's constants"))
    return figures
