"""Privatizers: the only way from true counts to a learner. Constructed by name through `make`."""

from __future__ import annotations

from typing import Any

from shufflerl.privatizers.base import Privatizer
from shufflerl.registry import Entry, Registry

PRIVATIZERS = Registry(
    "privatizer",
    {
        "none": Entry("shufflerl.privatizers.none:NoPrivacy", "true counts, no privacy: the baseline"),
    },
)


def make(name: str, **parameters: Any) -> Privatizer:
    """The privatizer of that name."""
    privatizer: Privatizer = PRIVATIZERS.make(name, **parameters)
    return privatizer


__all__ = ["PRIVATIZERS", "Privatizer", "make"]
