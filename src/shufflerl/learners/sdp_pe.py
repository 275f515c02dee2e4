"""SDP-PE: policy elimination in stages of growing batches (the paper's Algorithms 1 to 3).

Each stage explores crudely, step by step, until a rough model says where users can be led; explores finely, with a
mixture that covers what the remaining policies do; and eliminates the policies that are significantly worse than the
best: provably with the paper's radius, by the data's standard errors with the practical one.
Read this file beside the paper: `crude_exploration` is its Algorithm 2, `fine_exploration` its Algorithm 3 and
`policy_elimination` the end of Algorithm 1. They see releases only. What they judge by is in `radius`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks, policy_sets
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.counts import CountQuery, Release
from shufflerl.coverage import coverage_design
from shufflerl.errors import InvalidInputError
from shufflerl.learners.base import Learner, View
from shufflerl.learners.radius import DataRadius, PaperRadius, Radius
from shufflerl.learners.stages import StageRecord, split_evenly, stage_users
from shufflerl.mdp import Mixture, Problem
from shufflerl.policy_sets.product import ProductSet
from shufflerl.seeding import Seed

#: What `constants` stands for; every option can be set by itself.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "policies": "enumerated",
        "radius": "paper",
        "memory": "forget",
        "last_stage": "explore",
        "first": 2,
        "base": 2.0,
    },
    "practical": {
        "policies": "product",
        "radius": "data",
        "memory": "pool",
        "last_stage": "commit",
        "first": 11,
        "base": 1.7,
    },
}


class SDPPE(Learner):
    """Shuffle-private policy elimination; with the privatizer `none` it is PE, with one state and step a bandit.

    `constants` is a preset of the options below: "practical" (default) or "paper".
    `policies`: the policy set, "enumerated" (up to 2^24 policies) or "product" (actions per step and state, any size).
    `radius`: "paper" (printed constants, needs forgetting) or "data" (standard errors, needs the product set).
    `memory`: "forget" earlier stages, or "pool" all releases; a pooled model takes the place of crude exploration.
    `last_stage`: "explore" as in every stage, or "commit" to the best policy so far.
    `first` and `base`: L_b = first * base^(b-1). `deviations`: how many standard errors the data's radius is.
    `c`, `c1`, `failure`: the paper's C, C_1 and delta.
    """

    name: ClassVar[str] = "sdp-pe"
    problem: Problem

    def __init__(
        self,
        problem: Problem,
        seed: Seed,
        *,
        constants: str = "practical",
        policies: str | None = None,
        radius: str | None = None,
        memory: str | None = None,
        last_stage: str | None = None,
        first: int | None = None,
        base: float | None = None,
        deviations: float = 3.3,
        c: float = 1.0,
        c1: float = 6.0,
        failure: float = 0.05,
    ) -> None:
        preset = PRESETS[checks.choice("constants", constants, tuple(PRESETS))]
        chosen = {
            "policies": policies,
            "radius": radius,
            "memory": memory,
            "last_stage": last_stage,
            "first": first,
            "base": base,
        }
        options = preset | {name: value for name, value in chosen.items() if value is not None}
        checks.choice("policies", options["policies"], policy_sets.KINDS)
        checks.choice("radius", options["radius"], ("paper", "data"))
        checks.choice("memory", options["memory"], ("forget", "pool"))
        checks.choice("last_stage", options["last_stage"], ("explore", "commit"))
        checks.whole("first", options["first"], least=1)
        checks.real("base", options["base"], above=1.0)
        numbers = {
            "deviations": checks.real("deviations", deviations, above=0.0),
            "c": checks.real("c", c, above=0.0),
            "c1": checks.real("c1", c1, above=0.0),
            "failure": checks.real("failure", failure, above=0.0, below=1.0),
        }
        if options["radius"] == "data" and options["policies"] != "product":
            raise InvalidInputError("radius=data judges single actions and needs policies=product.")
        if options["radius"] == "paper" and options["memory"] != "forget":
            raise InvalidInputError("radius=paper is proven for one stage's data and needs memory=forget.")
        super().__init__(problem, seed, **options, **numbers)
        if problem.start is None:
            raise InvalidInputError(
                "SDP-PE plans from the law of the first state, which this environment does not tell; use ucbvi."
            )
        self.start: FloatArray = problem.start
        self.trace: list[StageRecord] = []  # of the stages done
        self._commits = options["last_stage"] == "commit"
        self.stages = stage_users(problem.episodes, options["first"], options["base"], self._commits)
        self._crude_steps = problem.horizon - 1 if options["memory"] == "forget" else 0
        self.policies = policy_sets.make(
            options["policies"], problem.horizon, problem.n_states, problem.n_actions, problem.start
        )
        self.radius: Radius = (
            PaperRadius(problem, self.rng, c=c, c1=c1, failure=failure, releases=self.max_batches)
            if options["radius"] == "paper"
            else DataRadius(problem, self.rng, forget=options["memory"] == "forget", deviations=deviations)
        )
        self._step = 0  # of crude exploration; past the last it is fine exploration's turn
        self._covers: list[PolicyArray] = []  # of the steps explored in this stage: the auxiliary policy
        self._coverage_ratio: float | None = None  # of the stage's design
        self._warm: Mixture | None = None
        self._begin_stage()

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """See `Learner`."""
        return {"first": -(-min_users // 3)}  # a stage has three times as many

    @property
    def max_batches(self) -> int:
        """One per step of crude exploration and one of fine exploration, in every stage."""
        return len(self.stages) * (self._crude_steps + 1)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One per stage done: a `StageRecord` as values by name."""
        return [record.as_dict() for record in self.trace]

    @property
    def _stage(self) -> int:
        return len(self.trace)

    @property
    def _commits_now(self) -> bool:
        """Whether this stage gives everyone the best policy so far, which the first cannot."""
        return self._commits and 0 < self._stage == len(self.stages) - 1

    def _begin_stage(self) -> None:
        self.radius.begin_stage()
        self._step = 0
        self._covers = []
        users = self.stages[self._stage]
        explores = self._crude_steps and not self._commits_now
        self._crude_users = split_evenly(users // 3, self._crude_steps) if explores else []
        self._skip_empty_steps()

    def _skip_empty_steps(self) -> None:
        """A step without users is not explored and releases nothing."""
        while self._step < len(self._crude_users) and self._crude_users[self._step] == 0:
            self._step += 1

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        if self._step < len(self._crude_users):
            return self.crude_exploration()
        return self.fine_exploration()

    def crude_exploration(self) -> tuple[int, Mixture, CountQuery]:
        """For every (x, a) the policy most likely to get there at this step, all of them equally often."""
        step = self._step
        cover, _ = self.policies.policy_cover(self.radius.exploration_model, self.start, step, self.rng)
        if self.radius.wants_auxiliary:
            self._covers.append(cover)
        return self._crude_users[step], _uniform(cover), CountQuery(self.problem, [step], [])

    def fine_exploration(self) -> tuple[int, Mixture, CountQuery]:
        """Deploy the coverage design and what the radius adds to it; in a last stage that commits, the best policy."""
        users = self.stages[self._stage] - sum(self._crude_users)
        query = CountQuery.everything(self.problem)
        self._coverage_ratio = None
        if self._commits_now:
            assert self.radius.incumbent is not None
            return users, Mixture.single(self.radius.incumbent), query
        model = self.radius.exploration_model
        design = coverage_design(self.policies, model, self.start, self.rng, warm_start=self._warm)
        self._warm, self._coverage_ratio = design.mixture, design.ratio
        auxiliary = None
        if self.radius.wants_auxiliary:
            last, _ = self.policies.policy_cover(model, self.start, self.problem.horizon - 1, self.rng)
            auxiliary = _uniform(np.concatenate([*self._covers, last]))
        return users, self.radius.fine_mixture(self.policies, design, auxiliary, users), query

    def _learn(self, release: Release) -> None:
        if self._step < len(self._crude_users):
            self.radius.learn_crude(release, self._step)
            self._step += 1
            self._skip_empty_steps()
        else:
            self.policy_elimination(release)

    def policy_elimination(self, release: Release) -> None:
        """Keep the policies that are not worse than the best beyond the radius, and go on to the next stage.

        A last stage that commits has explored nothing, so it judges nothing.
        """
        before, best = self.policies.log2_size, self.radius.best_value
        if not self._commits_now:
            assert self._waiting is not None
            # Where reports were left out, the stage is as short as if it had asked so many fewer.
            counted = self.stages[self._stage] * release.batch.users // self._waiting.users
            self.policies, best = self.radius.eliminate(self.policies, release, counted)
            self.radius.best_value = best
        self.trace.append(
            StageRecord(
                stage=self._stage + 1,
                users=self.stages[self._stage],
                log2_policies=before,
                coverage_ratio=self._coverage_ratio,
                radius=None if self._commits_now else self.radius.last,
                best_value=best,
                eliminated=before - self.policies.log2_size,
            )
        )
        if self._stage < len(self.stages):
            self._begin_stage()

    def view(self) -> View:
        """The estimated value of the best policy so far, and as details what is done and what is left.

        `stages`: those done, and all. `log2_policies`: how many policies are left. `actions[h][x]`: how many actions
        are, if the policy set is a product.
        """
        details: dict[str, Any] = {
            "stages": (self._stage, len(self.stages)),
            "log2_policies": self.policies.log2_size,
        }
        if isinstance(self.policies, ProductSet):
            details["actions"] = self.policies.allowed.sum(axis=-1)
        return View(self.radius.estimate(), details)

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        arrays = {f"policies.{name}": array for name, array in self.policies.state().items()}
        arrays |= {f"radius.{name}": array for name, array in self.radius.state().items()}
        optional = {
            "covers": np.concatenate(self._covers) if self._covers else None,
            "incumbent": self.radius.incumbent,
            "warm.policies": None if self._warm is None else self._warm.policies,
            "warm.weights": None if self._warm is None else self._warm.weights,
        }
        values = {
            "step": self._step,
            "best_value": self.radius.best_value,
            "radius": self.radius.last,
            "trace": self.records,
            "coverage_ratio": self._coverage_ratio,
        }
        return values, arrays | {name: array for name, array in optional.items() if array is not None}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        kind, problem = self.parameters["policies"], self.problem
        self.trace = [StageRecord(**record) for record in values["trace"]]
        self.policies = policy_sets.restore(
            kind, _under("policies.", arrays), problem.horizon, problem.n_states, problem.n_actions, self.start
        )
        if self._stage < len(self.stages):
            self._begin_stage()
        self._step, self._coverage_ratio = values["step"], values["coverage_ratio"]
        self.radius.load_state(_under("radius.", arrays))
        self.radius.incumbent = arrays.get("incumbent")
        self.radius.best_value, self.radius.last = values["best_value"], values["radius"]
        self._warm, self._covers = None, []
        if "covers" in arrays:
            pairs = problem.n_states * problem.n_actions
            self._covers = np.split(arrays["covers"], len(arrays["covers"]) // pairs)
        if "warm.policies" in arrays:
            self._warm = Mixture(arrays["warm.policies"], arrays["warm.weights"])


def _uniform(policies: PolicyArray) -> Mixture:
    return Mixture(policies, np.full(len(policies), 1 / len(policies)))


def _under(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
