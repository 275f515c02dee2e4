"""What a try of a row gains, and the ways to rows that the best policy rarely passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shufflerl import planning
from shufflerl.arrays import PolicyArray
from shufflerl.checks import frozen
from shufflerl.learners.optimistic.detours import Rivals, count_gains, gain_of, go_to, learned, promising
from shufflerl.learners.optimistic.looks import find_best
from shufflerl.learners.optimistic.optimism import Rows
from shufflerl.learners.optimistic.pooling import TYPICAL
from shufflerl.mdp import MDP
from tests.support.examples import all_policies, behind_best, estimated_rows, random_mdp
from tests.support.tries import error_in_looks, first_look, gain_by_integration


def test_a_visit_is_worth_its_part_of_a_whole_try() -> None:
    """Of half of the 40 visits that are known; nothing where nobody comes, or where the action is best."""
    behind, error = np.array([0.1, 0.2, 0.0, 0.1]).reshape(4, 1, 1), np.full((4, 1, 1), 0.05)
    known, none = np.full((4, 1, 1), 40.0 / TYPICAL), np.zeros((4, 1, 1))
    later = 1e5 * np.array([[0.5], [0.3], [1.0], [0.0]])
    rivals = Rivals(behind, error, np.ones((4, 1)), known, none, 0.0, later, np.zeros((4, 1)), none.copy(), 1.0, 0.0)
    count_gains(rivals)
    for h in (0, 1):
        d, whole = (
            behind[h, 0, 0],
            gain_by_integration(0.4 - behind[h, 0, 0], 0.4, 0.05, 39 / TYPICAL, 20.0, later[h, 0], 0.0),
        )
        assert gain_of(rivals, h, 0, 0, 20.0, later[h, 0], d, 1.0) == pytest.approx(whole, rel=1e-3)
        assert gain_of(rivals, h, 0, 0, 5.0, later[h, 0], d, 1.0) == pytest.approx(whole / 4, rel=1e-3)
        assert rivals.by_visit[h, 0, 0] == pytest.approx(whole / 20, rel=1e-3)
    assert not rivals.by_visit[2:].any()


@settings(max_examples=200, deadline=None)
@given(now=st.floats(1e-12, 1e7), had=st.floats(0, 1e12), room=st.sampled_from([0.0, 1e-300, 0.1, 1e9]))
@example(now=5.782717456563052e-10, had=3584258.4380608643, room=0.1)
def test_a_gain_is_a_number(now: float, had: float, room: float) -> None:
    """However little a try tells beside what is promised: rounding makes it nothing, not less."""
    behind, error, known, promised = (np.full((1, 1, 1), value) for value in (0.3, 0.2, 7.0, had))
    none = np.zeros((1, 1))
    rivals = Rivals(behind, error, none + room, known, promised, 25.0, none, none, np.zeros((1, 1, 1)), 1.0, 0.0)
    assert np.isfinite(gain_of(rivals, 0, 0, 0, now, 1e6, 0.3, 1.0))


def test_a_gain_counts_more_where_more_is_at_stake_than_was_lost() -> None:
    """2.5 times at most, 1.75 times where a mistake would cost three times what was lost; without noise once."""
    behind, error, known, none = (np.full((1, 1, 1), value) for value in (0.2, 0.1, 50.0, 0.0))
    stake = 1e4 * 0.1 / (1 + 2)

    def gain(noise: float, lost: float) -> float:
        room = np.ones((1, 1))
        return float(
            learned(
                Rivals(behind, error, room, known, none, noise, none[0], none[0], none, lost, 0.0),
                *(0, 0, 0),
                30.0,
                1e4,
                0.2,
                1.0,
            )
        )

    once = gain(16.0, 1e12)
    assert gain(16.0, stake / 3) == pytest.approx(1.75 * once)
    assert gain(16.0, 1e-9) == pytest.approx(2.5 * once)
    assert gain(0.0, 1.0) == gain(0.0, 1e12) > 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), better=st.floats(0.0, 5.0), sparse=st.booleans())
def test_the_way_to_a_row_is_the_best_policy_if_it_pays_more(seed: int, better: float, sparse: bool) -> None:
    """Against all 64 policies of a small MDP: its value, who gets there, and what they give up."""
    mdp = random_mdp(seed, 3, 2, 2, sparse=sparse)
    h, x, a = np.random.default_rng(seed).integers(mdp.rewards.shape)
    behind = behind_best(mdp)
    policy = np.zeros((3, 2), dtype=np.int32)
    better += behind[h, x, a]
    best = behind.argmin(axis=-1).astype(np.int32)
    rate, cost = go_to(estimated_rows(mdp), behind, mdp.start, best, h, x, a, better, policy)
    more = mdp.rewards.copy()
    more[h, x, a] += better
    table = mdp.layout.table(mdp.probabilities)
    values = planning.policy_values(table, more, mdp.start, all_policies(mdp))
    (value,) = planning.policy_values(table, more, mdp.start, policy[None])
    (paid,) = planning.policy_values(table, mdp.rewards, mdp.start, policy[None])
    assert value == pytest.approx(values.max())
    assert rate == pytest.approx(planning.visit_probabilities(table, mdp.start, policy[None])[0, h, x])
    assert cost == pytest.approx(mdp.optimal_value - paid, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sparse=st.booleans())
def test_rows_that_nobody_knows_are_promising_wherever_they_are(seed: int, sparse: bool) -> None:
    """Those are taken that can be reached and that cost something: what the best policy does is tried for nothing."""
    mdp = random_mdp(seed, 4, 3, 2, sparse=sparse, start=0)
    behind, table = behind_best(mdp), mdp.layout.table(mdp.probabilities)
    rng = np.random.default_rng(seed)
    unknown = {tuple(rng.integers(behind.shape).tolist()) for _ in range(8)}
    error = np.full(behind.shape, 1e-9)
    for row in unknown:
        error[row] = 1e6
    room = error[..., 0].copy()
    rivals = Rivals(behind, error, room, error, error, 0.0, room, room, error, 1.0, 0.0)
    taken = promising(estimated_rows(mdp), rivals, mdp.start)
    best = behind.argmin(axis=-1).astype(np.int32)
    by_best = planning.visit_probabilities(table, mdp.start, best[None])[0] > 0
    by_any = planning.visit_probabilities(table, mdp.start, all_policies(mdp)).max(axis=0) > 0
    expected = {(h, x, a) for h, x, a in unknown if by_any[h, x] and not (by_best[h, x] and behind[h, x, a] == 0)}
    assert {tuple(row) for row in taken.tolist()} == expected


_START = frozen(np.array([1.0, 0.0, 0.0]))


def _behind_a_detour(error: float, chance: float = 1.0) -> tuple[Rows, PolicyArray]:
    """Action 0 leads to a state that pays 0.7, action 1 to one that pays 0.6, or by its action 1 nobody knows what.

    The way there succeeds by chance, or else leads where action 0 does.
    """
    moves = np.zeros((1, 3, 2, 3))
    moves[0, :, 0, 1] = 1.0
    moves[0, :, 1, 1], moves[0, :, 1, 2] = 1.0 - chance, chance
    pays = np.zeros((2, 3, 2))
    pays[1] = [[0.0, 0.0], [0.7, 0.0], [0.6, 0.5]]
    mdp = MDP(moves, pays, _START)
    variances = np.full((2, 3, 2), 1e-8)
    variances[1, 2, 1] = error**2
    sure = np.full((2, 3, 2), 1e-8)
    told = np.full((2, 3, 2), 1e6)
    told[1, 2, 1] = 1.0
    rows = estimated_rows(mdp)._replace(
        reward_variances=variances, sampling=sure, noise=sure, spread=sure, told=told, alike=0.0
    )
    return rows, np.zeros((2, 3), dtype=np.int32)


def test_users_go_out_of_their_way_to_what_may_be_best() -> None:
    """The best policy never gets there, and the first step alone is sure to be worse."""
    rows, policy = _behind_a_detour(error=0.3)
    users = first_look(rows, find_best(rows, _START), np.zeros((2, 3, 2)), _START, (4.0, 400.0), 1e5, 1.0, policy)
    assert users > 0
    assert policy[0, 0] == 1
    assert policy[1, 2] == 1


@pytest.mark.parametrize(("error", "left"), [(0.01, 1e5), (0.3, 0.0), (0.3, 10.0)])
def test_nobody_goes_where_nothing_is_to_be_gained(error: float, left: float) -> None:
    """It is known to be worse, or nobody comes later who could use it."""
    rows, policy = _behind_a_detour(error)
    users = first_look(rows, find_best(rows, _START), np.zeros((2, 3, 2)), _START, (4.0, 400.0), left, 1.0, policy)
    assert users == 0
    assert policy[0, 0] == 0


@pytest.mark.parametrize("chance", [1.0, 0.5, 0.1])
def test_a_detour_has_the_users_that_gain_most(chance: float) -> None:
    """By integration: who gets there pays 0.2 a visit, by chance, and those who come later gain if they would too."""
    rows, policy = _behind_a_detour(0.3, chance)
    users = first_look(rows, find_best(rows, _START), np.zeros((2, 3, 2)), _START, (4.0, 4000.0), 1e5, 9.0, policy)
    sizes = 4.0 * 1.5 ** np.arange(18)
    error = 0.9 * error_in_looks(0.5, 0.7, 0.3, 1.0, 9.0)
    gains = [
        gain_by_integration(0.5, 0.7, error, 1.0, chance * n, chance * 1e5, 9.0, room=0.4) for n in sizes[sizes <= 4000]
    ]
    assert users == pytest.approx(sizes[int(np.argmax(gains))])
    assert policy[1, 2] == 1


def test_what_is_promised_is_not_looked_at_again() -> None:
    """With a hundred times the visits on their way, one more look tells nothing."""
    rows, policy = _behind_a_detour(error=0.3)
    promised = np.zeros((2, 3, 2))
    promised[1, 2, 1] = 1e4
    users = first_look(rows, find_best(rows, _START), promised, _START, (4.0, 400.0), 1e5, 1.0, policy)
    assert users == 0
