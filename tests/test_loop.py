from __future__ import annotations

import re

import numpy as np
import pytest

from shufflerl import planning
from shufflerl.episodes import MAX_EPISODES, CompiledUCBVI
from shufflerl.errors import InvalidInputError
from shufflerl.history import History
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Mixture
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy
from tests.support.examples import random_mdp

MDP_ = random_mdp(6, horizon=3, states=3, actions=2)


@pytest.mark.parametrize("batch", [1, 25])
def test_regret_is_the_exact_expected_loss_of_what_was_deployed(batch: int) -> None:
    history = learn(UCBVI(MDP_.problem(200), 0, batch=batch), CountPopulation(MDP_, 0), NoPrivacy())
    switches = 0
    for b, record in enumerate(history):
        value = planning.mixture_value(MDP_, record.mixture)
        assert record.regret == pytest.approx(record.users * (MDP_.optimal_value - value), abs=1e-12)
        assert record.reward == pytest.approx(record.users * value, abs=1e-12)
        switches += b > 0 and record.mixture != history.mixture(b - 1)
    assert history.switches == switches > 0
    episodes, cumulative = history.curve
    assert (episodes[0], cumulative[0], episodes[-1]) == (0, 0.0, 200)
    assert cumulative[-1] == pytest.approx(history.total_regret)


