"""Coverage designs, certified by listing every policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shufflerl import policy_sets
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.coverage import Design, coverage_design
from shufflerl.envs.random_mdp import random_mdp
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture
from shufflerl.planning import occupancy, visit_probabilities
from tests.policy_sets.test_policy_sets import (
    distinct_policies,
    everything,
    random_model,
    random_start,
    seeds,
    shapes,
    taken,
)


def certify(design: Design, inside: PolicyArray, transitions: FloatArray, start: FloatArray, actions: int) -> None:
    """The design's figures are those of a direct computation over all policies of the set."""
    chances = taken(visit_probabilities(transitions, start, inside), inside, actions)
    reachable = (chances > 0).any(axis=0)
    assert design.triples == reachable.sum()
    mixed = occupancy(transitions, start, design.mixture, actions)
    assert (mixed[reachable] > 0).all()
    worst = (chances[:, reachable] / mixed[reachable]).sum(axis=1).max()
    assert design.coverage == pytest.approx(worst, rel=1e-9)
    assert 1 - 1e-9 <= design.ratio <= 1.05


# No policy of this set gets to some triples half as often as acting at random would.
@example(seed=6236, shape=(3, 2, 2), kind="enumerated")
@given(seed=seeds, shape=shapes, kind=st.sampled_from(policy_sets.KINDS))
@settings(max_examples=60, deadline=None)
def test_worst_case_coverage_on_random_models_and_after_eliminations(
    seed: int, shape: tuple[int, int, int], kind: str
) -> None:
    rng = np.random.default_rng(seed)
    start, policies = random_start(rng, shape[1]), everything(shape)
    found = policy_sets.make(kind, *shape, start)
    earlier = None
    for _ in range(3):
        transitions, rewards = random_model(rng, shape)
        design = coverage_design(found, transitions, start, rng, warm_start=earlier)
        assert found.contains(design.mixture.policies).all()
        certify(design, policies[found.contains(policies)], transitions, start, shape[2])
        found = found.eliminate(transitions, rewards, start, 0.05 + rng.random() * shape[0] / 2)
        earlier = design.mixture


@pytest.mark.parametrize("branching", [None, 2])
def test_larger_problems(branching: int | None) -> None:
    rng = np.random.default_rng(0)
    mdp = random_mdp(rng, n_states=10, n_actions=4, horizon=10, branching=branching)
    found = policy_sets.make("product", 10, 10, 4)
    for _ in range(2):
        design = coverage_design(found, mdp.transitions, mdp.start, rng)
        assert design.triples == found.reachable(mdp.transitions, mdp.start).sum()
        assert design.ratio <= 1.05
        assert len(design.mixture.weights) < 100
        found = found.eliminate(mdp.transitions, mdp.rewards, mdp.start, 0.02)


def test_riverswim_with_enumerated_policies() -> None:
    mdp, rng = riverswim(np.random.default_rng(0)), np.random.default_rng(1)
    found = policy_sets.make("enumerated", 6, 4, 2, mdp.start)
    # No policy gets to the k-th state before step k: 18 cells, 36 triples.
    design = coverage_design(found, mdp.transitions, mdp.start, rng)
    assert design.triples == 36
    assert design.ratio <= 1.05
    for margin in (0.35, 0.2, 0.05):
        found = found.eliminate(mdp.transitions, mdp.rewards, mdp.start, margin)
        design = coverage_design(found, mdp.transitions, mdp.start, rng, warm_start=design.mixture)
        certify(design, distinct_policies(found), mdp.transitions, mdp.start, 2)
        assert len(design.mixture.weights) < 30


def test_unreachable_triples_are_masked() -> None:
    """Everything is absorbed after the first step, so only the start state's actions are left to cover."""
    rng = np.random.default_rng(0)
    for kind in policy_sets.KINDS:
        design = coverage_design(policy_sets.make(kind, 3, 2, 2), np.zeros((2, 2, 2, 2)), np.eye(2)[1], rng)
        assert design.triples == 2
        assert design.coverage == pytest.approx(2, rel=0.05)


def test_rare_triples_are_covered() -> None:
    """A chain that is left with probability 0.999 at every step; its end is reached with 1e-15."""
    transitions = np.zeros((5, 2, 2, 2))
    transitions[:, 0, 1, 0], transitions[:, 0, 1, 1], transitions[:, 0, 0, 1] = 1e-3, 0.999, 1.0
    transitions[:, 1, :, 1] = 1.0
    design = coverage_design(policy_sets.make("product", 6, 2, 2), transitions, np.eye(2)[0], np.random.default_rng(0))
    certify(design, everything((6, 2, 2)), transitions, np.eye(2)[0], 2)
    assert design.triples == 22


def test_a_warm_start_is_a_head_start() -> None:
    mdp, rng = riverswim(np.random.default_rng(0)), np.random.default_rng(1)
    found = policy_sets.make("product", 6, 4, 2)
    cold = coverage_design(found, mdp.transitions, mdp.start, rng)
    warm = coverage_design(found, mdp.transitions, mdp.start, rng, warm_start=cold.mixture)
    assert cold.iterations > 1
    assert warm.iterations == 1
    assert warm.ratio <= 1.05


def test_iterations_run_out() -> None:
    mdp, rng = riverswim(np.random.default_rng(0)), np.random.default_rng(1)
    found = policy_sets.make("product", 6, 4, 2)
    rough = coverage_design(found, mdp.transitions, mdp.start, rng, gap=1e-6, max_iterations=2)
    assert rough.iterations == 2
    assert rough.ratio > 1 + 1e-6
    fine = coverage_design(found, mdp.transitions, mdp.start, rng, gap=1e-3)
    assert fine.ratio <= 1.001


def test_the_same_seed_gives_the_same_design() -> None:
    mdp = random_mdp(np.random.default_rng(0))
    found = policy_sets.make("product", 5, 5, 3)
    designs = [coverage_design(found, mdp.transitions, mdp.start, np.random.default_rng(3)) for _ in range(2)]
    assert designs[0] == designs[1]


def test_bad_input() -> None:
    mdp, rng = random_mdp(np.random.default_rng(0)), np.random.default_rng(0)
    found = policy_sets.make("product", 5, 5, 3)
    with pytest.raises(InvalidInputError, match="gap"):
        coverage_design(found, mdp.transitions, mdp.start, rng, gap=0.0)
    with pytest.raises(InvalidInputError, match="max_iterations"):
        coverage_design(found, mdp.transitions, mdp.start, rng, max_iterations=0)
    with pytest.raises(InvalidInputError, match="transitions has shape"):
        coverage_design(found, mdp.transitions[1:], mdp.start, rng)
    with pytest.raises(InvalidInputError, match="The policies are for"):
        coverage_design(found, mdp.transitions, mdp.start, rng, warm_start=Mixture.single([[0, 1]]))
