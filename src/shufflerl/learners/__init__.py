"""Learners: sans-IO objects that ask for batches and learn from releases. Constructed by name through `make`."""

from __future__ import annotations

from typing import Any

from shufflerl.learners.base import Learner
from shufflerl.mdp import Problem
from shufflerl.registry import Entry, Registry
from shufflerl.returns import ReturnProblem
from shufflerl.seeding import Seed
from shufflerl.steps import StepProblem

LEARNERS = Registry(
    "learner",
    {
        "sdp-pe": Entry("shufflerl.learners.sdp_pe:SDPPE", "the paper's policy elimination in growing stages"),
        "optimistic": Entry("shufflerl.learners.optimistic:Optimistic", "optimism on denoised, pooled counts"),
        "contextual-bandit": Entry(
            "shufflerl.learners.contextual_bandit:ContextualBandit",
            "one random step of each episode, where actions do not steer the state",
        ),
        "policy-search": Entry(
            "shufflerl.learners.policy_search:PolicySearch", "linear or neural policies, compared by noisy returns"
        ),
        "ucbvi": Entry("shufflerl.learners.ucbvi:UCBVI", "upper confidence bound value iteration, optimistic"),
    },
    given=2,  # a problem and a seed
    makes=(Learner,),
    group="shufflerl.learners",
)


#: The learner unless another is chosen, and that for each kind of problem where it is known.
DEFAULT = "optimistic"
DEFAULTS: dict[type, str] = {Problem: DEFAULT, StepProblem: "contextual-bandit", ReturnProblem: "policy-search"}


def batch_parameters(name: str, min_users: int, users: int | None = None) -> dict[str, Any]:
    """See `Learner.batch_parameters`; none if it is a function that makes the learner."""
    learner: Any = LEARNERS.entry(name).load()
    return getattr(learner, "batch_parameters", Learner.batch_parameters)(min_users, users)


def make(name: str, problem: Problem | ReturnProblem, seed: Seed, **parameters: Any) -> Learner:
    """The learner of that name for a problem, with its own stream of random numbers.

    "module:MyLearner" is a name too.
    """
    learner: Learner = LEARNERS.make(name, problem, seed, **parameters)
    return learner


__all__ = ["DEFAULT", "DEFAULTS", "LEARNERS", "Learner", "batch_parameters", "make"]
