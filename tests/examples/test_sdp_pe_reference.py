"""The references in one file decide as the library does, release by release."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shufflerl import Release, learn, privatizers
from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.estimation import precision
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.population import CountPopulation
from shufflerl.privatizers.base import Privatizer
from tests.support.examples import random_mdp

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")


def _example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


reference = _example("sdp_pe_reference")


class Recorded(SDPPE):
    """Remembers what it was told, and what it made of it."""

    def __init__(self, *args: object, **options: object) -> None:
        self.told: list[Release] = []
        self.infrequent: list[BoolArray] = []
        self.crude: list[FloatArray] = []
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _learn(self, release: Release) -> None:
        self.told.append(release)
        super()._learn(release)

    def policy_elimination(self, release: Release) -> None:
        self.infrequent.append(self.radius.infrequent.copy())  # type: ignore[attr-defined]
        self.crude.append(self.radius.crude.copy())  # type: ignore[attr-defined]
        super().policy_elimination(release)


@pytest.mark.parametrize("epsilon", [None, 1.0])
@pytest.mark.parametrize(("horizon", "states", "actions"), [(1, 1, 4), (2, 2, 3), (3, 2, 2), (4, 2, 2)])
def test_sdp_pe_with_the_papers_constants(horizon: int, states: int, actions: int, epsilon: float | None) -> None:
    """On the library's releases: the same users and counters are asked, the same tuples are infrequent, the crude model
    and the radius are the same, the same policies go. Where ties are drawn, policy covers reach as far."""
    mdp = random_mdp(horizon, horizon=horizon, states=states, actions=actions)
    episodes = 10**13
    learner = Recorded(mdp.problem(episodes), 3, constants="paper")
    privatizer: Privatizer = privatizers.make("none")
    if epsilon is not None:
        privatizer = privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-5, seed=3)
    learn(learner, CountPopulation(mdp, 3), privatizer)
    told = iter(learner.told)
    problem = reference.Problem(horizon, states, actions, mdp.start, episodes)

    def replayed(
        users: int,
        policies: PolicyArray,
        weights: FloatArray,
        transition_steps: list[int],
        reward_steps: list[int],
    ) -> tuple[FloatArray, FloatArray, float]:
        release = next(told)
        query = release.batch.table_query
        assert (release.batch.users, query.transition_steps) == (users, tuple(transition_steps))
        assert query.reward_steps == tuple(reward_steps)
        assert weights.sum() == pytest.approx(1.0)
        if not reward_steps:  # crude exploration, by the library's policy cover and by these
            model = learner.crude[stage_of(release)].copy()
            model[transition_steps[0] :] = 0.0
            ours, theirs = (
                reach(some, model, transition_steps[0]) for some in (release.batch.mixture.policies, policies)
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
        return *release.tables, precision(release.noise, query, 0.05 / learner.max_batches)

    def reach(policies: PolicyArray, model: FloatArray, step: int) -> FloatArray:
        """[x, a]: how likely the best of the policies is to get there."""
        visits = reference.occupancy(problem, policies, model)[:, step]
        return np.asarray((visits[..., None] * np.eye(actions)[policies[:, step]]).max(axis=0))

    def stage_of(release: Release) -> int:
        return sum(bool(one.batch.table_query.reward_steps) for one in learner.told[: release.batch.index])

    stages = reference.sdp_pe(problem, replayed, np.random.default_rng(0))
    assert next(told, None) is None
    assert len(stages) == len(learner.trace)
    for stage, record, infrequent, crude in zip(stages, learner.trace, learner.infrequent, learner.crude, strict=True):
        assert stage.users == record.users
        assert (stage.infrequent == infrequent).all()
        np.testing.assert_allclose(stage.crude, crude, rtol=1e-9, atol=1e-12)
        assert stage.radius == pytest.approx(record.radius, rel=1e-12)
        assert stage.best_value == pytest.approx(record.best_value, rel=1e-9)
        assert stage.coverage_ratio <= 1.05
        left = record.log2_policies - record.eliminated
        assert math.log2(len(stage.policies)) == pytest.approx(left)
    everything = reference.all_policies(problem)
    kept = {policy.tobytes() for policy in stages[-1].policies}
    assert [policy.tobytes() in kept for policy in everything] == learner.policies.contains(everything).tolist()
    assert len(kept) < len(everything)  # the problem is one where something goes
