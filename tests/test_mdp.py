from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shufflerl import planning
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Mixture, Problem, homogeneous, permuted_actions
from tests.support.examples import all_policies, all_trajectories, mdps, random_mdp, random_mixture, telling_mdp


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), horizon=st.integers(1, 3), states=st.integers(1, 2))
def test_planning_agrees_with_enumeration_of_policies_and_trajectories(seed: int, horizon: int, states: int) -> None:
    mdp = random_mdp(seed, horizon, states, actions=2)
    policies = all_policies(mdp)
    values = planning.policy_values(mdp.transitions, mdp.rewards, mdp.start, policies)
    assert values.max() == pytest.approx(mdp.optimal_value, abs=1e-12)
    for policy, value in list(zip(policies, values, strict=True))[:4]:
        _, _, rewards, weights = all_trajectories(mdp, policy)
        assert value == pytest.approx(weights @ rewards.sum(axis=1), abs=1e-12)
    best = planning.greedy(planning.optimal_q(mdp.transitions, mdp.rewards), np.random.default_rng(seed))
    assert planning.mixture_value(mdp, Mixture.single(best)) == pytest.approx(mdp.optimal_value, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6))
def test_occupancy_is_a_distribution_at_every_step_and_prices_any_reward(mdp: MDP, seed: int) -> None:
    mixture = random_mixture(mdp, 3, seed)
    occupancy = planning.occupancy(mdp.transitions, mdp.start, mixture, mdp.n_actions)
    assert occupancy.shape == mdp.rewards.shape
    np.testing.assert_allclose(occupancy.sum(axis=(1, 2)), 1.0, atol=1e-12)
    assert (occupancy * mdp.rewards).sum() == pytest.approx(planning.mixture_value(mdp, mixture), abs=1e-12)


def test_values_hold_under_any_reward_and_a_model_that_loses_mass() -> None:
    mdp = random_mdp(3)
    absorbing = mdp.transitions * 0.5
    policies = all_policies(random_mdp(3, horizon=3, states=3))[:50]
    visits = planning.visit_probabilities(absorbing, mdp.start, policies)
    np.testing.assert_allclose(visits.sum(axis=-1), np.broadcast_to([1.0, 0.5, 0.25], (50, 3)))
    reward = np.zeros_like(mdp.rewards)
    reward[2, 1, 0] = 1.0  # the paper's 1_{h,x,a}: its value is the probability of being there and doing that
    values = planning.policy_values(absorbing, reward, mdp.start, policies)
    np.testing.assert_allclose(values, visits[:, 2, 1] * (policies[:, 2, 1] == 0), atol=1e-15)


def test_greedy_breaks_ties_evenly() -> None:
    """Undoing correction 9 (ties in index order) makes every choice the first action."""
    q = np.zeros((1, 3000, 3))
    q[..., 2] = -1.0
    chosen = planning.greedy(q, np.random.default_rng(0))
    counts = np.bincount(chosen.ravel(), minlength=3)
    assert counts[2] == 0
    assert abs(counts[0] - 1500) < 5 * np.sqrt(3000 / 4)  # five standard deviations: fails by chance 6e-7


GOOD = random_mdp(0)


