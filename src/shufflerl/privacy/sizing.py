"""Answers before a deployment: how much noise a budget needs, what a noise guarantees, how many messages it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shufflerl import checks
from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Problem
from shufflerl.privacy.accounting import Budget, privacy_loss, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.mechanism import ShuffledBinomial, ShuffledPoisson, StatedPoisson
from shufflerl.privacy.protocol import Protocol


def size_up(
    epsilon: float, delta: float, *, horizon: int, states: int, actions: int, users: int, gamma: float
) -> dict[str, Any]:
    """Noise and messages for a full release at a budget; under "paper" the same for the paper's constants.

    `epsilon` is the budget, under "paper" what its noise delivers; `true_epsilon` is the accountant's figure in both,
    infinite if no epsilon can be certified. Figures of a noise too large to draw are None.
    """
    budget = Budget(epsilon, delta)
    warn_if_weak(budget, checks.whole("users", users, least=1))
    query = CountQuery.everything(Problem(horizon, states, actions, users))
    changed = query.changed_counters
    mechanism = ShuffledPoisson(budget, honest_fraction=checks.fraction("gamma", gamma))
    protocol = Protocol(query, users, mechanism.noise(query), gamma)
    true_epsilon = privacy_loss(mechanism.charge(query).noise, changed).epsilon(delta)
    paper, paper_epsilon = _paper_protocol(query, users, budget), None
    if paper is not None:
        paper_epsilon = privacy_loss(paper.noise, changed).epsilon(delta)

    def figures(epsilon: float | None, true_epsilon: float | None, protocol: Protocol | None) -> dict[str, Any]:
        return {
            "epsilon": epsilon,
            "true_epsilon": true_epsilon,
            "delta": delta,
            "changed_counters": changed,
            "lambda": None if protocol is None else protocol.noise.mean,
            "noise_sd": None if protocol is None else protocol.noise.sd,
            "messages_per_user": None if protocol is None else protocol.messages_per_user,
        }

    return figures(epsilon, true_epsilon, protocol) | {"paper": figures(paper_epsilon, paper_epsilon, paper)}


def _paper_protocol(query: CountQuery, users: int, budget: Budget) -> Protocol | None:
    """What the paper's constants ask for; None where that is no noise that can be drawn."""
    try:
        return Protocol(query, users, ShuffledBinomial(budget).noise(query, users))
    except InvalidInputError:  # users and budget are good: it is the number of bits, or their probability, that is not
        return None


def certificate_of(
    poisson_mean: float, delta: float, *, horizon: int, gamma: float, participations: int
) -> Certificate:
    """The certificate of a full release with this much Poisson noise on every counter, all users' together."""
    # Sensitivity does not depend on the number of states or actions: one counter per family and step.
    query = CountQuery.everything(Problem(horizon, 1, 1, 1))
    stated = StatedPoisson(Budget(1.0, delta), participations, checks.fraction("gamma", gamma), mean=poisson_mean)
    return replace(stated.certificate(query), budget_epsilon=None)
