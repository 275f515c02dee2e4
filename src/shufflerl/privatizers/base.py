"""The contract of a privatizer: true counts in, a release out."""

from __future__ import annotations

from typing import ClassVar, Protocol

from shufflerl.counts import Counts, Release


class Privatizer(Protocol):
    """Turns the true counts of a batch into what a learner may see."""

    name: ClassVar[str]

    def release(self, counts: Counts) -> Release:
        """Answer the batch that the counts belong to."""
        ...
