"""Privatizers: the only way from true counts to a learner. Constructed by name through `make`."""

from __future__ import annotations

from typing import Any

from shufflerl.errors import InvalidInputError
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.ledger import Ledger
from shufflerl.privatizers.base import Analyst, Privatizer, Workload
from shufflerl.registry import Entry, Registry
from shufflerl.seeding import Seed

PRIVATIZERS = Registry(
    "privatizer",
    {
        "none": Entry("shufflerl.privatizers.none:NoPrivacy", "true counts, no privacy: the baseline"),
        "shuffle": Entry(
            "shufflerl.privatizers.shuffle:shuffle", "shuffle model, noise by users or servers, exact accounting"
        ),
        "shuffle-paper": Entry(
            "shufflerl.privatizers.shuffle:shuffle_paper", "shuffle model with the paper's constants"
        ),
        "central": Entry(
            "shufflerl.privatizers.central:central", "trusted server: noise per batch, or continual counting"
        ),
        "central-tree": Entry(
            "shufflerl.privatizers.central:CentralTree", "trusted server, continual counting by binary tree"
        ),
        "local": Entry("shufflerl.privatizers.local:local", "no trust, Gaussian noise per user"),
        "local-sampled": Entry(
            "shufflerl.privatizers.local:LocalSampled", "no trust, one step per user, unary encoding"
        ),
    },
    given=2,  # a budget and a workload
    makes=(Privatizer,),
    group="shufflerl.privatizers",
)


def make(
    name: str,
    learner: Analyst | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: Seed | None = None,
    ledger: Ledger | None = None,
    **parameters: Any,
) -> Privatizer:
    """The privatizer of that name for a learner, at (epsilon, delta); `none` needs nothing but its name.

    "module:my_privatizer" is a name too: a function of a `Budget` and a `Workload`, and of the parameters.
    It serves the learner from the batch on that comes next: after a restart, restore the learner first.
    """
    PRIVATIZERS.entry(name)
    if name == "none":
        if epsilon is not None or delta is not None:
            raise InvalidInputError("The privatizer 'none' protects nothing and takes no epsilon or delta; drop them.")
        privatizer: Privatizer = PRIVATIZERS.make(name, **parameters)
        return privatizer
    if epsilon is None or delta is None:
        raise InvalidInputError(f"The privatizer {name!r} needs a budget; give epsilon (say 1) and delta (say 1e-5).")
    if learner is None or seed is None:
        raise InvalidInputError(f"The privatizer {name!r} needs the learner it serves and a seed; give both.")
    workload = Workload.of(learner, seed, ledger)
    privatizer = PRIVATIZERS.make(name, Budget(epsilon, delta), workload, **parameters)
    return privatizer


__all__ = ["PRIVATIZERS", "Privatizer", "make"]
