"""How SDP-PE judges policies: by the paper's radius, or by the standard errors of its data.

A radius keeps what one stage (or all of them) has learned. It gives crude exploration a model to explore by, tells
fine exploration what to deploy besides the coverage design, and eliminates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.counts import Release
from shufflerl.coverage import Design
from shufflerl.estimation import PrivateCounts, consistent, precision
from shufflerl.estimation.model import Evidence
from shufflerl.learners.base import Estimate
from shufflerl.mdp import Mixture, Problem
from shufflerl.policy_sets import PolicySet
from shufflerl.policy_sets.product import ProductSet


class Radius(ABC):
    """What was learned, and how sure it is."""

    #: Whether fine exploration also deploys the auxiliary policy, a mixture of all policy covers of the stage.
    wants_auxiliary: ClassVar[bool]
    #: The radius of the last elimination; None where every action has its own.
    last: float | None = None
    #: The estimated value of the best policy at the last elimination: the largest of many estimates, so biased upwards.
    best_value: float = 0.0

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        assert problem.start is not None
        self.problem = problem
        self.start = problem.start
        self.rng = rng
        self.incumbent: PolicyArray | None = None  # the best policy so far

    @abstractmethod
    def begin_stage(self) -> None:
        """Forget what is to be forgotten."""

    @abstractmethod
    def learn_crude(self, release: Release, step: int) -> None:
        """Take in the transitions of one step."""

    @property
    @abstractmethod
    def exploration_model(self) -> FloatArray:
        """Transitions to explore by; rows that are not known lead nowhere."""

    @abstractmethod
    def fine_mixture(self, policies: PolicySet, design: Design, auxiliary: Mixture | None, users: int) -> Mixture:
        """What fine exploration deploys."""

    @abstractmethod
    def eliminate(self, policies: PolicySet, release: Release, users: int) -> tuple[PolicySet, float]:
        """Take in the fine release; the policies that stay, and the estimated value of the best of them."""

    @abstractmethod
    def estimate(self) -> Estimate | None:
        """What the incumbent is thought to earn; None before there is one."""

    @abstractmethod
    def state(self) -> dict[str, NDArray[Any]]:
        """What must survive a restart."""

    @abstractmethod
    def load_state(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `state` gave."""


