"""Answers before a deployment: how much noise a budget needs, what a noise guarantees, how many messages it takes."""

from __future__ import annotations

from typing import Any

from shufflerl import checks
from shufflerl.counts import CountQuery
from shufflerl.mdp import Problem
from shufflerl.privacy.accounting import Budget, calibrate, paper_noise, paper_tau, privacy_loss, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.noise import PoissonNoise
from shufflerl.privacy.protocol import Protocol
from shufflerl.privatizers.shuffle import Shuffle


def size_up(
    epsilon: float, delta: float, *, horizon: int, states: int, actions: int, users: int, gamma: float
) -> dict[str, Any]:
    """Noise and messages for a full release at a budget; under "paper" the same for the paper's constants."""
    budget = Budget(epsilon, delta)
    warn_if_weak(budget, checks.whole("users", users, least=1))
    query = CountQuery.everything(Problem(horizon, states, actions, users))
    honest = calibrate(budget, query.changed_counters)
    noise = PoissonNoise(honest.mean / checks.fraction("gamma", gamma))
    paper = paper_noise(users, paper_tau(budget, horizon, states, actions))

    def figures(true_epsilon: float, protocol: Protocol) -> dict[str, Any]:
        return {
            "epsilon": true_epsilon,
            "delta": delta,
            "changed_counters": query.changed_counters,
            "lambda": protocol.noise.mean,
            "noise_sd": protocol.noise.sd,
            "messages_per_user": protocol.messages_per_user,
        }

    true_epsilon = privacy_loss(paper, query.changed_counters).epsilon(delta)
    return figures(epsilon, Protocol(query, users, noise)) | {
        "paper": figures(true_epsilon, Protocol(query, users, paper))
    }


def certificate_of(
    poisson_mean: float, delta: float, *, horizon: int, gamma: float, participations: int
) -> Certificate:
    """The certificate of a full release with this much Poisson noise on every counter, all users' together."""
    noise = PoissonNoise(poisson_mean)
    # Sensitivity does not depend on the number of states or actions: one counter per family and step.
    query = CountQuery.everything(Problem(horizon, 1, 1, 1))
    honest = PoissonNoise(noise.mean * checks.fraction("gamma", gamma))
    times = checks.whole("participations", participations, least=1)
    return Certificate(
        epsilon=privacy_loss(honest, query.changed_counters, times).epsilon(Budget(1.0, delta).delta),
        delta=delta,
        budget_epsilon=None,
        model=Shuffle.model,
        mechanism=Shuffle.mechanism,
        noise_sd=noise.sd,
        changed_counters=query.changed_counters * times,
        participations=times,
        honest_fraction=gamma,
        assumptions=Shuffle.assumptions,
    )
