"""The settings of a run: what is learned, how, and at which price."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shufflerl import checks, learners
from shufflerl.counts import Query
from shufflerl.errors import InvalidInputError
from shufflerl.learners.base import Learner
from shufflerl.mdp import Problem
from shufflerl.network.protocol import agreement
from shufflerl.network.protocol.agreement import NoiseBy
from shufflerl.privacy.accounting import Budget, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.mechanism import ServersNoise, ShuffledPoisson
from shufflerl.returns import ReturnProblem


@dataclass(frozen=True)
class Run:
    """What is learned, how, and at which price: fixed for the life of a run.

    `noise`: who adds it; `honest_fraction`: the share of users who do, where users add it; `transport`: how reports
    travel, "auto" whatever is cheaper for each batch; `excludable`: the share of masked vectors that may be left out of
    a sum; where users add the noise all others make up for theirs. `admission`: how many times the users of a batch are
    drawn for it by lot, of all who are `enrolled` and have not played; without it, whoever comes first takes part.
    """

    problem: Problem | ReturnProblem
    learner: str
    budget: Budget
    seed: int
    learner_parameters: dict[str, Any] = field(default_factory=dict)
    honest_fraction: float = 1.0
    transport: Literal["auto", "tags", "sums"] = "tags"
    excludable: float = 0.01
    noise: NoiseBy = "servers"
    admission: float | None = None
    enrolled: int | None = None

    def __post_init__(self) -> None:
        checks.choice("noise", self.noise, ("users", "servers"))
        checks.fraction("honest_fraction", self.honest_fraction)
        if self.noise == "servers" and self.honest_fraction < 1:
            raise InvalidInputError(
                f"honest_fraction is {self.honest_fraction:g}, but with noise by the servers nothing rests on users; "
                'leave it out, or set noise = "users".'
            )
        checks.choice("transport", self.transport, ("auto", "tags", "sums"))
        if checks.real("excludable", self.excludable, above=0, closed=True) >= self.honest_fraction:
            raise InvalidInputError(
                f"excludable is {self.excludable:g}; expected less than the honest fraction, {self.honest_fraction:g}: "
                "somebody's noise must be left to rely on."
            )
        if self.admission is not None:
            checks.real("admission", self.admission, above=1, closed=True)
        elif self.enrolled is not None:
            raise InvalidInputError(
                f"enrolled is {self.enrolled}, but nobody is drawn among them; set admission too, such as 2."
            )
        if self.enrolled is not None:
            checks.whole("enrolled", self.enrolled, least=self.problem.episodes)
        warn_if_weak(self.budget, self.problem.episodes)

    def drawn(self, users: int, played: int, late: int) -> float:
        """The share of all tokens that is drawn for a batch of so many users, after so many have played.

        Twice as many for each attempt that was too `late`: of those who were drawn for it too few came.
        """
        if self.admission is None:
            return 1.0
        left = max(1, (self.enrolled or self.problem.episodes) - played)
        return min(1.0, self.admission * users * 2.0 ** min(late, 64) / left)

    @property
    def identity(self) -> str:
        """Text that is equal for equal runs."""
        return json.dumps(
            {
                "problem": self.problem.fingerprint,
                "learner": self.learner,
                "parameters": self.learner_parameters,
                "epsilon": self.budget.epsilon,
                "delta": self.budget.delta,
                "honest_fraction": self.honest_fraction,
                "transport": self.transport,
                "excludable": self.excludable,
                "noise": self.noise,
                "seed": self.seed,
                **({} if self.admission is None else {"admission": self.admission, "enrolled": self.enrolled}),
            },
            sort_keys=True,
        )

    def mechanism(self, excludable: float = 0.0) -> ShuffledPoisson | ServersNoise:
        """How batches are made private of which this share of the users may be left out."""
        return agreement.mechanism(self.noise, self.budget, self.honest_fraction, excludable)

    def make_learner(self) -> Learner:
        """The learner at its beginning, told of the noise to come."""
        learner = learners.make(self.learner, self.problem, self.seed, **self.learner_parameters)
        learner.expect(self.mechanism().noise(learner.widest_query))
        return learner

    def certificate(self, query: Query) -> Certificate:
        """What every user is guaranteed where this is the widest query: all that the budget allows."""
        excludable = 0.0 if self.transport == "tags" else self.excludable
        certificate = self.mechanism(excludable).certificate(query)
        if self.transport == "tags":
            return certificate
        what, noise = "one count per family and step", "; noise by shuffler and coordinator, each enough alone"
        if self.noise == "users":
            what, noise = "counts of one-bit messages with Poisson noise tags", ""
        sums = f"{what}, added up under masks per batch, up to {excludable:g} of the reports left out{noise}"
        mechanism = sums if self.transport == "sums" else f"{certificate.mechanism}; or {sums}"
        if self.noise == "servers":
            return replace(certificate, mechanism=mechanism)
        others = [name for name in certificate.assumptions if self.transport == "auto" or name != "honest shuffler"]
        return replace(certificate, mechanism=mechanism, assumptions=(*others, "adding shuffler"))


def differences(old: str, new: str) -> str:
    """Which settings differ between two runs' identities, and how."""
    was, now = _settings(old), _settings(new)
    return ", ".join(
        f"{name} was {json.dumps(was.get(name))} and is {json.dumps(now.get(name))} now"
        for name in sorted(was | now)
        if was.get(name) != now.get(name)
    )


def _settings(identity: str) -> dict[str, Any]:
    """What `Run.identity` holds, by the names that the settings have."""
    settings = json.loads(identity)
    parameters = {f"learner_parameters.{name}": value for name, value in settings.pop("parameters").items()}
    return {**settings.pop("problem"), **parameters, **settings}
