from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl import envs, planning, privatizers
from shufflerl.arrays import PolicyArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.history import History
from shufflerl.learners.base import Learner
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.learners.stages import split_evenly, stage_users
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem
from shufflerl.population import CountPopulation
from shufflerl.privatizers.base import Privatizer
from shufflerl.testing import EPISODES, LearnerContract
from tests.support.examples import random_mdp


class TestPractical(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return SDPPE(problem, seed)


class TestPracticalAndPrivate(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return SDPPE(problem, seed)

    def privatizer(self) -> Privatizer:
        return privatizers.make("shuffle", self.learner(), epsilon=3.0, delta=1e-5, seed=8)


class TestForgetting(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return SDPPE(problem, seed, memory="forget", last_stage="explore")


class TestPaperEnumerated(LearnerContract):
    mdp = random_mdp(21, horizon=3, states=2, actions=2, start=0)

    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return SDPPE(problem, seed, constants="paper")


class TestPaperProduct(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return SDPPE(problem, seed, constants="paper", policies="product")


def _riverswim() -> MDP:
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    return mdp


def _run(
    mdp: MDP, episodes: int, seed: int, epsilon: float | None = None, name: str = "shuffle", **options: object
) -> tuple[History, SDPPE]:
    users, noise, own = np.random.SeedSequence(seed).spawn(3)
    learner = SDPPE(mdp.problem(episodes), own, **options)  # type: ignore[arg-type]
    privatizer = (
        privatizers.make("none")
        if epsilon is None
        else privatizers.make(name, learner, epsilon=epsilon, delta=1e-5, seed=noise)
    )
    return learn(learner, CountPopulation(mdp, users), privatizer), learner


def best_surviving_value(mdp: MDP, learner: SDPPE) -> float:
    """The true value of the best policy still in the set."""
    return learner.policies.best(mdp.transitions, mdp.rewards, mdp.start, np.random.default_rng(0))[1]


@pytest.mark.parametrize(("epsilon", "most"), [(None, 300), (5.0, 1250), (1.0, 4200), (0.5, 6300)])
def test_practical_constants_learn_riverswim(epsilon: float | None, most: float) -> None:
    """Twelve fresh seeds of the hundred that the benchmark reports; not learning costs 8,884."""
    mdp = _riverswim()
    runs = [_run(mdp, 20_000, seed, epsilon) for seed in range(12)]
    assert np.mean([history.total_regret for history, _ in runs]) < most
    assert all(best_surviving_value(mdp, learner) == pytest.approx(mdp.optimal_value) for _, learner in runs)
    assert all(history.switches <= 90 for history, _ in runs)
    assert any(learner.policies.log2_size < 24 for _, learner in runs)


def test_a_bandit_is_the_case_of_one_step_and_state() -> None:
    regrets, kept = [], []
    for seed in range(12):
        bandit = envs.make("bandit", seed)
        assert isinstance(bandit, MDP)
        history, learner = _run(bandit, 20_000, seed, 1.0)
        regrets.append(history.total_regret)
        kept.append(best_surviving_value(bandit, learner) == pytest.approx(bandit.optimal_value))
    assert np.mean(regrets) < 1600
    assert sum(kept) >= 11


@pytest.mark.parametrize("name", [name for name, _ in privatizers.PRIVATIZERS if name not in ("none", "central-tree")])
def test_it_runs_with_every_privatizer_that_serves_single_batches(name: str) -> None:
    history, _ = _run(_riverswim(), 2000, 0, 1.0, name)
    assert history.users.sum() == 2000


@settings(max_examples=200, deadline=None)
@given(episodes=st.integers(3, 10**17), first=st.integers(1, 100), base=st.floats(1.1, 4.0), commit=st.booleans())
def test_every_episode_is_played(episodes: int, first: int, base: float, commit: bool) -> None:
    """Correction 4: the paper's last stage would be negative."""
    stages = stage_users(episodes, first, base, commit)
    assert sum(stages) == episodes
    assert min(stages) >= 3
    lengths = [users // 3 for users in stages[:-1]]
    assert all(length == max(1, round(first * base**b)) for b, length in enumerate(lengths))


def test_the_papers_stages_double() -> None:
    assert [users // 3 for users in stage_users(3 * (2 + 4 + 8 + 16 + 5), 2, 2.0, False)] == [2, 4, 8, 16, 5]


@given(users=st.integers(0, 10**6), parts=st.integers(1, 50))
def test_users_are_split_as_evenly_as_possible(users: int, parts: int) -> None:
    """Correction 5: L/H is no integer and may be below one."""
    split = split_evenly(users, parts)
    assert sum(split) == users
    assert max(split) - min(split) <= 1


def _batches(learner: SDPPE, mdp: MDP) -> list[tuple[int, CountQuery, PolicyArray]]:
    population, privatizer, seen = CountPopulation(mdp, 0), privatizers.make("none"), []
    while (batch := learner.next_batch()) is not None:
        seen.append((batch.users, batch.table_query, batch.mixture.policies))
        learner.observe(privatizer.release(population.play(batch)))
    return seen


def test_a_stage_of_the_paper_is_crude_step_by_step_and_then_fine() -> None:
    mdp = random_mdp(3, horizon=4, states=3, actions=2, start=0)
    learner = SDPPE(mdp.problem(3000), 0, constants="paper", policies="product")
    seen = _batches(learner, mdp)
    last = seen[-4:]
    # Correction 8: the last step leads nowhere, so no budget is spent on its transitions.
    assert [query.transition_steps for _, query, _ in last] == [(0,), (1,), (2,), (0, 1, 2)]
    assert [query.reward_steps for _, query, _ in last] == [(), (), (), (0, 1, 2, 3)]
    assert all(len(policies) == 6 for _, query, policies in last[:3])  # one explorer for every (x, a)
    # Correction 5: the first stage has two users for three steps; a step without users releases nothing.
    assert [users for users, _, _ in seen[:3]] == [1, 1, 4]


def test_fine_exploration_covers_and_its_auxiliary_reaches_every_pair() -> None:
    mdp = random_mdp(3, horizon=3, states=3, actions=2, start=0)
    _, learner = _run(mdp, 30_000, 0, constants="paper", policies="product")
    ratios = [record.coverage_ratio for record in learner.trace]
    assert all(ratio is not None and ratio <= 1.05 + 1e-9 for ratio in ratios)


@pytest.mark.parametrize("policies", ["product", "enumerated"])
def test_details_tell_what_is_done_and_left(policies: str) -> None:
    mdp = random_mdp(3, horizon=3, states=3, actions=2, start=0)
    learner = SDPPE(mdp.problem(2000), 0, constants="paper", policies=policies)
    privatizer, population = privatizers.make("none", learner, seed=0), CountPopulation(mdp, 0)
    while (batch := learner.next_batch()) is not None:
        learner.observe(privatizer.release(population.play(batch)))
        told = learner.view().details
        assert told["stages"] == (len(learner.trace), len(learner.stages))
        assert 0 <= told["log2_policies"] <= 9
        assert ("actions" in told) == (policies == "product")
        if "actions" in told:
            assert np.shape(told["actions"]) == (3, 3)
            assert np.log2(told["actions"]).sum() == pytest.approx(told["log2_policies"])
    assert told["stages"][0] == told["stages"][1]


def test_the_trace_tells_every_stage() -> None:
    mdp = _riverswim()
    history, learner = _run(mdp, 20_000, 1, 5.0)
    assert [record.stage for record in learner.trace] == list(range(1, len(learner.stages) + 1))
    assert [record.users for record in learner.trace] == learner.stages
    assert sum(record.eliminated for record in learner.trace) == pytest.approx(24 - learner.policies.log2_size)
    words = [record.in_words() for record in learner.trace]
    assert any("stayed" in text for text in words)
    assert "every user was given the best policy so far" in words[-1]
    assert history.users.sum() == 20_000


def test_a_planted_unlucky_stage_does_not_eliminate_the_optimum_at_the_paper_constants() -> None:
    """Releases shifted by three quarters of their precision are within what the radius allows for."""
    mdp = random_mdp(2, horizon=2, states=2, actions=2, start=0)
    learner = SDPPE(mdp.problem(10**9), 0, constants="paper")
    population = CountPopulation(mdp, 1)
    privatizer = privatizers.make("shuffle", learner, epsilon=1.0, delta=1e-10, seed=1)
    while (batch := learner.next_batch()) is not None:
        release = privatizer.release(population.play(batch))
        shifted = np.where(np.arange(batch.query.size) % 2, 1.0, -1.0) * 3 * release.noise.sd
        learner.observe(Release(batch, release.values + shifted, release.noise, 0.0))
    assert best_surviving_value(mdp, learner) == pytest.approx(mdp.optimal_value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constants": "papers"}, "expected one of: paper, practical"),
        ({"policies": "all"}, "expected one of: enumerated, product"),
        ({"radius": "data", "policies": "enumerated"}, "needs policies=product"),
        ({"constants": "paper", "memory": "pool"}, "needs memory=forget"),
        ({"memory": "keep"}, "expected one of: forget, pool"),
        ({"last_stage": "stop"}, "expected one of: explore, commit"),
        ({"first": 0}, "first is 0"),
        ({"base": 1.0}, "base is 1.0"),
        ({"deviations": -1.0}, "deviations is -1.0"),
        ({"c": 0.0}, "c is 0.0"),
        ({"c1": -6.0}, "c1 is -6.0"),
        ({"failure": 1.0}, "failure is 1.0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SDPPE(random_mdp(0, start=0).problem(100), 0, **options)  # type: ignore[arg-type]


def test_too_few_episodes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 3"):
        SDPPE(random_mdp(0).problem(2), 0)


def test_a_set_too_large_to_enumerate_is_refused_with_the_alternative() -> None:
    with pytest.raises(InvalidInputError, match="product"):
        SDPPE(random_mdp(0, horizon=5, states=5, actions=3).problem(100), 0, constants="paper")


def test_an_unknown_first_state_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="use ucbvi"):
        SDPPE(Problem(3, 3, 2, 100), 0)


def test_a_state_saved_with_other_options_is_refused() -> None:
    problem = random_mdp(0, start=0).problem(EPISODES)
    with pytest.raises(StateMismatchError, match="parameters"):
        SDPPE(problem, 0, first=5).restore(SDPPE(problem, 0).save())


def test_survivors_are_planned_with() -> None:
    """What is committed to in the end is in the set and close to the optimum."""
    mdp = _riverswim()
    _, learner = _run(mdp, 20_000, 3, 5.0)
    assert learner.radius.incumbent is not None
    assert learner.policies.contains(learner.radius.incumbent[None]).all()
    value = planning.policy_values(mdp.transitions, mdp.rewards, mdp.start, learner.radius.incumbent[None])[0]
    assert value > 0.95 * mdp.optimal_value


def test_the_paper_radius_counts_only_users_who_were_counted() -> None:
    """A release may leave users out; a radius for all of them would promise more than was seen."""
    mdp = random_mdp(21, horizon=3, states=2, actions=2, start=0)

    def radii(share: float) -> list[float]:
        learner = SDPPE(mdp.problem(3000), 0, constants="paper")
        population, privatizer = CountPopulation(mdp, 1), privatizers.make("none")
        while (batch := learner.next_batch()) is not None:
            asked = dataclasses.replace(batch, users=max(1, int(share * batch.users)))
            learner.observe(privatizer.release(population.play(asked)))
        return [record.radius for record in learner.trace if record.radius is not None]

    few, all = radii(0.5), radii(1.0)
    assert len(few) == len(all) > 1
    np.testing.assert_allclose(few, 2 * np.array(all), rtol=0.02)  # its larger term is one over the users
