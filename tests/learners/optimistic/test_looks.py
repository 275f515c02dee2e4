"""Second looks: which try gains most, who may look, and what a whole batch plays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl import planning
from shufflerl.arrays import FloatArray
from shufflerl.checks import frozen
from shufflerl.learners.optimistic.detours import Rivals, gain_of
from shufflerl.learners.optimistic.looks import (
    _BOLD_UNNOISY,
    _BOLD_UNNOISY_ALIKE,
    MOST,
    _count_promises,
    _faithful,
    _skew,
    as_normal,
    find_best,
    plan_batch,
    plan_look,
)
from shufflerl.learners.optimistic.optimism import Rows, optimistic_policy
from shufflerl.learners.optimistic.pooling import TYPICAL
from shufflerl.learners.optimistic.posterior import Posterior
from shufflerl.mdp import MDP
from tests.support.examples import behind_best, estimated_rows, random_mdp
from tests.support.tries import error_in_looks, first_look, gain_by_integration

#: Where users begin: read-only as a problem's, as kernels would be compiled again for writable ones.
_SURE, _EVEN = frozen(np.ones(1)), frozen(np.full(2, 0.5))


def _bandit(means: FloatArray, errors: FloatArray, told: FloatArray) -> Rows:
    """One state and step, with what is known of its arms."""
    none, ones = np.empty(0), np.ones((1, 1, len(means)))
    of_arms = (means, errors**2, np.ones(len(means)), told, told)
    rewards, variances, differences, visits, told = (values.reshape(1, 1, -1) for values in of_arms)
    rows = frozen(np.zeros(1, dtype=np.int64)), frozen(np.empty(0, dtype=np.int32))
    unlike = differences[0], differences[0]
    return Rows(*rows, none, none, none, ones, ones, ones, rewards, variances, *unlike, visits, told, 0.0, False)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 4.0, 400.0]),
    left=st.sampled_from([0.0, 1e3, 1e6]),
    kept=st.sampled_from([0.0, 0.9]),
)
def test_a_look_is_the_try_that_gains_most(seed: int, noise: float, left: float, kept: float) -> None:
    """Of all arms of a bandit and all sizes, against a search by brute force.

    Without noise none has more visits than half of what is known of an arm.
    """
    rng = np.random.default_rng(seed)
    means, told = rng.uniform(0.02, 0.98, 4), 10.0 ** rng.uniform(0, 4, 4)
    errors = rng.uniform(0.05, 0.9, 4) * np.sqrt(means * (1 - means))
    smallest, most = 1.0, 400.0
    policy = np.zeros((1, 1), dtype=np.int32)
    rows = _bandit(means, errors, told)
    bold = [error_in_looks(means[a], means.max(), errors[a], told[a], noise) for a in range(4)]
    known = np.maximum(2.0, (TYPICAL * told + 1) / 2) if noise == 0 else np.full(4, np.inf)
    users = first_look(
        rows, find_best(rows, _SURE), np.zeros((1, 1, 4)), _SURE, (smallest, most), left, noise, policy, kept
    )
    sizes = smallest * 1.5 ** np.arange(16)
    lost = max(1.0, float(told @ (means.max() - means)))  # as many visits as are told
    gains = {
        (a, n): gain_by_integration(means[a], means.max(), bold[a], told[a], n, left, noise, lost=lost, kept=kept)
        for a in range(4)
        for n in sizes[sizes <= most]
        if means[a] < means.max() and n <= known[a]
    }
    (best, size), gain = max(gains.items(), key=lambda item: item[1])
    if abs(gain) > 1e-6 * (1 + left):
        assert users == pytest.approx(size if gain > 0 else 0.0)
        assert policy[0, 0] == (best if gain > 0 else means.argmax())


def test_a_look_waits_for_larger_batches() -> None:
    """Twenty visits are lost in noise of deviation 30 and yet worth their price; sixty of a later batch are worth more.

    That is none where there are no larger batches, little if hardly anybody is left by then.
    """
    rows = _bandit(np.array([0.5, 0.45]), np.array([0.01, 0.15]), np.array([1e5, 30.0]))
    policy = np.zeros((1, 1), dtype=np.int32)
    best = find_best(rows, _SURE)
    looks = [
        first_look(rows, best, np.zeros((1, 1, 2)), _SURE, (20.0, 20.0), 1e6, 900.0, policy, kept)
        for kept in (0.0, 1e-3, 0.95)
    ]
    assert looks == [20.0, 20.0, 0.0]


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


@pytest.mark.slow
def test_looks_without_noise_end_where_optimal_stopping_would() -> None:
    """Tries of half of the visits that are known, errors as bold as looks take them, 10 to 30,000 users to a visit.

    Within a tenth where steps differ, up to a fifth later where they are alike; what one try alone can gain would end
    them at 0.6 of that.
    """
    left, bounds = _optimal_stopping(1e5)
    for ratio in (10.0, 100.0, 1000.0, 30_000.0):
        error, known = np.full((1, 1, 1), 0.5 / np.sqrt(200.0)), np.full((1, 1, 1), 200.0 / TYPICAL)
        none = np.zeros((1, 1, 1))
        room, of_nobody = np.ones((1, 1)), np.zeros((1, 1))
        ends = []
        for bold in (_BOLD_UNNOISY, _BOLD_UNNOISY_ALIKE, 1.0):
            behind = [
                z
                for z in np.arange(0.05, 6.0, 0.01)
                if gain_of(
                    Rivals(z * error, bold * error, room, known, none, 0.0, of_nobody, of_nobody, none, 1.0, 0.0),
                    *(0, 0, 0),
                    100.0,
                    ratio * 200.0,
                    float(z * error[0, 0, 0]),
                    1.0,
                )
                > 0
            ]
            ends.append(max(behind))
        optimal = np.interp(ratio, left, bounds)
        assert ends[0] == pytest.approx(optimal, rel=0.1)
        assert 1.05 * optimal < ends[1] < 1.2 * optimal
        assert ends[2] < 0.7 * optimal


@pytest.mark.parametrize(("unpaid", "where"), [(3.0, 0.5), (3.0, 0.7), (8.0, 0.3), (8.0, 0.6), (100.0, 0.05)])
def test_rewards_that_nobody_was_paid_may_be_high(unpaid: float, where: float) -> None:
    """How many deviations z out a normal law is beyond as often as a beta law of 1 and n more is above some reward.

    What looks take for z is within a tenth; by the beta law's own mean and deviation it would be 1.2 to 1.6 times that.
    """
    law = stats.beta(1.0, 1.0 + unpaid)
    skew = _skew(law.mean(), law.var(), law.var())
    assert skew == pytest.approx(law.stats(moments="s"))
    z, behind = stats.norm.isf(law.sf(where)), where - law.mean()
    assert behind / np.sqrt(as_normal(behind, law.var(), skew)) == pytest.approx(z, rel=0.1)


def test_the_skew_counts_by_its_part_of_the_error() -> None:
    """Third moments of independent errors add up: that of a reward, and none of what follows."""
    rng = np.random.default_rng(1)
    law = stats.beta(1.0, 5.0)
    drawn = law.rvs(400_000, random_state=rng) + rng.normal(0.0, 0.1, 400_000)
    assert _skew(law.mean(), law.var(), law.var() + 0.01) == pytest.approx(stats.skew(drawn), abs=0.02)
    assert _skew(0.3, 0.0, 0.01) == 0.0
    mdp = random_mdp(3, 2, 2, 2)
    rewards, open_ = np.full((2, 2, 2), law.mean()), np.full((2, 2, 2), law.var())
    rows = estimated_rows(mdp)._replace(rewards=rewards, reward_variances=open_, alike=0.0, exact=True)
    best = find_best(rows, _EVEN)._replace(behind=np.full((2, 2, 2), 0.6), variance=open_ + 0.01)
    error, _ = _count_promises(rows, best, np.zeros((2, 2, 2)), 0.0)
    skew = _skew(law.mean(), law.var(), law.var() + 0.01)
    np.testing.assert_allclose(error, _BOLD_UNNOISY * np.sqrt(as_normal(0.6, law.var() + 0.01, skew)))


@pytest.mark.parametrize(("noise", "fewer"), [(0.0, 1.9), (10.0, 2.5)])
def test_looks_count_other_steps_where_they_are_alike(noise: float, fewer: float) -> None:
    """One step of one state, or four alike: a rival is looked at from so many users on, or so many times fewer.

    1 + 3 / 2 with noise, 1 + 3 (3 / 10) without.
    """
    first = []
    for steps in (1, 4):
        shape = (steps, 1, 2)
        rows = estimated_rows(MDP(np.ones((steps - 1, 1, 2, 1)), np.broadcast_to([0.5, 0.4], shape), np.ones(1)))
        told = np.full(shape, 40.0 / TYPICAL)
        rows = rows._replace(reward_variances=np.full(shape, 0.1**2), told=told, exact=noise == 0.0, alike=1.0)
        best, policy, users = (
            find_best(rows, _SURE),
            np.zeros((steps, 1), dtype=np.int32),
            np.geomspace(10, 1e6, 2000),
        )
        looks = [first_look(rows, best, np.zeros(shape), _SURE, (1.0, 200.0), left, noise, policy) for left in users]
        first.append(users[np.flatnonzero(looks)[0]])
    assert first[0] / first[1] == pytest.approx(fewer, rel=0.02)


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_without_noise_the_looks_of_a_batch_are_at_different_steps(noise: float) -> None:
    """Three steps of one state, where as much is to be gained: else the same would be looked at each time."""
    rows = estimated_rows(MDP(np.ones((2, 1, 2, 1)), np.tile([0.5, 0.4], (3, 1, 1)), np.ones(1)))
    rows = rows._replace(reward_variances=np.full((3, 1, 2), 0.1**2), told=np.full((3, 1, 2), 40.0 / TYPICAL))
    best, looked = find_best(rows, _SURE), np.zeros(3, dtype=np.bool_)
    steps = []
    for _ in range(3):
        policy = np.zeros((3, 1), dtype=np.int32)
        assert plan_look(rows, best, np.zeros((3, 1, 2)), _SURE, (1.0, 200.0), 1e6, 0.0, noise, looked, policy) > 0
        steps.append(int(policy.argmax()))
    assert len(set(steps)) == (1 if noise else 3)


def test_looks_with_noise_are_less_bold_where_steps_are_alike() -> None:
    rows = estimated_rows(random_mdp(3, 3, 2, 2))._replace(reward_variances=np.full((3, 2, 2), 0.01))
    best = find_best(rows, _EVEN)
    unlike, alike = (_count_promises(rows._replace(alike=by), best, np.zeros((3, 2, 2)), 9.0)[0] for by in (0.0, 1.0))
    np.testing.assert_allclose(alike, unlike * 0.8 / 0.9)


def test_nobody_looks_back_before_anything_was_seen() -> None:
    """The first of a batch's policies is the optimistic plan, though rounding puts some actions behind others."""
    mdp = random_mdp(0, 4, 10, 2, sparse=True)
    rows, start = Posterior(mdp.problem(10**6)).rows, frozen(np.full(10, 0.1))
    assert (find_best(rows, start).behind > 0).any()
    lots = np.random.default_rng(1).random((MOST, 4, 10, 2))
    policies, shares = np.empty((MOST, 4, 10), dtype=np.int32), np.empty(MOST)
    plan, values = np.empty((4, 10), dtype=np.int32), np.empty((4, 10))
    plan_batch(rows, start, 100.0, 1e6, 0.0, 0.0, 0.0, 4.0, lots, policies, shares, np.ones((2, 4), dtype=bool))
    optimistic_policy(rows, np.zeros((4, 10, 2)), 0.5, 100.0, 1e6, 0.0, lots[0], plan, values)
    np.testing.assert_array_equal(policies[0], plan)