def test_progress_is_reported_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    learn(
        UCBVI(MDP_.problem(100), 0, batch=30),
        CountPopulation(MDP_, 0),
        NoPrivacy(),
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen == [(30, 100), (60, 100), (100, 100)]  # ten would be too few for a batch of their own


def test_nothing_left_to_learn_is_an_empty_history() -> None:
    learner = UCBVI(MDP_.problem(10), 0)
    learn(learner, CountPopulation(MDP_, 0), NoPrivacy())
    history = learn(learner, CountPopulation(MDP_, 0), NoPrivacy())
    assert (len(history), history.total_regret, history.switches) == (0, 0.0, 0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sizes", [((3, 3, 2), (3, 4, 2)), ((3, 3, 2), (3, 3, 3)), ((3, 3, 2), (4, 3, 2))])
def test_a_learner_of_another_shape_is_refused_before_anything_is_played(
    sizes: tuple[tuple[int, int, int], tuple[int, int, int]], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may be the larger one; compiled code would read and write past the end of the smaller."""
    if not compiled:
        monkeypatch.setattr(CompiledUCBVI, "if_possible", lambda *_: None)
    for mine, theirs in (sizes, sizes[::-1]):
        learner = UCBVI(random_mdp(0, *mine).problem(100), 0)
        with pytest.raises(InvalidInputError, match=re.escape(f"= {mine} but the population lives in {theirs}")):
            learn(learner, CountPopulation(random_mdp(0, *theirs), 0), NoPrivacy())
        assert (learner.episodes_played, learner.waits) == (0, False)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_support_that_the_population_leaves_is_refused(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(CompiledUCBVI, "if_possible", lambda *_: None)
    sparse = random_mdp(1, sparse=True)
    dense = MDP(np.full_like(sparse.transitions, 1 / 3), sparse.rewards, sparse.start)
    with pytest.raises(InvalidInputError, match=r"can make the transition .* rules out"):
        learn(UCBVI(sparse.problem(10), 0), CountPopulation(dense, 0), NoPrivacy())
    learn(UCBVI(dense.problem(10), 0), CountPopulation(sparse, 0), NoPrivacy())  # knowing less is allowed
    same = MDP(sparse.transitions, sparse.rewards, sparse.start, sparse.support)
    learn(UCBVI(sparse.problem(10), 0), CountPopulation(same, 0), NoPrivacy())


def test_more_batches_than_a_stretch_holds_are_played_exactly() -> None:
    asked = 2 * MAX_EPISODES + 5
    history = learn(UCBVI(MDP_.problem(2 * asked), 0), CountPopulation(MDP_, 0), NoPrivacy(), batches=asked)
    assert len(history) == asked
    whole = learn(UCBVI(MDP_.problem(2 * asked), 0), CountPopulation(MDP_, 0), NoPrivacy())
    np.testing.assert_array_equal(history.regret, whole.regret[:asked])
    assert len(learn(UCBVI(MDP_.problem(9), 0), CountPopulation(MDP_, 0), NoPrivacy(), batches=0)) == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_switches_add_up_wherever_a_run_is_cut(batch: int) -> None:
    def start() -> tuple[UCBVI, CountPopulation]:
        return UCBVI(MDP_.problem(60), 0, batch=batch), CountPopulation(MDP_, 0)

    whole = learn(*start(), NoPrivacy())
    for cut in range(1, len(whole)):
        learner, users = start()
        first = learn(learner, users, NoPrivacy(), batches=cut)
        restored = start()[0]
        restored.restore(learner.save())
        assert first.switches + learn(restored, users, NoPrivacy()).switches == whole.switches > 0


def test_what_was_deployed_is_counted_as_mixtures_and_as_policies() -> None:
    """Two mixtures of the same two policies, one of these by itself twice, and one that nobody was given."""
    left, right, other = ([[action] * 4] * 6 for action in (0, 1, 2))
    deployed = (
        Mixture([left, right], [0.5, 0.5]),
        Mixture.single(left),
        Mixture([left, right], [0.1, 0.9]),
        np.array(left, dtype=np.int32),
        Mixture([left, other], [1.0, 0.0]),
    )
    nothing = np.zeros(5)
    history = History(
        users=np.ones(5, np.int64),
        reward=nothing,
        regret=nothing,
        deployed=np.arange(5),
        deployments=deployed,
        switches=4,
    )
    assert (history.distinct, history.policies) == (4, 2)


@pytest.mark.parametrize("batches", [1.5, -1, "2"])
def test_a_bad_number_of_batches_is_refused(batches: object) -> None:
    with pytest.raises(InvalidInputError, match="batches is"):
        learn(UCBVI(MDP_.problem(10), 0), CountPopulation(MDP_, 0), NoPrivacy(), batches=batches)  # type: ignore[arg-type]


def test_once_a_waiting_batch_is_answered_the_rest_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    play = CountPopulation.play
    monkeypatch.setattr(CountPopulation, "play", lambda self, batch: played.append(batch) or play(self, batch))  # type: ignore[func-returns-value]
    learner = UCBVI(MDP_.problem(300), 0)
    learner.next_batch()
    history = learn(learner, CountPopulation(MDP_, 0), NoPrivacy())
    assert len(played) == 1
    whole = learn(UCBVI(MDP_.problem(300), 0), CountPopulation(MDP_, 0), NoPrivacy())
    np.testing.assert_array_equal(history.regret, whole.regret)
    np.testing.assert_array_equal(history.deployed, whole.deployed)
    assert history.switches == whole.switches


def test_as_many_episodes_as_there_may_be_add_up() -> None:
    history = learn(UCBVI(MDP_.problem(10**18), 0, batch=10**18 // 4), CountPopulation(MDP_, 0), NoPrivacy())
    assert history.users.sum() == history.curve[0][-1] == 10**18
    assert 0 <= history.total_regret < 3e18


def test_everything_prints_in_one_short_line() -> None:
    learner, users = UCBVI(MDP_.problem(2000), 0), CountPopulation(MDP_, 0)
    history = learn(learner, users, NoPrivacy(), batches=1000)
    assert repr(learner) == "<ucbvi(bonus='bernstein', scale=0.05, batch=1), 1,000 of 2,000 episodes played>"
    assert repr(users) == "CountPopulation(MDP(horizon=3, n_states=3, n_actions=2))"
    assert repr(TrajectoryPopulation(MDP_, 0)) == "TrajectoryPopulation(MDP(horizon=3, n_states=3, n_actions=2))"
    assert re.fullmatch(r"History\(1000 batches, 1000 users, regret [0-9.]+\)", repr(history))


class _Unknown:
    """An environment known only by playing it: one state, action 1 pays."""

    def play(
        self, policy: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # one step
        return np.array([0]), policy[0, [0]].astype(np.int64), policy[0, [0]].astype(np.int64)


def test_without_a_truth_rewards_are_counted_and_regret_is_unknown() -> None:
    from shufflerl.mdp import Problem

    history = learn(UCBVI(Problem(1, 1, 2, 100), 0, batch=10), TrajectoryPopulation(_Unknown(), 0), NoPrivacy())
    assert np.isnan(history.regret).all()
    assert history.reward.sum() >= 80
