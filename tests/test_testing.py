"""The suite that users' own learners are held to: a sound one passes, and planted faults are caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shufflerl.learners.base import Learner, View
from shufflerl.mdp import Mixture, Problem
from shufflerl.testing import LearnerContract
from tests.support.guess import Guess


class TestContract(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return Guess(problem, seed)


class Forgets(Guess):
    """What it remembers of batches is not saved."""

    def __init__(self, problem: Problem, seed: Any, batches: int = 5) -> None:
        super().__init__(problem, seed, batches)
        self.last = 0.0

    def _learn(self, release: Any) -> None:
        self.last = float(release.values.sum())

    def _plan(self) -> Any:
        users, mixture, query = super()._plan()
        return (users, Mixture.single(0 * mixture.policies[0]), query) if self.last else (users, mixture, query)


class Global(Guess):
    """Draws from a generator that is not its own."""

    shared = np.random.default_rng(0)

    def _plan(self) -> Any:
        users, mixture, query = super()._plan()
        return users, Mixture.single(self.shared.integers(2, size=mixture.policies[0].shape)), query


class Wasteful(Guess):
    """Leaves episodes unplayed."""

    def next_batch(self) -> Any:
        return super().next_batch() if self.batches_observed < 2 else None


class Talks(Guess):
    """Tells numbers of NumPy."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return [{"value": np.float64(1.0)}]

    def view(self) -> View:
        return View()


@pytest.mark.parametrize(
    ("faulty", "contract"),
    [
        (Forgets, "test_save_and_restore_in_the_middle_changes_nothing"),
        (Global, "test_decisions_depend_on_releases_alone"),
        (Talks, "test_what_it_tells_can_be_encoded_at_every_point_of_a_run"),
    ],
)
def test_a_planted_fault_is_caught(faulty: type[Guess], contract: str) -> None:
    class Suite(LearnerContract):
        def make(self, problem: Problem, seed: int = 0) -> Learner:
            return faulty(problem, seed)

    from shufflerl.population import CountPopulation

    arguments = (CountPopulation, False) if "restore" in contract else ()
    with pytest.raises(AssertionError):
        getattr(Suite(), contract)(*arguments)