def _planned(users: float, *, unknown: float = 0.0, kept: float = 0.0) -> tuple[list[int], list[float]]:
    """The arms of a batch of a bandit and how many try each, at least 100 but for looks.

    Its second arm is behind by 0.3, give or take 0.2; its third by 0.1, give or take what is `unknown`.
    """
    rows = _bandit(np.array([0.6, 0.3, 0.5]), np.array([0.001, 0.2, unknown]), np.array([1e5, 20.0, 20.0]))
    policies, shares = np.empty((MOST, 1, 1), dtype=np.int32), np.empty(MOST)
    lots = np.random.default_rng(0).random((MOST, 1, 1, 3))
    asked = np.ones((2, 1), dtype=np.bool_)
    count = plan_batch(rows, _SURE, users, 1e5, kept, 100.0, 0.0, 100.0, lots, policies, shares, asked)
    return policies[:count].ravel().tolist(), shares[:count].tolist()


def test_users_look_back_where_optimism_is_for_the_best_anyhow() -> None:
    """0.36 of them at most, in looks of 50 or more, and a whole try is left to the plans; else a twenty-fifth."""
    for users in (130.0, 145.0):  # 0.36 of them are too few, or leave less than a whole try
        assert _planned(users) == ([0], [users])
    for users, look in ((160.0, 50.0), (208.0, 50.0), (209.0, 75.0)):
        arms, shares = _planned(users)
        assert arms[:2] == [1, 0]
        assert shares[0] == look <= 0.36 * users
    for users in (1240.0, 1260.0):
        arms, shares = _planned(users, unknown=0.5)
        assert arms[0] == 2
        assert (shares[0] < 100) == (shares[0] <= 0.04 * users) == (users == 1260.0)