class PaperRadius(Radius):
    """The paper's constants as printed: infrequent tuples, the absorbing MDP, one radius for all policies."""

    wants_auxiliary: ClassVar[bool] = True

    def __init__(
        self, problem: Problem, rng: np.random.Generator, *, c: float, c1: float, failure: float, releases: int
    ) -> None:
        super().__init__(problem, rng)
        self.c, self.c1 = c, c1
        self.failure = failure / releases  # of each release's precision, so that all hold together
        self.iota = math.log(2 * problem.horizon * problem.n_actions * problem.episodes / failure)
        shape = (problem.horizon - 1, problem.n_states, problem.n_actions, problem.n_states)
        self.infrequent = np.ones(shape, dtype=np.bool_)
        self.crude: FloatArray = np.zeros(shape)

    def begin_stage(self) -> None:
        """Forgetting: every stage starts from nothing."""
        self.infrequent[:] = True
        self.crude[:] = 0.0

    def _private_counts(self, release: Release) -> PrivateCounts:
        return consistent(release, precision(release.noise, release.batch.table_query, self.failure))

    def learn_crude(self, release: Release, step: int) -> None:
        """Mark the infrequent tuples of this step and estimate the transitions of the others."""
        counts = self._private_counts(release)
        threshold = self.c1 * counts.precision * self.problem.horizon**2 * self.iota
        self.infrequent[step] = counts.transitions[step] <= threshold
        self.crude[step] = self._absorbing(counts)[step]

    def _absorbing(self, counts: PrivateCounts) -> FloatArray:
        """Estimate Transition: what goes to an infrequent tuple goes to the absorbing state, out of the table."""
        return np.where(self.infrequent, 0.0, counts.transition_probabilities)

    @property
    def exploration_model(self) -> FloatArray:
        """The crude estimate of the absorbing MDP."""
        return self.crude

    def fine_mixture(self, policies: PolicySet, design: Design, auxiliary: Mixture | None, users: int) -> Mixture:
        """Half of the users get the coverage design, half the auxiliary policy."""
        assert auxiliary is not None
        return mixed([(0.5, design.mixture), (0.5, auxiliary)])

    def eliminate(self, policies: PolicySet, release: Release, users: int) -> tuple[PolicySet, float]:
        """Without every policy that is 2 xi_b worse than the best under the refined estimate (Algorithm 1, line 8)."""
        counts = self._private_counts(release)
        refined, rewards = self._absorbing(counts), counts.reward_means
        self.last = radius = self.radius(counts.precision, users // 3)
        self.incumbent, value = policies.best(refined, rewards, self.start, self.rng)
        return policies.eliminate(refined, rewards, self.start, 2 * radius), value

    def radius(self, precision: float, length: int) -> float:
        """xi_b = C (sqrt(X A H^3 iota / L_b) + X^3 A H^5 E iota / L_b)."""
        h, x, a = self.problem.horizon, self.problem.n_states, self.problem.n_actions
        return self.c * (
            math.sqrt(x * a * h**3 * self.iota / length) + x**3 * a * h**5 * precision * self.iota / length
        )

    def estimate(self) -> Estimate | None:
        """The value under the refined estimate, give or take the radius of its stage."""
        if self.last is None:
            return None
        description = f"of the best policy so far, give or take the paper's radius with C = {self.c:g}"
        low, high = self.best_value - self.last, self.best_value + self.last
        return Estimate.within(self.problem.horizon, value=self.best_value, low=low, high=high, description=description)

    def state(self) -> dict[str, NDArray[Any]]:
        """The crude model."""
        return {"infrequent": self.infrequent, "crude": self.crude}

    def load_state(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put the crude model back."""
        self.infrequent, self.crude = arrays["infrequent"], arrays["crude"]


class DataRadius(Radius):
    """Judged by the data's own standard errors: an action goes when it is significantly worse than the incumbent.

    The incumbent is the policy with the best lower bound. Fine exploration gives at least half of its users to the
    incumbent and to the policy with the best upper bound, in equal parts; the coverage design gets the rest, but no
    more than 2 (1 + s) visits for each reachable (h, x, a), s the noise deviation of a counter: then a row is known.
    The figures below were chosen on tuning seeds and serve every environment.
    """

    wants_auxiliary: ClassVar[bool] = False
    lower: ClassVar[float] = -1.0  # deviations of a row in the incumbent's bound
    upper: ClassVar[float] = 0.25  # and in the optimistic policy's
    curvature: ClassVar[float] = 0.3  # weight of the second-order error where rows are thin
    max_design_share: ClassVar[float] = 0.5  # of users
    visits_needed: ClassVar[float] = 2.0
    incumbent_part: ClassVar[float] = 0.5  # of the users whom the design leaves
    shown: ClassVar[float] = 2.0  # standard errors to either side of the value that is shown

    def __init__(self, problem: Problem, rng: np.random.Generator, *, forget: bool, deviations: float) -> None:
        super().__init__(problem, rng)
        self.forget = forget
        self.deviations = deviations
        self.evidence = Evidence(problem)
        self._noise_sd = math.inf  # of the last release: before the first, nothing is known of it

    def begin_stage(self) -> None:
        """Forget, if that is the memory chosen."""
        if self.forget:
            self.evidence = Evidence(self.problem)

    def learn_crude(self, release: Release, step: int) -> None:
        """Add to the evidence."""
        self.evidence.add(release)

    @property
    def exploration_model(self) -> FloatArray:
        """The transitions of the known rows."""
        return self.evidence.model().transitions

    def fine_mixture(self, policies: PolicySet, design: Design, auxiliary: Mixture | None, users: int) -> Mixture:
        """Upper bound, incumbent and coverage, as the class says."""
        from shufflerl.learners.radius_kernels import bounded_plan

        assert isinstance(policies, ProductSet)
        model = self.evidence.model()
        optimistic = bounded_plan(self.rng, policies.allowed, self.upper, model).policy
        incumbent = optimistic if self.incumbent is None else self.incumbent
        needed = self.visits_needed * design.triples * (1 + self._noise_sd)
        design_share = min(self.max_design_share, needed / users)
        incumbent_share = (1 - design_share) * self.incumbent_part
        return mixed(
            [
                (design_share, design.mixture),
                (incumbent_share, Mixture.single(incumbent)),
                (1 - design_share - incumbent_share, Mixture.single(optimistic)),
            ]
        )

    def eliminate(self, policies: PolicySet, release: Release, users: int) -> tuple[PolicySet, float]:
        """Drop the actions that are significantly worse than the incumbent."""
        from shufflerl.learners.radius_kernels import Margin, bounded_plan, dominated

        assert isinstance(policies, ProductSet)
        self.evidence.add(release)
        self._noise_sd = release.noise.sd
        model = self.evidence.model()
        self.incumbent = bounded_plan(self.rng, policies.allowed, self.lower, model).policy
        rival = bounded_plan(self.rng, policies.allowed, 0.0, model)
        drop = dominated(policies.allowed, self.incumbent, rival, Margin(self.deviations, self.curvature), model)
        left = policies.without(drop) if drop.any() else policies
        _, best = left.best(model.transitions, model.rewards, self.start, self.rng)
        return left, best

    def estimate(self) -> Estimate | None:
        """Unknown rows are worth nothing in the value and its lower end, and all that can be earned in the upper."""
        from shufflerl.learners.radius_kernels import incumbent_error, incumbent_value

        model = self.evidence.model()
        if self.incumbent is None or not model.known.any():
            return None
        value = incumbent_value(self.incumbent, model)
        variance, unknown = incumbent_error(self.incumbent, self.start, value, model)
        worth, error = float(self.start @ value[0]), self.shown * math.sqrt(variance)
        description = (
            f"of the best policy so far, give or take {self.shown:g} standard errors; what it would meet but nobody "
            "has seen may be worth nothing or all"
        )
        low, high = worth - error, worth + unknown + error
        return Estimate.within(self.problem.horizon, value=worth, low=low, high=high, description=description)

    def state(self) -> dict[str, NDArray[Any]]:
        """The evidence."""
        return self.evidence.state() | {"noise_sd": np.array(self._noise_sd)}

    def load_state(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put the evidence back."""
        self._noise_sd = float(arrays.pop("noise_sd"))
        self.evidence.load_state(arrays)


def mixed(parts: list[tuple[float, Mixture]]) -> Mixture:
    """A mixture of mixtures."""
    used = [(weight, mixture) for weight, mixture in parts if weight > 0]
    weights = np.concatenate([weight * mixture.weights for weight, mixture in used])
    return Mixture(np.concatenate([mixture.policies for _, mixture in used]), weights / weights.sum())
