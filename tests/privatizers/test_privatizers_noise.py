"""Every registered privatizer draws the noise that it promises; and each fault planted in one is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shufflerl import privatizers
from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery, Counts, Release
from shufflerl.errors import InvalidInputError
from shufflerl.noise import (
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    Part,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
)
from shufflerl.privacy.accounting import calibrate_gaussian, paper_noise
from shufflerl.privacy.mechanism import (
    CentralNoise,
    ContinualGaussian,
    LocalGaussian,
    Mechanism,
    ServersNoise,
    ShuffledBinomial,
    ShuffledPoisson,
)
from shufflerl.privatizers.base import AdditivePrivatizer, BudgetedPrivatizer
from shufflerl.privatizers.local import LocalSampled
from tests.contracts.budget import DELTA, Case, Make, check

#: Name and whether it serves a learner that reads running sums; "servers" is shuffle with the servers' noise.
KINDS = [
    (name, running) for name, _ in privatizers.PRIVATIZERS for running in (False, True) if running or name == "central"
] + [("servers", True)]

CASES = [
    Case(1, 1.0),
    Case(1, 3.0, ("part",)),
    Case(1000, 1.0),
    Case(20_000, 0.1),
    Case(20_000, 8.0),
    Case(20_000, 1.0, ("part",)),
    Case(1000, 1.0, ("most",)),
]
TWICE = [Case(1000, 1.0, ("all", "all", "all")), Case(1, 2.0, ("part", "part"))]
MIXED = [Case(1000, 1.0, ("part", "all"))]
HALF_HONEST = [Case(1000, 1.0, ("all",), {"gamma": 0.5}), Case(20_000, 2.0, ("part", "all"), {"gamma": 0.3})]


def cases(name: str, running: bool) -> list[Case]:
    more: list[Case] = []
    if name != "local-sampled":  # which refuses users who come back
        more += TWICE
        if not (name == "central-tree" or (name == "central" and running)):  # whose batches all ask the same
            more += MIXED
    return CASES + more + HALF_HONEST * (name == "shuffle")


def making(name: str, running: bool) -> Make:
    def make(case: Case, seed: int) -> BudgetedPrivatizer:
        times = {"participations": len(case.asks)} if len(case.asks) > 1 else {}
        learner, budget = case.learner(running_sums=running), {"epsilon": case.epsilon, "delta": DELTA}
        known, by = ("shuffle", {"noise": "servers"}) if name == "servers" else (name, {})
        parameters: dict[str, Any] = {**budget, **case.parameters, **times, **by}
        made = privatizers.make(known, learner, seed=seed, **parameters)
        assert isinstance(made, BudgetedPrivatizer)
        return made

    return make


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in KINDS if kind[0] != "none" for case in cases(*kind)], ids=str
)
def test_what_is_drawn_keeps_to_what_is_certified(kind: tuple[str, bool], case: Case) -> None:
    check(making(*kind), case)


def test_who_cannot_come_back_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="one participation"):
        making("local-sampled", True)(TWICE[0], 0)


Fault = Callable[[pytest.MonkeyPatch], None]

LARGE = Case(1000, 1.0)


def law_of(kind: type[Mechanism[Any]], faulty: Callable[[Any, CountQuery, int, Any], Noise]) -> Fault:
    """Another law is drawn and stated; what is charged stays as it was."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = kind._noise
        patch.setattr(kind, "_noise", lambda self, query, users: faulty(self, query, users, right(self, query, users)))

    return plant


def draws_of(kind: Any, factor: float, least_users: int = 1) -> Fault:
    """So much of the noise is added; all that is stated stays as it was."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right: Callable[[Any, Counts], Release] = kind.release

        def release(self: Any, counts: Counts) -> Release:
            good = right(self, counts)
            if counts.batch.users < least_users:
                return good
            return replace(good, values=counts.values + factor * (good.values - counts.values))

        patch.setattr(kind, "release", release)

    return plant


def flips(factor: float, least_users: int) -> Fault:
    """Bits of unary reports are flipped more rarely than is said."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = LocalSampled._estimate

        def estimate(self: Any, counts: Counts, noise: UnaryNoise) -> Any:
            fewer = replace(noise, flip=noise.flip * factor) if counts.batch.users >= least_users else noise
            return right(self, counts, fewer)

        patch.setattr(LocalSampled, "_estimate", estimate)

    return plant


