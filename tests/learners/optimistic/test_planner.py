"""The planner: which probe has the largest net value, who may probe, and what a whole batch plays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shufflerl import planning
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.model import Model
from shufflerl.learners.optimistic.planner import (
    Outlook,
    Rivals,
    best_rival,
    expected_gain,
    find_greedy,
    find_rivals,
    occupancy_of,
    optimistic_policy,
    plan_batch,
    plan_probe,
)
from shufflerl.learners.optimistic.rows import Rows, information, unit_normal_loss
from shufflerl.mdp import MDP
from tests.support.examples import estimated_rows, gaps, random_mdp
from tests.support.tries import error_in_probes, gain_by_integration


def _bandit(means: FloatArray, errors: FloatArray, told: FloatArray) -> Rows:
    """One state and step, with what is known of its arms."""
    problem = MDP(np.empty((0, 1, len(means), 1)), means.reshape(1, 1, -1), np.ones(1)).problem(100)
    rewards, variances, precision = (values.reshape(1, 1, -1) for values in (means, errors**2, told))
    rows = Model(problem).rows
    return rows._replace(rewards=rewards, reward_variances=variances, precision=precision, visits=precision)


def _first_probe(
    rows: Rows, start: FloatArray, least: float, most: float, left: float, noise: float
) -> tuple[float, Any]:
    """How many users the first probe of a batch is for, and its policy."""
    horizon, states, _ = rows.rewards.shape
    policy = np.zeros((horizon, states), dtype=np.int32)
    nothing, probed = np.zeros(rows.rewards.shape), np.zeros(horizon, dtype=np.bool_)
    terms = Outlook(most, left, noise, least / C.smallest_share)
    return plan_probe(rows, find_greedy(rows, start), nothing, terms, most, probed, policy), policy


@pytest.mark.slow(2)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 4.0, 400.0]), left=st.sampled_from([0.0, 1e3, 1e6]))
def test_a_probe_is_the_try_of_largest_net_value(seed: int, noise: float, left: float) -> None:
    """Of all arms of a bandit and all sizes, against a search by brute force.

    Without noise none has more visits than half of what is known of an arm.
    """
    rng = np.random.default_rng(seed)
    means, told = rng.uniform(0.02, 0.98, 4), 10.0 ** rng.uniform(0, 4, 4)
    errors = rng.uniform(0.05, 0.9, 4) * np.sqrt(means * (1 - means))
    smallest, most = 1.0, 400.0
    bold = [error_in_probes(errors[a], told[a], noise) for a in range(4)]
    known = np.maximum(2.0, (C.typical * told + 1) / 2) if noise == 0 else np.full(4, np.inf)
    users, policy = _first_probe(_bandit(means, errors, told), np.ones(1), smallest, most, left, noise)
    sizes = smallest * C.probe_step ** np.arange(16)
    gains = {
        (a, n): gain_by_integration(means[a], means.max(), bold[a], told[a], n, left, noise)
        for a in range(4)
        for n in sizes[sizes <= most]
        if means[a] < means.max() and n <= known[a]
    }
    (best, size), gain = max(gains.items(), key=lambda item: item[1])
    if abs(gain) > 1e-6 * (1 + left):
        assert users == pytest.approx(size if gain > 0 else 0.0)
        assert policy[0, 0] == (best if gain > 0 else means.argmax())


def _optimal_stopping(most: float) -> tuple[FloatArray, FloatArray]:
    """How far behind an arm is given up, in its standard errors z, by how many users are left for each of its visits.

    Backward induction: n visits of noise 1 say that it is behind a known one by z / sqrt(n). Trying it up to n' visits
    costs (n' - n) z / sqrt(n) and moves its mean by a normal of variance 1/n - 1/n'; at the end, all left play the
    better one. Visits grow by 2% a step.
    """
    z, growth = np.linspace(-8.0, 8.0, 1601), 1.02
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    visits = most ** -np.linspace(0, 1, int(np.log(most) / np.log(growth)))
    value, bounds = np.zeros_like(z), np.empty(len(visits) - 1)
    for step, n in enumerate(visits[1:]):
        after = visits[step]
        behind = z / np.sqrt(n)
        moved = behind[:, None] + np.sqrt(1 / n - 1 / after) * nodes
        next_value = np.interp(moved * np.sqrt(after), z, value)
        value = np.maximum(0.0, (next_value @ weights) / weights.sum() - (after - n) * behind)
        bounds[step] = z[value > 0].max()
    return 1 / visits[1:] - 1, bounds


def _rivals(gap: float, error: float, known: float, later: float, noise: float = 0.0) -> Rivals:
    """One rival of one state; nothing is allocated."""
    each = [np.full((1, 1, 1), value) for value in (gap, error, known, 0.0)]
    all_there_is = np.full((1, 1, 1), np.inf)
    return Rivals(each[0], each[1], each[2], each[3], noise, np.full((1, 1), later), all_there_is)


def test_probes_without_noise_end_where_optimal_stopping_would() -> None:
    """Tries of half of the visits that are known, errors as bold as probes take them, 10 to 30,000 users to a visit.

    Within a tenth; what one try alone can gain would end them at 0.7 of that or less.
    """
    left, bounds = _optimal_stopping(1e5)
    error, known = 0.5 / np.sqrt(200.0), 200 / C.typical
    for ratio in (10.0, 100.0, 1000.0, 30_000.0):
        ends = []
        for bold in (C.exact_boldness, 1.0):
            worth = [
                z
                for z in np.arange(0.05, 6.0, 0.01)
                if expected_gain(_rivals(z * error, bold * error, known, 200 * ratio), 0, 0, 0, known / 2)
                > 100.0 * z * error
            ]
            ends.append(max(worth))
        optimal = np.interp(ratio, left, bounds)
        assert 1.0 < ends[0] / optimal < 1.15
        assert ends[1] < 0.7 * optimal


def test_a_visit_is_worth_its_part_of_a_whole_try() -> None:
    """Of half of the 40 visits that are known; nothing where nobody comes, or where the action is best."""
    rows = _bandit(np.array([0.5, 0.4]), np.array([1e-9, 0.05]), np.array([1e9, 39 / C.typical]))
    none = np.zeros((1, 1, 2))
    rivals = find_rivals(rows, find_greedy(rows, np.ones(1)), none, Outlook(1.0, 5e4, 0.0, 2.0))
    bold = error_in_probes(0.05, 39 / C.typical, 0.0)
    whole = gain_by_integration(0.4, 0.5, bold, 39 / C.typical, 20.0, 5e4, 0.0)
    for visits in (5.0, 20.0):
        value, which = best_rival(rivals, 0, 0, visits)
        assert which == 1
        assert value == pytest.approx(whole * visits / 20.0, rel=1e-3)
    assert best_rival(rivals, 0, 0, 20.1)[0] == 0.0
    nobody = find_rivals(rows, find_greedy(rows, np.ones(1)), none, Outlook(1.0, 0.0, 0.0, 2.0))
    assert best_rival(nobody, 0, 0, 5.0) == (0.0, -1)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_try_goes_on_as_long_as_gains_most(seed: int) -> None:
    """Of five actions, against every power of two: no gain is cut off, neither by its price nor by a better rival."""
    rng = np.random.default_rng(seed)
    gap, error = rng.uniform(0.05, 1, (2, 1, 1, 5))
    each = gap, error, 10.0 ** rng.uniform(0, 4, gap.shape), np.where(rng.random(gap.shape) < 0.5, 0.0, 30.0)
    later = np.full((1, 1), 10.0 ** rng.uniform(1, 6))
    perfect = later[0] * error * np.array([unit_normal_loss(z) for z in (gap / error).ravel()])
    rivals, visits = Rivals(*each, 1e4, later, perfect), 10.0 ** rng.uniform(0, 3)
    net = []
    for a in range(5):
        had = each[3][0, 0, a]
        added = information(had + visits, 1e4) - information(had, 1e4)
        gains = [expected_gain(rivals, 0, 0, a, 2.0**k * added) / 2.0**k for k in range(60)]
        net.append(max(gains) - visits * gap[0, 0, a])
    value, which = best_rival(rivals, 0, 0, visits)
    assert value == pytest.approx(max(0.0, *net), rel=1e-9)
    assert which == (int(np.argmax(net)) if max(net) > 0 else -1)


@settings(max_examples=200, deadline=None)
@given(now=st.floats(1e-12, 1e7), had=st.floats(0, 1e12))
@example(now=5.782717456563052e-10, had=3584258.4380608643)
def test_a_gain_is_a_number(now: float, had: float) -> None:
    """However little a try tells beside what is allocated: rounding makes it nothing, not less."""
    perfect = np.full((1, 1, 1), 1e6)
    rivals = _rivals(0.3, 0.2, 7.0, 1e6, 25.0)._replace(allocated=np.full((1, 1, 1), had), perfect=perfect)
    assert np.isfinite(expected_gain(rivals, 0, 0, 0, now))
    assert np.isfinite(best_rival(rivals, 0, 0, now)[0])


def test_what_is_allocated_is_not_probed_again() -> None:
    """With a hundred times the visits on their way, one more probe tells nothing."""
    rows = _bandit(np.array([0.7, 0.5]), np.array([1e-6, 0.3]), np.array([1e6, 1.0]))
    greedy, policy = find_greedy(rows, np.ones(1)), np.zeros((1, 1), dtype=np.int32)
    users = []
    for allocated in (0.0, 1e4):
        probed = np.zeros(1, dtype=np.bool_)
        given_ = np.array([0.0, allocated]).reshape(1, 1, 2)
        users.append(plan_probe(rows, greedy, given_, Outlook(400.0, 1e5, 1.0, 8.0), 400.0, probed, policy))
    assert users[0] > 0
    assert users[1] == 0


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_probes_count_other_steps_where_they_are_alike(noise: float) -> None:
    """One step of one state, or four alike: a rival is probed from so many users on, or a fourth as many."""
    first = []
    for steps in (1, 4):
        shape = (steps, 1, 2)
        rows = estimated_rows(MDP(np.ones((steps - 1, 1, 2, 1)), np.broadcast_to([0.5, 0.4], shape), np.ones(1)))
        precision = np.full(shape, 40.0 / C.typical)
        rows = rows._replace(reward_variances=np.full(shape, 0.1**2), precision=precision, homogeneity=1.0)
        users = np.geomspace(10, 1e6, 2000)
        probes = [_first_probe(rows, np.ones(1), 1.0, 200.0, left, noise)[0] for left in users]
        first.append(users[np.flatnonzero(probes)[0]])
    assert first[0] / first[1] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_without_noise_the_probes_of_a_batch_are_at_different_steps(noise: float) -> None:
    """Three steps of one state, where as much is to be gained: else the same would be probed each time."""
    rows = estimated_rows(MDP(np.ones((2, 1, 2, 1)), np.tile([0.5, 0.4], (3, 1, 1)), np.ones(1)))
    precision = np.full((3, 1, 2), 40.0 / C.typical)
    rows = rows._replace(reward_variances=np.full((3, 1, 2), 0.1**2), precision=precision)
    greedy, probed = find_greedy(rows, np.ones(1)), np.zeros(3, dtype=np.bool_)
    steps = []
    for _ in range(3):
        policy = np.zeros((3, 1), dtype=np.int32)
        terms = Outlook(200.0, 1e6, noise, 2.0)
        assert plan_probe(rows, greedy, np.zeros((3, 1, 2)), terms, 200.0, probed, policy) > 0
        steps.append(int(policy.argmax()))
    assert len(set(steps)) == (1 if noise else 3)


def _batch(
    rows: Rows,
    users: float,
    left: float,
    noise: float,
    smallest: float,
    each: float = 0.0,
    following: float = 0.0,
    parts: int = 1,
) -> tuple[PolicyArray, FloatArray]:
    """The policies of a batch and how many play each, if it stands for so many parts."""
    ties = np.random.default_rng(0).random((C.policies + (parts - 1) * C.probes, *rows.rewards.shape))
    start = np.full(rows.rewards.shape[1], 1.0 / rows.rewards.shape[1])
    variances = noise - each * np.arange(2.0 * len(rows.rewards) - 1)[::-1]
    policies, shares, _ = plan_batch(rows, start, Outlook(users, left, noise, smallest, following), variances, ties)
    return policies, shares


def test_nobody_probes_before_anything_was_seen() -> None:
    """The first of a batch's policies is the optimistic plan, though rounding puts some actions behind others."""
    mdp = random_mdp(0, 4, 10, 2, sparse=True)
    rows = Model(mdp.problem(10**6)).rows
    assert (find_greedy(rows, np.full(10, 0.1)).gap > 0).any()
    plan, values = np.empty((4, 10), dtype=np.int32), np.empty((5, 10))
    ties = np.random.default_rng(0).random((C.policies, *rows.rewards.shape))
    policies, _ = _batch(rows, 100.0, 1e6, 0.0, 4.0)
    optimistic_policy(rows, np.zeros((4, 10, 2)), Outlook(100.0, 1e6, 0.0, 4.0), ties[0], plan, values)
    np.testing.assert_array_equal(policies[0], plan)


@pytest.mark.parametrize("next_part", [0.0, 0.5, 1.0])
def test_few_batches_leave_a_part_of_a_probe_to_the_next(next_part: float) -> None:
    """A quarter of it if a batch stands for four, or as much of it as the next batch is of all that is left."""
    rows = _bandit(np.array([0.6, 0.3]), np.array([0.001, 0.2]), np.array([1e5, 20.0]))
    (whole, *_), left = _batch(rows, 2e4, 1e5, 100.0, 20.0)[1], 1e5
    policies, shares = _batch(rows, 2e4, left, 100.0, 20.0, following=next_part * left, parts=4)
    assert policies.ravel()[0] == 1
    assert shares[0] == round(whole * max(0.25, next_part))
    assert shares.sum() == 2e4


def _planned(users: float, *, unknown: float = 0.0) -> tuple[list[int], list[float]]:
    """The arms of a batch of a bandit and how many try each, at least 100 but for probes.

    Its second arm is behind by 0.3, give or take 0.2; its third by 0.1, give or take what is `unknown`.
    """
    rows = _bandit(np.array([0.6, 0.3, 0.5]), np.array([0.001, 0.2, unknown]), np.array([1e5, 20.0, 20.0]))
    policies, shares = _batch(rows, users, 1e5, 100.0, 100.0)
    return policies.ravel().tolist(), shares.tolist()


def test_users_probe_where_optimism_is_for_the_greedy_policy_anyhow() -> None:
    """Some part of them at most, in probes of 50 or more, and a whole try is left to the plans; else a small part."""
    part = C.always + C.idle
    for users in (49.0 / part, 145.0):  # too few, or they leave less than a whole try
        assert _planned(np.floor(users)) == ([0], [np.floor(users)])
    for users, probe in ((160.0, 50.0), (np.floor(74.0 / part), 50.0), (np.ceil(75.1 / part), 75.0)):
        arms, shares = _planned(users)
        assert arms[:2] == [1, 0]
        assert shares[0] == probe <= part * users
    for users in (49.0 / C.always, 51.0 / C.always):
        arms, shares = _planned(np.rint(users), unknown=0.5)
        assert arms[0] == 2
        assert (shares[0] < 100) == (users * C.always > 50)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sparse=st.booleans())
