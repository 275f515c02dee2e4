"""Answers before a deployment: how much noise a budget needs, what a noise guarantees, how many messages it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shufflerl import checks
from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Problem
from shufflerl.noise import BinomialNoise, PoissonNoise, TruncatedLaplace
from shufflerl.privacy.accounting import Budget, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ServersNoise, ShuffledBinomial, ShuffledPoisson, StatedPoisson, StatedServers
from shufflerl.privacy.protocol import Protocol

#: Who may add the noise.
SOURCES = ("users", "servers")

_LAWS = {PoissonNoise: "poisson", TruncatedLaplace: "discrete laplace", BinomialNoise: "binomial"}


def size_up(
    epsilon: float,
    delta: float,
    *,
    horizon: int,
    states: int,
    actions: int,
    users: int,
    gamma: float = 1.0,
    noise: str = "users",
) -> dict[str, Any]:
    """Noise and messages for a full release at a budget; under "paper" the same for the paper's constants.

    `epsilon` is the budget, under "paper" what its noise delivers; `true_epsilon` is the accountant's figure in both,
    infinite if no epsilon can be certified. `law` and `lambda` are of the noise tags on a counter, and how many they
    are on average: of all users together, or of one server; `noise_sd` is of all noise, both servers'. Figures of a
    noise too large to draw are None.
    """
    budget = Budget(epsilon, delta)
    warn_if_weak(budget, checks.whole("users", users, least=1))
    query = CountQuery.everything(Problem(horizon, states, actions, users))
    changed = query.changed_counters
    gamma = checks.fraction("gamma", gamma)
    by_users = checks.choice("noise", noise, SOURCES) == "users"
    mechanism = (ShuffledPoisson if by_users else ServersNoise)(budget, honest_fraction=gamma)
    true_epsilon = mechanism.charge(query).epsilon(budget)

    def figures(epsilon: float | None, true_epsilon: float | None, **noise: Any) -> dict[str, Any]:
        known = {"lambda": None, "noise_sd": None, "messages_per_user": None, "law": "binomial"} | noise
        told = {"epsilon": epsilon, "true_epsilon": true_epsilon, "delta": delta, "changed_counters": changed}
        return told | known

    def sent(protocol: Protocol) -> dict[str, Any]:
        law = protocol.noise
        messages = protocol.messages_per_user
        return {"lambda": law.mean, "noise_sd": law.sd, "messages_per_user": messages, "law": _LAWS[type(law)]}

    if isinstance(mechanism, ServersNoise):
        dummies, messages = mechanism.dummies(query), float(query.touched_counters)
        sd, law = mechanism.noise(query).sd, _LAWS[type(dummies)]
        own = {"lambda": dummies.mean, "noise_sd": sd, "messages_per_user": messages, "law": law}
    else:
        own = sent(Protocol(query, users, mechanism.noise(query), gamma))
    paper, paper_epsilon = _paper_protocol(query, users, budget), None
    if paper is not None:
        paper_epsilon = privacy_loss(paper.noise, changed).epsilon(delta)
    theirs = figures(paper_epsilon, paper_epsilon, **({} if paper is None else sent(paper)))
    return figures(epsilon, true_epsilon, **own) | {"paper": theirs}


def _paper_protocol(query: CountQuery, users: int, budget: Budget) -> Protocol | None:
    """What the paper's constants ask for; None where that is no noise that can be drawn."""
    try:
        return Protocol(query, users, ShuffledBinomial(budget).noise(query, users))
    except InvalidInputError:  # users and budget are good: it is the number of bits, or their probability, that is not
        return None


def certificate_of(
    poisson_mean: float | None,
    delta: float,
    *,
    horizon: int,
    gamma: float = 1.0,
    participations: int = 1,
    noise: str = "users",
    scale: float | None = None,
    shift: int | None = None,
) -> Certificate:
    """The certificate of a full release with this noise on every counter: all users' together, or each server's.

    Poisson noise of a mean; servers may draw discrete Laplace noise of a scale instead, dummies cut at a shift.
    """
    # Sensitivity does not depend on the number of states or actions: one counter per family and step.
    query = CountQuery.everything(Problem(horizon, 1, 1, 1))
    rest = (Budget(1.0, delta), participations, checks.fraction("gamma", gamma))
    by_users = checks.choice("noise", noise, SOURCES) == "users"
    stated: StatedPoisson | StatedServers
    if poisson_mean is not None and scale is None and shift is None:
        law: PoissonNoise | TruncatedLaplace = PoissonNoise(poisson_mean)
        stated = StatedPoisson(*rest, mean=law.mean) if by_users else StatedServers(*rest, law=law)
    elif poisson_mean is None and scale is not None and shift is not None and not by_users:
        law = TruncatedLaplace(scale, shift)
        stated = StatedServers(*rest, law=law)
    else:
        raise InvalidInputError(
            "Which noise is not clear; expected a mean (--lambda) of Poisson noise or, where the servers add it "
            "(--noise servers), a scale and a shift of Laplace noise. Give one or the other."
        )
    return replace(stated.certificate(query), budget_epsilon=None)