def _with(values: NDArray[np.float64], index: tuple[int, ...], value: float) -> NDArray[np.float64]:
    changed = np.array(values)
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("transitions", _with(GOOD.transitions, (1, 0, 1, 2), 0.9), r"transitions\[1, 0, 1\] sums to .*; expected 1"),
        ("transitions", _with(GOOD.transitions, (0, 0, 0, 0), -0.1), r"transitions\[0, 0, 0, 0\] is -0.1"),
        ("transitions", _with(GOOD.transitions, (0, 0, 0, 0), np.nan), r"transitions\[0, 0, 0, 0\] is nan"),
        ("transitions", GOOD.transitions[:1], r"transitions has shape \(1, 3, 2, 3\); expected \(2, 3, 2, 3\)"),
        (
            "rewards",
            _with(GOOD.rewards, (2, 1, 1), 1.5),
            r"rewards\[2, 1, 1\] is 1.5; expected a mean reward in \[0, 1\]",
        ),
        ("rewards", _with(GOOD.rewards, (2, 1, 1), np.inf), r"rewards\[2, 1, 1\] is inf"),
        ("rewards", GOOD.rewards[0], r"rewards has shape \(3, 2\)"),
        ("rewards", np.empty((0, 3, 2)), "at least one step"),
        ("rewards", "high", "not an array of numbers"),
        ("rewards", _with(GOOD.rewards, (2, 1, 1), 1.0000001), r"rewards\[2, 1, 1\] is 1.0000001; expected"),
        ("rewards", GOOD.rewards + 0j, "rewards is not an array of numbers: it holds complex numbers"),
        ("rewards", [[[0.5, 0.5], [0.5]]], "rewards is not an array of numbers"),
        ("support", [[True], [True, False]], "support is not an array of numbers"),
        ("start", [1 / 3, 1 / 3, 1 / 3 + 1e-6], r"start sums to 1\.000001; expected 1"),
        ("start", [0.5, 0.4, 0.0], "start sums to 0.9"),
        ("start", [1.0], r"start has shape \(1,\)"),
        ("support", np.zeros((2, 3, 2, 3)), "of bool"),
        ("support", np.zeros((2, 3, 2, 3), dtype=bool), "allows no next state"),
        ("support", np.eye(3, dtype=bool)[None, :, None].repeat(2, 0).repeat(2, 2), "support says it cannot occur"),
    ],
)
def test_bad_mdp_is_refused(field: str, value: object, message: str) -> None:
    fields = {"transitions": GOOD.transitions, "rewards": GOOD.rewards, "start": GOOD.start, field: value}
    with pytest.raises(InvalidInputError, match=message):
        MDP(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (GOOD.transitions * 0 + 2.0, r"transition_rewards\[0, 0, 0, 0\] is 2; expected a mean reward in \[0, 1\]"),
        (GOOD.transitions[:1], r"transition_rewards has shape \(1, 3, 2, 3\); expected \(2, 3, 2, 3\)"),
        (
            GOOD.transitions * 0,
            r"transition_rewards\[.*\] has the mean 0 over next states, and rewards have",
        ),
    ],
)
def test_rewards_of_transitions_that_do_not_fit_are_refused(value: NDArray[np.float64], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        GOOD.paying(value)


def test_rewards_of_transitions_change_no_mean() -> None:
    made = telling_mdp(3, sparse=True)
    plain = MDP(made.transitions, made.rewards, made.start, made.support)
    assert plain.optimal_value > 0  # its dynamics were asked for before
    told = plain.paying(made.layout.table(made.transition_rewards))
    assert told.optimal_value == plain.optimal_value
    assert told.dynamics.transition_rewards is told.transition_rewards
    paid = told.layout.table(told.transition_rewards)
    for h, x, a, y in np.ndindex(paid.shape):
        if told.transitions[h, x, a, y] > 0:
            assert told.reward_given(h, x, a, y) == paid[h, x, a, y]
        else:
            with pytest.raises(InvalidInputError, match=f"Nothing leads from state {x} at step {h} by action {a} to"):
                told.reward_given(h, x, a, y)
    assert told.reward_given(2, 0, 1, 0) == told.rewards[2, 0, 1]


def test_renamed_actions_keep_what_transitions_pay() -> None:
    told = telling_mdp(3, sparse=True)
    renamed = permuted_actions(told, np.random.default_rng(0))
    before, after = (mdp.layout.table(mdp.transition_rewards) for mdp in (told, renamed))
    for h, x in np.ndindex(before.shape[:2]):
        old, new = (
            sorted(map(tuple, np.hstack([mdp.transitions[h, x], paid[h, x]])))
            for mdp, paid in ((told, before), (renamed, after))
        )
        assert old == new
    assert (before != after).any()


def test_a_row_that_sums_to_almost_one_may_pay_all() -> None:
    almost = MDP([[[[0.5 + 9e-9, 0.5]], [[0.0, 1.0]]]], [[[1.0], [0.0]]] * 2, start=[1.0, 0.0])
    assert almost.paying([[[[1.0, 1.0]], [[0.0, 0.0]]]]).transition_rewards.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("horizon", [0, -1, 2.5, True])
def test_bad_horizon_is_refused(horizon: object) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"horizon is {horizon!r}")):
        homogeneous(GOOD.transitions[0], GOOD.rewards[0], horizon, GOOD.start)  # type: ignore[arg-type]


@pytest.mark.parametrize("episodes", [0, -5, "many", 10**18 + 1, pytest.param(10**5000, id="huge")])
def test_bad_episodes_are_refused(episodes: object) -> None:
    with pytest.raises(InvalidInputError, match="episodes is"):
        Problem(2, 2, 2, episodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policies", "weights", "message"),
    [
        ([[[0]], [[0]]], [0.5, 0.4], "weights sums to 0.9"),
        ([[[0]], [[0]]], [1.5, -0.5], r"weights\[1\] is -0.5"),
        ([[[0]]], [0.5, 0.5], r"weights has shape \(2,\)"),
        ([[0]], [1.0], "expected non-negative whole numbers"),
        ([[[-1]]], [1.0], "expected non-negative whole numbers"),
        ([[[0.5]]], [1.0], "expected non-negative whole numbers"),
        ([[[2**32]]], [1.0], "uses an action 4294967296; expected numbers below"),
        ([[[0, 1], [0]]], [1.0], "policies is not an array of numbers"),
        ([[[0j]]], [1.0], "policies is not an array of numbers: it holds complex numbers"),
        ([[[0]]], [1.0 + 0j], "weights is not an array of numbers: it holds complex numbers"),
    ],
)
def test_bad_mixture_is_refused(policies: object, weights: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Mixture(policies, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(6, 10**6, 2), (1, 10**6, 2), (10**12, 1, 1)])
def test_a_problem_that_no_memory_would_hold_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInputError, match="make a table of transitions of"):
        Problem(*sizes, episodes=1)


def test_values_cannot_be_changed_after_they_were_checked() -> None:
    transitions = np.array(GOOD.transitions)
    mdp = MDP(transitions, GOOD.rewards, GOOD.start)
    transitions[:] = 7.0
    np.testing.assert_array_equal(mdp.transitions, GOOD.transitions)
    with pytest.raises(ValueError, match="read-only"):
        mdp.transitions[0, 0, 0, 0] = 1.0


def test_mixtures_are_equal_by_content() -> None:
    first, second = random_mixture(GOOD, 2, 1), random_mixture(GOOD, 2, 1)
    assert first == second
    assert hash(first) == hash(second)
    assert first != random_mixture(GOOD, 2, 2)