def test_who_does_as_the_greedy_policy(seed: int, sparse: bool) -> None:
    """The part of a plan's users who never do anything else, step by step; and the occupancy of a policy."""
    mdp = random_mdp(seed, 3, 3, 2, sparse=sparse)
    rows, occupancy = estimated_rows(mdp), np.zeros((3, 3))
    best = gaps(mdp).argmin(axis=-1).astype(np.int32)
    plan = np.where(np.random.default_rng(seed).random(best.shape) < 0.3, 1 - best, best).astype(np.int32)
    same, table = plan == best, mdp.layout.table(mdp.probabilities)
    here = mdp.start * same[0]
    for h in range(2):
        here = here @ table[h, np.arange(3), best[h]] * same[h + 1]
    assert occupancy_of(rows, mdp.start.copy(), plan, best, occupancy) == pytest.approx(here.sum())
    assert occupancy_of(rows, mdp.start.copy(), plan, plan, occupancy) == pytest.approx(1.0)
    visited = planning.visit_probabilities(table, mdp.start, plan[None])[0]
    np.testing.assert_allclose(occupancy, visited, atol=1e-9)


def test_plans_of_a_batch_know_of_each_other() -> None:
    """Nobody knows any of six arms: with room for six tries each is tried, not one arm six times."""
    policies, shares = _batch(_bandit(np.full(6, 0.5), np.full(6, 0.3), np.full(6, 1.0)), 60.0, 1e5, 4.0, 10.0)
    assert shares.sum() == 60
    assert len(set(policies.ravel().tolist())) >= 5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_follows_counts_where_the_next_states_differ(seed: int) -> None:
    """sum (p - p*)^2 D, D what is open of the next step's rewards, beside the error of the row itself.

    Its slope is that of rows which all have visits of their own, p of those of the row: by a small step of them.
    """
    mdp = random_mdp(seed, 2, 3, 2)
    rng = np.random.default_rng(seed)
    open_, known = rng.uniform(0.01, 0.1, (2, 3, 2)), rng.uniform(1e2, 1e4, (2, 3, 2))
    sure = np.full((2, 3, 2), 1e-12)
    rows = estimated_rows(mdp)._replace(reward_variances=open_, chance_error=sure, noise_error=sure, homogeneity=0.0)
    variance, slope = find_greedy(rows._replace(precision=known - 1 / C.typical), mdp.start.copy())[3:5]
    best, last = gaps(mdp).argmin(axis=-1), np.arange(3)
    p = mdp.layout.table(mdp.probabilities)[0]
    for x in range(3):
        a = 1 - best[0, x]
        apart = (p[x, a] - p[x, best[0, x]]) ** 2 @ open_[1, last, best[1]]
        assert variance[0, x, a] == pytest.approx(open_[0, x, a] + apart, rel=1e-6)
        told = 1e-2  # precision added here, of which p goes on
        behind = open_[1, last, best[1]] / (1 + p[x, a] * told / known[1, last, best[1]])
        after = open_[0, x, a] / (1 + told / known[0, x, a]) + (p[x, a] - p[x, best[0, x]]) ** 2 @ behind
        assert slope[0, x, a] == pytest.approx((variance[0, x, a] - after) / told, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), alike=st.sampled_from([0.0, 0.5, 1.0]), sparse=st.booleans())