def test_who_waits_for_larger_batches_does_not_look() -> None:
    """A whole batch is planned by what is left when batches are larger: nobody looks now if all of them still come."""
    assert _planned(160.0)[0][0] == 1
    assert _planned(160.0, kept=1.0)[0][0] == 0


def test_looks_reckon_with_less_of_the_noise_that_counters_add() -> None:
    """By 0.7 of it: as many users look as if the noise were that of three tenths of the others from the start."""
    looks = []
    for noise, each in ((1000.0, 0.0), (1000.0, 900.0), (1000.0 - 0.7 * 900.0, 0.0), (1000.0 - 0.6 * 900.0, 0.0)):
        rows = _bandit(np.array([0.6, 0.5]), np.array([0.001, 0.1]), np.array([1e5, 100.0]))
        policies, shares = np.empty((MOST, 1, 1), dtype=np.int32), np.empty(MOST)
        asked, sizes = np.ones((2, 1), dtype=np.bool_), []
        for smallest in np.geomspace(20.0, 30.0, 20):  # sizes are tried in steps, from there on
            no_lots = np.zeros((MOST, 1, 1, 2))
            plan_batch(rows, _SURE, 2e4, 1e5, 0.0, noise, each, smallest, no_lots, policies, shares, asked.copy())
            assert policies[0, 0, 0] == 1
            sizes.append(shares[0])
        looks.append(np.mean(sizes))
    assert looks[0] > looks[3] > looks[1] == looks[2]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sparse=st.booleans())
