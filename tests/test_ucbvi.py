from __future__ import annotations

import numpy as np
import pytest

from shufflerl import envs
from shufflerl.episodes import EpisodeStretch
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.history import History
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy
from tests.contracts.learner import LearnerContract
from tests.examples import random_mdp


class TestContract(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return UCBVI(problem, seed)


class TestContractInBatches(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return UCBVI(problem, seed, bonus="hoeffding", batch=30)


def _run(mdp: MDP, episodes: int, seed: int = 0, **parameters: object) -> History:
    learner = UCBVI(mdp.problem(episodes), seed, **parameters)  # type: ignore[arg-type]
    return learn(learner, CountPopulation(mdp, seed + 1), NoPrivacy())


@pytest.mark.parametrize("bonus", ["bernstein", "hoeffding"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_compiled_stretch_is_the_loop_bit_for_bit(
    bonus: str, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mdp = random_mdp(1, horizon=4, states=4, actions=3, sparse=sparse)
    compiled = _run(mdp, 3000, bonus=bonus)
    monkeypatch.setattr(EpisodeStretch, "if_possible", lambda *_: None)
    plain = _run(mdp, 3000, bonus=bonus)
    np.testing.assert_array_equal(compiled.regret, plain.regret)
    np.testing.assert_array_equal(compiled.deployed, plain.deployed)
    assert compiled.switches == plain.switches > 0
    assert [compiled.mixture(b) for b in range(0, 3000, 50)] == [plain.mixture(b) for b in range(0, 3000, 50)]


def test_the_stretch_steps_aside_where_it_does_not_apply() -> None:
    mdp = random_mdp(1)
    learner, users, open_ = UCBVI(mdp.problem(10), 0), CountPopulation(mdp, 0), NoPrivacy()
    assert EpisodeStretch.if_possible(learner, users, open_) is not None
    assert EpisodeStretch.if_possible(UCBVI(mdp.problem(10), 0, batch=2), users, open_) is None
    assert EpisodeStretch.if_possible(learner, TrajectoryPopulation(mdp, 0), open_) is None
    learner.next_batch()
    assert EpisodeStretch.if_possible(learner, users, open_) is None


@pytest.mark.parametrize("bonus", ["bernstein", "hoeffding"])
def test_it_learns_riverswim(bonus: str) -> None:
    """A policy that does not learn loses about 9,500; ten seeds of either bonus stay far below a tenth of it."""
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    regrets = [_run(mdp, 20_000, seed, bonus=bonus).total_regret for seed in range(10)]
    assert max(regrets) < 400
    final = _run(mdp, 20_000, 0, bonus=bonus)
    assert final.regret[-2000:].mean() < 0.01 * mdp.optimal_value


def test_theory_scale_explores_more() -> None:
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    assert _run(mdp, 5000, scale=1.0).total_regret > 3 * _run(mdp, 5000, scale=0.05).total_regret


def test_optimism_holds_with_the_theory_scale() -> None:
    """At scale 1 the planned value bounds the optimal one from above, at every step and state, in every batch."""
    from shufflerl.kernels.ucbvi import optimistic_policy
    from shufflerl.planning import optimal_q

    mdp = random_mdp(8, horizon=4, states=4, actions=2)
    learner = UCBVI(mdp.problem(3000), 0, scale=1.0, batch=50)
    population, privatizer = CountPopulation(mdp, 0), NoPrivacy()
    truth = optimal_q(mdp.transitions, mdp.rewards)[0].max(axis=-1)
    while (batch := learner.next_batch()) is not None:
        learner.observe(privatizer.release(population.play(batch)))
        value, after = np.zeros((2, mdp.n_states))
        scratch = learner.policy.copy()
        optimistic_policy(
            np.random.default_rng(0), learner.moves, learner.pays, 0.0, *learner.bonus_arguments, scratch, value, after
        )
        assert (value >= truth - 1e-12).all()


def test_it_works_as_a_bandit_and_from_trajectories() -> None:
    bandit = envs.make("bandit", 3)
    assert isinstance(bandit, MDP)
    assert _run(bandit, 20_000).total_regret < 1000  # playing at random loses about 0.45 per episode: 9,000
    learner = UCBVI(bandit.problem(300), 0, batch=10)
    history = learn(learner, TrajectoryPopulation(bandit, 0), NoPrivacy())
    assert history.users.tolist() == [10] * 30


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"bonus": "chernoff"}, "bernstein, hoeffding"), ({"scale": 0}, "scale is 0"), ({"batch": 0}, "batch is 0")],
)
def test_bad_parameters_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        UCBVI(random_mdp(0).problem(10), 0, **parameters)  # type: ignore[arg-type]


def test_a_state_saved_with_other_parameters_is_refused() -> None:
    problem = random_mdp(0).problem(10)
    with pytest.raises(StateMismatchError, match="parameters"):
        UCBVI(problem, 0, scale=0.5).restore(UCBVI(problem, 0).save())
