"""The shuffle model: a shuffler mixes the batch, the coordinator sees the sum; users add its noise, or the servers."""

from __future__ import annotations

from shufflerl import checks
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import ServersNoise, ShuffledBinomial, ShuffledPoisson
from shufflerl.privatizers.base import AdditivePrivatizer, Workload


def shuffle(
    budget: Budget, workload: Workload, *, noise: str = "users", gamma: float = 1.0, participations: int = 1
) -> AdditivePrivatizer:
    """Noise by the users, Poisson one-bits, or by both servers, each enough alone.

    `gamma` is the fraction of users assumed to add their noise; nothing rests on users where the servers do.
    """
    by_users = checks.choice("noise", noise, ("users", "servers")) == "users"
    mechanism = (ShuffledPoisson if by_users else ServersNoise)(budget, participations, checks.fraction("gamma", gamma))
    return AdditivePrivatizer(mechanism, workload)


def shuffle_paper(budget: Budget, workload: Workload, *, participations: int = 1) -> AdditivePrivatizer:
    """The paper's binomial noise bits with the paper's constants."""
    return AdditivePrivatizer(ShuffledBinomial(budget, participations), workload)