def test_no_action_can_be_ahead_by_more_than_its_room(seed: int, sparse: bool) -> None:
    """Paid 1 and sent to the best next state for sure, it would be ahead by just that."""
    mdp = random_mdp(seed, 4, 3, 2, sparse=sparse)
    values = planning.optimal_q(mdp.layout.table(mdp.probabilities), mdp.rewards).max(axis=-1)
    after = np.append(values[1:].max(axis=-1), 0.0)[:, None]
    np.testing.assert_allclose(find_best(estimated_rows(mdp), mdp.start).room, 1 + after - values, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sparse=st.booleans())
def test_who_is_faithful_to_the_best_policy(seed: int, sparse: bool) -> None:
    """The part of a plan's users who never do anything else, step by step."""
    mdp = random_mdp(seed, 3, 3, 2, sparse=sparse)
    best = behind_best(mdp).argmin(axis=-1).astype(np.int32)
    plan = np.where(np.random.default_rng(seed).random(best.shape) < 0.3, 1 - best, best).astype(np.int32)
    same, table = plan == best, mdp.layout.table(mdp.probabilities)
    here = mdp.start * same[0]
    for h in range(2):
        here = here @ table[h, np.arange(3), best[h]] * same[h + 1]
    assert _faithful(estimated_rows(mdp), mdp.start, plan, best) == pytest.approx(here.sum())


def test_plans_of_a_batch_know_of_each_other() -> None:
    """Nobody knows any of six arms: with room for six tries each is tried, not one arm six times."""
    rows = _bandit(np.full(6, 0.5), np.full(6, 0.3), np.full(6, 1.0))
    policies, shares = np.empty((MOST, 1, 1), dtype=np.int32), np.empty(MOST)
    lots = np.random.default_rng(0).random((MOST, 1, 1, 6))
    asked = np.ones((2, 1), dtype=np.bool_)
    count = plan_batch(rows, _SURE, 60.0, 1e5, 0.0, 4.0, 0.0, 10.0, lots, policies, shares, asked)
    assert shares[:count].sum() == 60
    assert len(set(policies[:count].ravel().tolist())) >= 5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_follows_counts_where_the_next_states_differ(seed: int) -> None:
    """sum (p - p*)^2 D, D what is open of the next step's rewards, beside the error of the row itself."""
    mdp = random_mdp(seed, 2, 3, 2)
    open_ = np.random.default_rng(seed).uniform(0.01, 0.1, (2, 3, 2))
    sure = np.full((2, 3, 2), 1e-12)
    rows = estimated_rows(mdp)._replace(reward_variances=open_, sampling=sure, noise=sure, spread=sure, alike=0.0)
    variance = find_best(rows, mdp.start).variance
    best, last = behind_best(mdp).argmin(axis=-1), np.arange(3)
    p = mdp.layout.table(mdp.probabilities)[0]
    for x in range(3):
        a = 1 - best[0, x]
        apart = (p[x, a] - p[x, best[0, x]]) ** 2 @ open_[1, last, best[1]]
        assert variance[0, x, a] == pytest.approx(open_[0, x, a] + apart, rel=1e-6)


def test_what_was_lost_is_reckoned_by_the_estimates() -> None:
    """Every visit of an action behind the best one lost so much."""
    rows = _bandit(np.array([0.6, 0.3, 0.5]), np.full(3, 0.1), np.array([100.0, 20.0, 30.0]))
    assert find_best(rows, _SURE).lost == pytest.approx(20 * 0.3 + 30 * 0.1)
