"""UCBVI (Azar, Osband & Munos 2017): plan optimistically on the counts so far, play, count, repeat.

With a private privatizer the bonus also covers the noise in the counts, after DP-UCBVI (Qiao & Wang 2023): an
additive term of the size of the noise over the number of visits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import StateMismatchError
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture, Problem
from shufflerl.registry import Entry
from shufflerl.seeding import Seed

if TYPE_CHECKING:
    from shufflerl.learners.ucbvi_kernels import Bonus


class UCBVI(Learner):
    """Optimistic value iteration on running sums of counts.

    `bonus` is "bernstein" (width from the estimated variance of the next value) or "hoeffding" (from its range);
    `scale` multiplies the bonus (1 is of the theory's size; the default 0.05 explores less and, on small problems,
    loses far less); `batch` is how many users play each policy, in the last batch also those too few for another: 1 as
    in the paper, more for a shuffler, whose noise is per batch, and for large problems, as it plans and sums up tables
    of X*A*X counters per step once per batch.
    """

    name: ClassVar[str] = "ucbvi"
    problem: Problem
    reads_running_sums: ClassVar[bool] = True
    #: What `loop` plays instead of single batches where it can.
    compiled_loop: ClassVar[Entry] = Entry("shufflerl.episodes:CompiledUCBVI.if_possible", "one user per batch")
    #: The probability of failure that enters the bonus, which is of the theory's form but not with its constants.
    failure: ClassVar[float] = 0.05

    def __init__(
        self,
        problem: Problem,
        seed: Seed,
        *,
        bonus: str = "bernstein",
        scale: float = 0.05,
        batch: int = 1,
    ) -> None:
        self.bonus = checks.choice("bonus", bonus, ("bernstein", "hoeffding"))
        self.scale = checks.real("scale", scale, above=0.0)
        self.batch = checks.whole("batch", batch, least=1)
        super().__init__(problem, seed, bonus=self.bonus, scale=self.scale, batch=self.batch)
        shape = (problem.n_states, problem.n_actions)
        self.moves: FloatArray = np.zeros((problem.horizon - 1, *shape, problem.n_states))
        self.pays: FloatArray = np.zeros((problem.horizon, *shape, 2))
        self.noise_variance = 0.0
        possible = np.ones(self.moves.shape, dtype=np.bool_) if problem.support is None else problem.support
        self.support = checks.frozen(possible)
        self.policy: PolicyArray = self.rng.integers(
            problem.n_actions, size=(problem.horizon, problem.n_states), dtype=np.int32
        )
        cells = problem.horizon * problem.n_states * problem.n_actions
        self.log_term = math.log(2 * cells * problem.episodes / self.failure)
        self.query = CountQuery.everything(problem)

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """See `Learner`."""
        return {"batch": max(min_users, (users or 0) // 11)}

    @property
    def max_batches(self) -> int:
        """One per policy played."""
        return max(1, self.problem.episodes // self.batch)

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        from shufflerl.learners.ucbvi_kernels import optimistic_policy

        value, after = np.zeros((2, self.problem.n_states))
        optimistic_policy(
            self.rng, self.moves, self.pays, self.noise_variance, self.compiled_bonus, self.policy, value, after
        )
        users = self.batch if self.episodes_left >= 2 * self.batch else self.episodes_left
        return users, Mixture.single(self.policy), self.query

    @property
    def compiled_bonus(self) -> Bonus:
        """What the compiled plan is told besides the counts and their noise."""
        from shufflerl.learners.ucbvi_kernels import Bonus

        return Bonus(self.support, self.bonus == "bernstein", self.scale, self.log_term)

    def _learn(self, release: Release) -> None:
        moves, pays = release.tables
        self.moves += moves
        self.pays += pays
        self.noise_variance += release.added_variance

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {"noise_variance": self.noise_variance}, {"moves": self.moves, "pays": self.pays, "policy": self.policy}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        for name in ("moves", "pays", "policy"):  # compiled code trusts their shapes
            mine, saved = getattr(self, name), arrays.get(name)
            if saved is None or (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
                raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")
        self.noise_variance = values["noise_variance"]
        self.moves, self.pays, self.policy = arrays["moves"], arrays["pays"], arrays["policy"]