def poisson(faulty: Callable[[FloatArray, float], FloatArray]) -> Fault:
    """Draws of large means are not Poisson's."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = PoissonNoise.sample

        def sample(self: PoissonNoise, rng: Any, size: Any) -> FloatArray:
            return faulty(right(self, rng, size), self.mean) if self.mean > 5000 else right(self, rng, size)

        patch.setattr(PoissonNoise, "sample", sample)

    return plant


def once(patch: pytest.MonkeyPatch) -> None:
    """Certificates that always say one participation."""
    right = BudgetedPrivatizer.certificate
    patch.setattr(BudgetedPrivatizer, "certificate", lambda *about: replace(right(*about), participations=1))


def columns_once(patch: pytest.MonkeyPatch) -> None:
    """Continual noise for a user who is in one batch, charged as for all."""
    patch.setattr(
        ContinualGaussian, "_noise", lambda self, query, _: calibrate_gaussian(self.budget, query.changed_counters)
    )


def halved(_: Any, __: CountQuery, users: int, law: Noise) -> Noise:
    return type(law)(law.mean / 2) if users >= 1000 and isinstance(law, PoissonNoise) else law


def at_half(law: Part) -> Part:
    """Two of these add up to what one server's noise should be."""
    return PoissonNoise(law.mean / 2) if isinstance(law, PoissonNoise) else DiscreteLaplace(law.sd / 2)


def cut_short(law: Part) -> Part:
    """Of the dummies that one counter in ten thousand would get, none."""
    assert isinstance(law, TruncatedLaplace)
    return TruncatedLaplace(law.scale, math.ceil(9 * law.scale))


SERVERS = ("servers", True)
CENTRAL, TOEPLITZ, TREE = ("central", False), ("central", True), ("central-tree", True)
SHUFFLE, PAPER, LOCAL, SAMPLED = (("shuffle", True), ("shuffle-paper", True), ("local", True), ("local-sampled", True))

FAULTS: dict[str, tuple[tuple[str, bool], Case, Fault]] = {
    "local, not by the root of users": (
        LOCAL,
        LARGE,
        law_of(LocalGaussian, lambda _, __, users, law: GaussianNoise(law.sd / math.sqrt(users))),
    ),
    "local, one participation": (
        LOCAL,
        TWICE[0],
        law_of(LocalGaussian, lambda self, _, __, law: GaussianNoise(law.sd / math.sqrt(self.participations))),
    ),
    "central, 0.9 drawn": (CENTRAL, LARGE, draws_of(AdditivePrivatizer, 0.9)),
    "central, 0.9 drawn and stated": (
        CENTRAL,
        LARGE,
        law_of(CentralNoise, lambda _, __, ___, law: DiscreteLaplace(0.9 * law.scale)),
    ),
    "paper, half of tau, few users": (
        PAPER,
        LARGE,
        law_of(ShuffledBinomial, lambda self, query, users, _: paper_noise(users, self.tau(query) / 2)),
    ),
    "paper, half of tau, many users": (
        PAPER,
        Case(20_000, 8.0),
        law_of(ShuffledBinomial, lambda self, query, users, _: paper_noise(users, self.tau(query) / 2)),
    ),
    "shuffle, half of the mean for many users": (SHUFFLE, LARGE, law_of(ShuffledPoisson, halved)),
    "shuffle, the honest alone": (
        SHUFFLE,
        HALF_HONEST[0],
        law_of(ShuffledPoisson, lambda self, _, __, law: PoissonNoise(law.variance * self.honest_fraction)),
    ),
    "shuffle, one participation": (
        SHUFFLE,
        TWICE[0],
        law_of(ShuffledPoisson, lambda self, _, __, law: PoissonNoise(law.variance / self.participations)),
    ),
    "shuffle, halved beyond 5,000": (SHUFFLE, Case(20_000, 0.1), poisson(lambda draws, mean: draws / 2 - mean / 2)),
    "shuffle, the mean beyond 5,000": (SHUFFLE, Case(20_000, 0.1), poisson(lambda draws, _: np.zeros_like(draws))),
    "servers, no noise of the coordinator's": (
        SERVERS,
        LARGE,
        law_of(ServersNoise, lambda _, __, ___, law: NoiseSum(law.parts[:1])),
    ),
    "servers, half of the budget each": (
        SERVERS,
        LARGE,
        law_of(ServersNoise, lambda _, __, ___, law: NoiseSum(tuple(map(at_half, law.parts)))),
    ),
    "servers, a cut that nobody accounts for": (
        SERVERS,
        Case(1000, 1.0, ("part",)),
        law_of(ServersNoise, lambda _, __, ___, law: NoiseSum((cut_short(law.parts[0]), law.parts[1]))),
    ),
    "toeplitz, one participation": (TOEPLITZ, TWICE[0], columns_once),
    "tree, one participation": (TREE, TWICE[0], columns_once),
    "sampled, fewer flips of many users": (SAMPLED, LARGE, flips(0.8, 1000)),
    "sampled, fewer flips of one": (SAMPLED, Case(1, 1.0), flips(0.8, 1)),
} | {
    f"{name}, {what}": fault
    for name, kind in (
        ("shuffle", SHUFFLE),
        ("paper", PAPER),
        ("central", CENTRAL),
        ("toeplitz", TOEPLITZ),
        ("tree", TREE),
        ("local", LOCAL),
        ("servers", SERVERS),
    )
    for what, fault in (
        ("half of the noise for many users", (kind, LARGE, draws_of(AdditivePrivatizer, 0.5, 1000))),
        ("certified once", (kind, TWICE[0], once)),
    )
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, case, plant = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(making(*kind), case)
