"""A user's own learner, as small as can be."""

from __future__ import annotations

from typing import Any, ClassVar

from numpy.typing import NDArray

from shufflerl.counts import CountQuery, Release
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture, Problem
from shufflerl.seeding import Seed


class Guess(Learner):
    """Deploys random policies. It learns nothing,
    and says so.

    Nobody should use it.
    """

    name: ClassVar[str] = "guess"
    problem: Problem

    def __init__(self, task: Problem, seed: Seed, batches: int = 5) -> None:
        super().__init__(task, seed, batches=batches)
        self.batches = batches

    @property
    def max_batches(self) -> int:
        return self.batches + 1

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        policy = self.rng.integers(self.problem.n_actions, size=(self.problem.horizon, self.problem.n_states))
        users = min(self.episodes_left, -(-self.problem.episodes // self.batches))
        return users, Mixture.single(policy), CountQuery.everything(self.problem)

    def _learn(self, release: Release) -> None:
        pass

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {}, {}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        pass
