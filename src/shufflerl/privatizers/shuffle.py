"""The shuffle model: every user adds a little noise, a shuffler mixes the batch, the coordinator sees the sum."""

from __future__ import annotations

from shufflerl import checks
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import ShuffledBinomial, ShuffledPoisson
from shufflerl.privatizers.base import AdditivePrivatizer, Service


def shuffle(budget: Budget, service: Service, *, gamma: float = 1.0, participations: int = 1) -> AdditivePrivatizer:
    """Poisson one-bits; `gamma` is the fraction of users assumed to add their noise."""
    return AdditivePrivatizer(ShuffledPoisson(budget, participations, checks.fraction("gamma", gamma)), service)


def shuffle_paper(budget: Budget, service: Service, *, participations: int = 1) -> AdditivePrivatizer:
    """The paper's binomial noise bits with the paper's constants."""
    return AdditivePrivatizer(ShuffledBinomial(budget, participations), service)