def test_fewer_visits_reach_what_lies_further_behind(seed: int, alike: float, sparse: bool) -> None:
    """Where the second and third step are open: of their slopes the part that one and two transitions leave.

    Where steps are alike their errors add up to more, and what falls of them with it.
    """
    mdp = random_mdp(seed, 3, 3, 2, sparse=sparse)
    rng = np.random.default_rng(seed)
    open_, known = rng.uniform(0.01, 0.1, (3, 3, 2)), rng.uniform(1e2, 1e4, (3, 3, 2))
    open_[0], sure = 1e-12, np.full((3, 3, 2), 1e-15)
    rows = estimated_rows(mdp)._replace(reward_variances=open_, chance_error=sure, noise_error=sure, homogeneity=alike)
    slope = find_greedy(rows._replace(precision=known - 1 / C.typical), mdp.start.copy()).slope
    best, each = gaps(mdp).argmin(axis=-1), np.arange(3)
    p, slopes = mdp.layout.table(mdp.probabilities), open_ / known
    q, here = p[1, each, best[1]], open_[1, each, best[1]]
    after = q**2 @ open_[2, each, best[2]]
    together = 1 + 2 * alike * np.sqrt(here * after) / (here + after)
    behind = together * (slopes[1, each, best[1]] + q**3 @ slopes[2, each, best[2]])
    for x in range(3):
        a, b = 1 - best[0, x], best[0, x]
        assert slope[0, x, a] == pytest.approx((p[0, x, a] - p[0, x, b]) ** 2 * p[0, x, a] @ behind, rel=1e-5)


def test_a_probe_is_as_large_as_what_lies_behind_it_needs() -> None:
    """A row that is known well, and behind it one that nobody knows: no more users than if nothing else were known."""
    sizes = []
    for known in (1e1, 1e5):
        towards = np.eye(2)[[[0, 1], [0, 1]]][None]
        rewards = np.array([[[0.0, 0.0], [0.0, 0.0]], [[0.5, 0.0], [0.3, 0.0]]])
        rows = estimated_rows(MDP(towards, rewards, np.array([1.0, 0.0])))
        open_, precision = np.full((2, 2, 2), 1e-9), np.full((2, 2, 2), 1e6)
        open_[1, 1, 0], precision[1, 1, 0], precision[0, 0, 1] = 0.2**2, 10.0, known
        rows = rows._replace(reward_variances=open_, precision=precision, homogeneity=0.0)
        users, policy = _first_probe(rows, np.array([1.0, 0.0]), 10.0, 1e5, 1e5, 100.0)
        assert policy[0, 0] == 1
        sizes.append(users)
    assert sizes[0] == sizes[1] < 1000
