"""Policy sets against brute force: every policy written down, evaluated one by one."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from shufflerl import policy_sets
from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.planning import greedy, optimal_q, policy_values, visit_probabilities
from shufflerl.policy_sets.product import ProductSet
from tests.support.examples import all_policies, random_mdp

SHAPES = [(3, 2, 2), (2, 3, 2), (4, 2, 2), (2, 2, 3), (3, 3, 2), (1, 3, 3), (5, 1, 3), (1, 1, 4), (8, 1, 2), (3, 4, 1)]
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from(SHAPES)


def random_model(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[FloatArray, FloatArray]:
    """Transitions with some cells absorbed, few or many, and rewards of either sign."""
    horizon, states, actions = shape
    dense = rng.dirichlet(np.ones(states), size=(horizon - 1, states, actions))
    kept = rng.random(dense.shape) < rng.choice([0.2, 0.5, 0.8, 1.0])
    return np.where(kept, dense, 0.0), rng.random(shape) - rng.choice([0.0, 0.5])


def random_start(rng: np.random.Generator, states: int) -> FloatArray:
    return np.eye(states)[0] if rng.random() < 0.5 else rng.dirichlet(np.ones(states))


@cache
def everything(shape: tuple[int, int, int]) -> PolicyArray:
    return all_policies(random_mdp(0, *shape))


def taken(visits: FloatArray, policies: PolicyArray, actions: int) -> FloatArray:
    """The probability of each policy to be at (h, x) and take a."""
    return np.where(policies[..., None] == np.arange(actions), visits[..., None], 0.0)


def check_oracles(
    found: policy_sets.PolicySet,
    inside: PolicyArray,
    model: tuple[FloatArray, FloatArray],
    start: FloatArray,
    rng: np.random.Generator,
) -> None:
    """`found` answers as the list of its policies says it must."""
    transitions, rewards = model
    actions = found.n_actions
    values = policy_values(transitions, rewards, start, inside)
    policy, value = found.best(transitions, rewards, start, rng)
    assert found.contains(policy[None]).all()
    assert value == pytest.approx(values.max(), abs=1e-12)
    assert policy_values(transitions, rewards, start, policy[None])[0] == pytest.approx(value, abs=1e-12)
    policy, again = found.search(transitions, start)(rewards, rng)
    assert found.contains(policy[None]).all()
    assert again == pytest.approx(value, abs=1e-12)

    chances = taken(visit_probabilities(transitions, start, inside), inside, actions)
    assert (found.reachable(transitions, start) == (chances > 0).any(axis=0)).all()
    for step in range(found.horizon):
        cover, reach = found.policy_cover(transitions, start, step, rng)
        assert found.contains(cover).all()
        np.testing.assert_allclose(reach, chances[:, step].max(axis=0), atol=1e-14)
        theirs = taken(visit_probabilities(transitions, start, cover), cover, actions)[:, step]
        theirs = theirs.reshape(found.n_states, actions, found.n_states, actions)
        np.testing.assert_allclose(np.einsum("xaxa->xa", theirs), reach, atol=1e-14)
    assert 2**found.log2_size == pytest.approx(len(inside))


@pytest.mark.slow
@given(seed=seeds, shape=shapes, known_start=st.booleans())
@settings(max_examples=50, deadline=None)
def test_enumerated_is_brute_force_through_several_eliminations(
    seed: int, shape: tuple[int, int, int], known_start: bool
) -> None:
    rng = np.random.default_rng(seed)
    start = random_start(rng, shape[1])
    policies = everything(shape)
    left = np.ones(len(policies), dtype=bool)
    found = policy_sets.make("enumerated", *shape, start if known_start else None)
    for _ in range(4):
        model = random_model(rng, shape)
        check_oracles(found, policies[left], model, start, rng)
        values = policy_values(*model, start, policies)
        margin = 1e-3 + rng.random() * (values[left].max() - values[left].min())
        found = found.eliminate(*model, start, margin)
        left &= values > values[left].max() - margin
        assert (found.contains(policies) == left).all()
        again = policy_sets.restore("enumerated", found.state(), *shape, start if known_start else None)
        assert (again.contains(policies) == left).all()
        assert again.log2_size == found.log2_size


@given(seed=seeds, shape=shapes)
@settings(max_examples=50, deadline=None)
def test_product_is_brute_force_on_any_allowed_actions(seed: int, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random(shape) < 0.7
    allowed[..., 0] |= ~allowed.any(axis=-1)
    found, start, model = ProductSet(allowed), random_start(rng, shape[1]), random_model(rng, shape)
    policies = everything(shape)
    policies = policies[found.contains(policies)]
    check_oracles(found, policies, model, start, rng)

    values = policy_values(*model, start, policies)
    margin = 1e-3 + rng.random() * (values.max() - values.min())
    kept = policies[values > values.max() - margin]
    smaller = found.eliminate(*model, start, margin)
    assert isinstance(smaller, ProductSet)
    assert (smaller.allowed == (kept[..., None] == np.arange(shape[2])).any(axis=0)).all()
    again = policy_sets.restore("product", smaller.state(), *shape)
    assert (again.state()["allowed"] == smaller.allowed).all()


@given(seed=seeds, shape=shapes)
@settings(max_examples=40, deadline=None)
def test_product_contains_enumerated(seed: int, shape: tuple[int, int, int]) -> None:
    """Whatever the model and however often a growing batch narrows the margin."""
    rng = np.random.default_rng(seed)
    start, model, policies = random_start(rng, shape[1]), random_model(rng, shape), everything(shape)
    enumerated, product = (policy_sets.make(kind, *shape) for kind in ("enumerated", "product"))
    for margin in np.sort(rng.random(4) * shape[0])[::-1] + 1e-12:
        enumerated = enumerated.eliminate(*model, start, margin)
        product = product.eliminate(*model, start, margin)
        assert (enumerated.contains(policies) <= product.contains(policies)).all()
        assert enumerated.log2_size <= product.log2_size + 1e-9


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_a_policy_exactly_at_the_margin_goes(kind: str) -> None:
    bandit = policy_sets.make(kind, 1, 1, 4)
    left = bandit.eliminate(np.empty((0, 1, 4, 1)), np.array([[[1.0, 0.75, 0.5, 0.25]]]), np.ones(1), 0.5)
    assert left.contains(np.arange(4).reshape(4, 1, 1)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_nothing_to_eliminate_gives_the_same_set(kind: str) -> None:
    mdp = random_mdp(3)
    full = policy_sets.make(kind, 3, 3, 2)
    assert full.eliminate(mdp.transitions, mdp.rewards, mdp.start, 3.0) is full


def test_riverswim_with_all_its_policies() -> None:
    """2^24 policies of which 2^18 can be told apart; the search that skips agrees with the full evaluation."""
    mdp = riverswim(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    enumerated, product = (policy_sets.make(kind, 6, 4, 2, mdp.start) for kind in ("enumerated", "product"))
    assert enumerated.log2_size == product.log2_size == 24
    for margin in (0.4, 0.3, 0.1, 1e-6):
        enumerated = enumerated.eliminate(mdp.transitions, mdp.rewards, mdp.start, margin)
        product = product.eliminate(mdp.transitions, mdp.rewards, mdp.start, margin)
        inside = distinct_policies(enumerated)
        assert product.contains(inside).all()
        for _ in range(5):
            rewards = rng.random(mdp.rewards.shape) ** 4
            policy, value = enumerated.best(mdp.transitions, rewards, mdp.start, rng)
            assert value == pytest.approx(policy_values(mdp.transitions, rewards, mdp.start, inside).max(), abs=1e-12)
            assert enumerated.contains(policy[None]).all()
    # Four optima when only what can be reached is told apart (18 of the 24 cells).
    optimal = greedy(optimal_q(mdp.transitions, mdp.rewards), rng)
    assert enumerated.contains(optimal[None]).all()
    assert policy_values(mdp.transitions, mdp.rewards, mdp.start, inside).min() == pytest.approx(mdp.optimal_value)


def distinct_policies(found: policy_sets.PolicySet) -> PolicyArray:
    """The policies an enumerated set tells apart, from what it saves."""
    saved = found.state()
    cells = saved["cells"]
    codes = np.flatnonzero(np.unpackbits(saved["active"], count=found.n_actions ** int(cells.sum())))
    policies = np.zeros((len(codes), *cells.shape), dtype=np.int32)
    policies[:, cells] = codes[:, None] // found.n_actions ** np.arange(cells.sum()) % found.n_actions
    assert found.contains(policies).all()
    return policies


@given(seed=seeds)
@settings(max_examples=5, deadline=None)
def test_product_with_many_states(seed: int) -> None:
    """Beyond 24 states sums are interleaved and cells are decided early; the literal program agrees."""
    rng = np.random.default_rng(seed)
    horizon, states, actions = 4, 30, 3
    dense = rng.dirichlet(np.full(states, 0.2), size=(horizon - 1, states, actions))
    transitions = np.where(dense > rng.choice([0.0, 0.02]), dense, 0.0)
    rewards, start = rng.random((horizon, states, actions)), rng.dirichlet(np.ones(states))
    full = ProductSet(np.ones(rewards.shape, dtype=bool))
    highest = float(start @ optimal_q(transitions, rewards)[0].max(axis=-1))
    assert full.best(transitions, rewards, start, rng)[1] == pytest.approx(highest)

    through = np.empty(rewards.shape)
    for h, x, a in np.ndindex(rewards.shape):
        others = np.delete(np.arange(actions), a)
        forced = rewards.copy()
        forced[h, x, others] = -1e6
        through[h, x, a] = start @ optimal_q(transitions, forced)[0].max(axis=-1)
    margin = float(np.quantile(highest - through, rng.random())) + 1e-9
    left = full.eliminate(transitions, rewards, start, margin)
    assert isinstance(left, ProductSet)
    assert (left.allowed == (highest - through < margin)).all()


# Ties. Each test below fails a correct implementation with probability 1e-4 over seeds; the seed is fixed.


def check_uniform(counts: NDArray[Any]) -> None:
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_ties_of_the_best_are_broken_uniformly(kind: str) -> None:
    shape = (2, 2, 2)
    rng = np.random.default_rng(5)
    transitions, start = np.zeros((1, 2, 2, 2)), np.full(2, 0.5)
    full = policy_sets.make(kind, *shape)
    codes = [int(full.best(transitions, np.zeros(shape), start, rng)[0].ravel() @ [1, 2, 4, 8]) for _ in range(1600)]
    check_uniform(np.bincount(codes, minlength=16))


@pytest.mark.slow
def test_ties_after_an_elimination_are_broken_uniformly() -> None:
    """Among what is left, and also where this model says no policy gets."""
    shape = (2, 2, 2)
    rng = np.random.default_rng(6)
    stay, start = np.broadcast_to(np.eye(2)[None, :, None], (1, 2, 2, 2)), np.full(2, 0.5)
    rewards = np.zeros(shape)
    rewards[..., 1] = 1.0
    # Four cells that each give half a point: at most one of them may take action 0.
    left = policy_sets.make("enumerated", *shape).eliminate(stay, rewards, start, 0.75)
    inside = everything(shape)[left.contains(everything(shape))]
    assert len(inside) == 5
    draws = np.array([left.best(stay, np.zeros(shape), start, rng)[0] for _ in range(2000)])
    assert left.contains(draws).all()
    check_uniform(np.array([(draws == policy).all(axis=(1, 2)).sum() for policy in inside]))

    # A model that absorbs everyone after the first step tells apart three ways to begin. Two of them leave no choice
    # for the second step, the third one leaves three.
    draws = np.array([left.best(np.zeros_like(stay), np.zeros(shape), start, rng)[0] for _ in range(2000)])
    assert left.contains(draws).all()
    check_uniform(np.array([(draws[:, 0] == way).all(axis=1).sum() for way in ([0, 1], [1, 0], [1, 1])]))
    second = draws[(draws[:, 0] == 1).all(axis=1), 1]
    check_uniform(np.array([(second == way).all(axis=1).sum() for way in ([0, 1], [1, 0], [1, 1])]))


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_explorers_act_at_random_where_it_does_not_matter(kind: str) -> None:
    rng = np.random.default_rng(7)
    mdp = riverswim(rng)
    found = policy_sets.make(kind, 6, 4, 2).eliminate(mdp.transitions, mdp.rewards, mdp.start, 0.4)
    absorbed = np.zeros_like(mdp.transitions)
    policies = np.concatenate([found.policy_cover(absorbed, mdp.start, 0, rng)[0] for _ in range(300)])
    assert found.contains(policies).all()
    # The last state cannot be reached in two steps, so nothing was eliminated there.
    check_uniform(np.bincount(policies[:, 1, 3], minlength=2))
    assert (policies.reshape(300, 4, 2, 6, 4)[:, 0, :, 0, 0] == [0, 1]).all()


def test_the_random_stream_decides_ties() -> None:
    full = policy_sets.make("product", 4, 3, 3)
    args = np.zeros((3, 3, 3, 3)), np.zeros((4, 3, 3)), np.eye(3)[0]
    draws = [full.best(*args, np.random.default_rng(seed))[0] for seed in (1, 1, 2)]
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any()


# Sizes and refusals.


def test_too_many_policies_to_enumerate() -> None:
    with pytest.raises(InvalidInputError, match=r"2\^25\.0 policies.*'product'"):
        policy_sets.make("enumerated", 5, 5, 2)
    # One start state leaves 21 cells where policies can differ; the size still counts all.
    assert policy_sets.make("enumerated", 5, 5, 2, np.eye(5)[0]).log2_size == 25
    assert policy_sets.make("enumerated", 1, 24, 2).log2_size == 24
    assert policy_sets.make("product", 50, 100, 7).log2_size == pytest.approx(5000 * math.log2(7))


def test_an_episode_that_starts_where_none_should() -> None:
    mdp = random_mdp(0, 3, 2, 2)
    found = policy_sets.make("enumerated", 3, 2, 2, [1.0, 0.0])
    with pytest.raises(InvalidInputError, match=r"start\[1\] is positive"):
        found.best(mdp.transitions, mdp.rewards, np.full(2, 0.5), np.random.default_rng(0))


def test_without() -> None:
    full = ProductSet(np.ones((2, 2, 2), dtype=bool))
    drop = np.zeros((2, 2, 2), dtype=bool)
    drop[1, 0, 1] = True
    smaller = full.without(drop)
    assert smaller.log2_size == 3
    assert full.log2_size == 4
    with pytest.raises(InvalidInputError, match="No action is left at step 1 in state 0"):
        smaller.without(~drop & (np.arange(2) == 1)[:, None, None])
    with pytest.raises(InvalidInputError, match="drop has shape"):
        full.without(drop[0])
    with pytest.raises(ValueError, match="read-only"):
        full.allowed[0, 0, 0] = False


def spoiled_states() -> list[tuple[str, dict[str, Any]]]:
    cells: BoolArray = np.ones((2, 2), dtype=bool)
    return [
        ("product", {}),
        ("product", {"allowed": np.ones((2, 2, 3), dtype=bool)}),
        ("product", {"allowed": np.zeros((2, 2, 2), dtype=bool)}),
        ("enumerated", {"cells": cells}),
        ("enumerated", {"cells": cells[:1], "active": np.ones(1, dtype=np.uint8)}),
        ("enumerated", {"cells": cells, "active": np.ones(1, dtype=np.uint8)}),
        ("enumerated", {"cells": cells, "active": np.zeros(2, dtype=np.uint8)}),
    ]


@pytest.mark.parametrize(("kind", "arrays"), spoiled_states())
def test_states_of_something_else_are_refused(kind: str, arrays: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="restore them into the problem they were saved for"):
        policy_sets.restore(kind, arrays, 2, 2, 2)


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_bad_input(kind: str) -> None:
    mdp, rng = random_mdp(0, 3, 2, 2), np.random.default_rng(0)
    found = policy_sets.make(kind, 3, 2, 2)
    transitions, rewards, start = mdp.transitions, mdp.rewards, mdp.start
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidInputError, match="margin"):
            found.eliminate(transitions, rewards, start, margin)
    with pytest.raises(InvalidInputError, match="transitions has shape"):
        found.best(transitions[:1], rewards, start, rng)
    with pytest.raises(InvalidInputError, match="expected none below 0"):
        found.best(-transitions, rewards, start, rng)
    with pytest.raises(InvalidInputError, match="rewards"):
        found.best(transitions, np.full(rewards.shape, np.nan), start, rng)
    with pytest.raises(InvalidInputError, match="start sums to"):
        found.reachable(transitions, start / 2)
    with pytest.raises(InvalidInputError, match="step is 3"):
        found.policy_cover(transitions, start, 3, rng)
    with pytest.raises(InvalidInputError, match="policies has shape"):
        found.contains(np.zeros((3, 2), dtype=np.int32))
    with pytest.raises(InvalidInputError, match=r"outside 0\.\.1"):
        found.contains(np.full((1, 3, 2), 2))
    with pytest.raises(InvalidInputError, match="policy set is 'sum'"):
        policy_sets.make("sum", 3, 2, 2)
