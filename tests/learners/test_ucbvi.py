from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from shufflerl import envs, privatizers, state
from shufflerl.arrays import PolicyArray
from shufflerl.episodes import CompiledUCBVI
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.history import History
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.learners.ucbvi_kernels import Bonus, optimistic_policy, upper_bound
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy
from shufflerl.testing import LearnerContract
from tests.support.examples import random_mdp, telling_mdp


class TestContract(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return UCBVI(problem, seed)


class TestContractWithTies(LearnerContract):
    """Actions 0 and 1 are the same: the planner draws between them all the time."""

    mdp = MDP(np.full((2, 3, 3, 3), 1 / 3), np.tile([0.7, 0.7, 0.1], (3, 3, 1)), np.eye(3)[0])

    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return UCBVI(problem, seed)

    def test_same_seed_same_result_other_seed_other_result(self) -> None:
        """Ties make regrets equal; the other contracts tell seeds apart."""


class TestContractInBatches(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return UCBVI(problem, seed, bonus="hoeffding", batch=30)


def _run(mdp: MDP, episodes: int, seed: int = 0, **parameters: object) -> History:
    learner = UCBVI(mdp.problem(episodes), seed, **parameters)  # type: ignore[arg-type]
    return learn(learner, CountPopulation(mdp, seed + 1), NoPrivacy())


@pytest.mark.slow
@pytest.mark.parametrize("bonus", ["bernstein", "hoeffding"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("made", [random_mdp, telling_mdp])
def test_the_compiled_stretch_is_the_loop_bit_for_bit(
    bonus: str, sparse: bool, made: Callable[..., MDP], monkeypatch: pytest.MonkeyPatch
) -> None:
    mdp = made(1, horizon=4, states=4, actions=3, sparse=sparse)
    compiled = _run(mdp, 3000, bonus=bonus)
    monkeypatch.setattr(CompiledUCBVI, "if_possible", lambda *_: None)
    plain = _run(mdp, 3000, bonus=bonus)
    np.testing.assert_array_equal(compiled.regret, plain.regret)
    np.testing.assert_array_equal(compiled.deployed, plain.deployed)
    assert compiled.switches == plain.switches > 0
    assert [compiled.mixture(b) for b in range(0, 3000, 50)] == [plain.mixture(b) for b in range(0, 3000, 50)]


def test_the_stretch_steps_aside_where_it_does_not_apply() -> None:
    mdp = random_mdp(1)
    learner, users, open_ = UCBVI(mdp.problem(10), 0), CountPopulation(mdp, 0), NoPrivacy()
    assert CompiledUCBVI.if_possible(learner, users, open_) is not None
    assert CompiledUCBVI.if_possible(UCBVI(mdp.problem(10), 0, batch=2), users, open_) is None
    assert CompiledUCBVI.if_possible(learner, TrajectoryPopulation(mdp, 0), open_) is None
    learner.next_batch()
    assert CompiledUCBVI.if_possible(learner, users, open_) is None


@pytest.mark.parametrize("bonus", ["bernstein", "hoeffding"])
def test_it_learns_riverswim(bonus: str) -> None:
    """A policy that does not learn loses 8,884; ten seeds of either bonus stay far below a tenth of it."""
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
            np.random.default_rng(0), learner.moves, learner.pays, 0.0, learner.compiled_bonus, scratch, value, after
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


def test_a_state_whose_arrays_do_not_fit_is_refused() -> None:
    """The compiled code trusts their shapes."""
    learner = UCBVI(random_mdp(0).problem(10), 0)
    header, arrays = state.unpack(learner.save())
    for name, array in arrays.items():
        for wrong in (array[:, :1], array.astype(np.int8)):
            with pytest.raises(StateMismatchError, match=f"no fitting {name}"):
                learner.restore(state.pack(header, arrays | {name: wrong}))


def test_a_restored_learner_saves_the_same_bytes() -> None:
    mdp = random_mdp(0)
    first, second = (UCBVI(mdp.problem(100), seed) for seed in (0, 1))
    privatizer = privatizers.make("shuffle", first, epsilon=1.0, delta=1e-6, seed=0)
    learn(first, CountPopulation(mdp, 0), privatizer, batches=30)
    for _ in range(2):
        second.restore(first.save())
        assert second.noise_variance == first.noise_variance > 0
        assert second.save() == first.save()
        first.next_batch()  # once more, with a batch that waits


L, SCALE = 2.0, 0.1


@pytest.mark.parametrize("variance", [0.0, 0.5])
@pytest.mark.parametrize("bernstein", [True, False])
def test_the_bound_is_the_hand_computed_one(bernstein: bool, variance: float) -> None:
    """Four visits of cell (0, 0, 0): 3 rewards of 4, and 3 of 4 moves to the state worth 1, one to that worth 1/2."""
    moves, pays = np.zeros((1, 2, 1, 2)), np.zeros((2, 2, 1, 2))
    moves[0, 0, 0], pays[0, 0, 0] = [3, 1], [1, 3]
    after = np.array([1.0, 0.5])
    support = np.ones(moves.shape, dtype=np.bool_)
    bound = upper_bound((0, 0, 0), moves, pays, variance, after, Bonus(support, bernstein, SCALE, L))
    mean = 0.75 + 0.875
    spread = 0.8125 - 0.875**2 + 0.75 * 0.25
    bonus = np.sqrt(L * spread / 4) + L * 2 / 4 if bernstein else 2 * np.sqrt(L / 4)  # 2 steps are left
    bonus += np.sqrt(L * variance * (0.125**2 + 0.375**2 + 0.5)) / 4
    assert bound == pytest.approx(mean + SCALE * bonus, rel=1e-12)
    # The last step has no moves, one step left, and visits counted by the two reward counters alone.
    pays[1, 0, 0] = [1, 3]
    bound = upper_bound((1, 0, 0), moves, pays, variance, after, Bonus(support, bernstein, SCALE, L))
    bonus = np.sqrt(L * 0.75 * 0.25 / 4) + L / 4 if bernstein else np.sqrt(L / 4)
    assert bound == pytest.approx(0.75 + SCALE * (bonus + np.sqrt(L * variance * 0.5) / 4), rel=1e-12)


def test_a_row_that_does_not_stand_out_of_the_noise_is_unknown() -> None:
    moves, pays = np.zeros((1, 2, 1, 2)), np.zeros((2, 2, 1, 2))
    moves[0, 0, 0], pays[0, 0, 0] = [3, 1], [1, 3]
    support = np.ones(moves.shape, dtype=np.bool_)
    # Two estimates of the 4 visits, of two counters each: the mean has the variance of one counter.
    for variance, known in ((15.9, True), (16.1, False)):
        bound = upper_bound((0, 0, 0), moves, pays, variance, np.zeros(2), Bonus(support, False, 1e-9, L))
        assert bound == pytest.approx(0.75 if known else 2.0, abs=1e-6)


def test_without_noise_one_visit_is_known_and_none_is_not() -> None:
    moves, pays = np.zeros((1, 2, 1, 2)), np.zeros((2, 2, 1, 2))
    moves[0, 0, 0, 1], pays[0, 0, 0, 1] = 1, 1
    support = np.ones(moves.shape, dtype=np.bool_)
    bounds = [upper_bound((0, x, 0), moves, pays, 0.0, np.zeros(2), Bonus(support, False, 1e-9, L)) for x in (0, 1)]
    assert bounds == pytest.approx([1.0, 2.0], abs=1e-6)


def test_the_logarithm_covers_all_cells_and_episodes() -> None:
    assert UCBVI(Problem(2, 3, 2, 100), 0).log_term == pytest.approx(np.log(2 * 12 * 100 / 0.05))


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_ties_are_broken_evenly_and_what_is_deployed_is_kept(bad: int) -> None:
    """4000 states, one bad action and four never tried. The chi-square test fails by chance with probability 1e-4."""
    states = 4000
    pays = np.zeros((1, states, 5, 2))
    pays[0, :, bad, 0] = 1e6
    moves = np.zeros((0, states, 5, states))

    def planned(deployed: int) -> PolicyArray:
        policy = np.full((1, states), deployed, dtype=np.int32)
        value, after = np.zeros((2, states))
        support = np.ones(moves.shape, dtype=np.bool_)
        rng = np.random.default_rng(bad)
        optimistic_policy(rng, moves, pays, 0.0, Bonus(support, True, 0.05, L), policy, value, after)
        return policy

    tied = [a for a in range(5) if a != bad]
    chosen = np.bincount(planned(bad)[0], minlength=5)
    assert chosen[bad] == 0
    assert stats.chisquare(chosen[tied]).pvalue > 1e-4
    for deployed in tied:
        assert (planned(deployed) == deployed).all()
