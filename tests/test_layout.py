"""Transitions in rows say the same as tables; and large sparse problems never become tables."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl import envs
from shufflerl.counts import Batch, CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.history import Recorder
from shufflerl.layout import Layout
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Mixture, Problem, permuted_actions
from shufflerl.planning import policy_values
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.none import NoPrivacy
from tests.support.examples import full_batch, mdps, random_mdp, random_mixture


@settings(max_examples=40, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6))
def test_rows_and_tables_say_the_same(mdp: MDP, seed: int) -> None:
    layout = mdp.layout
    support = np.ones(mdp.transitions.shape, dtype=np.bool_) if mdp.support is None else mdp.support
    assert np.array_equal(layout.positions, np.flatnonzero(support))
    assert np.array_equal(mdp.transitions.ravel()[layout.positions], mdp.probabilities)
    chosen = tuple(h for h in range(mdp.horizon - 1) if (seed >> h) % 2)
    part = layout.steps(chosen)
    assert np.array_equal(part.positions, np.flatnonzero(support[list(chosen)]))
    assert np.array_equal(layout.take(layout.successors, chosen), part.successors)
    everywhere = np.arange(support.size)
    found, there = layout.find(everywhere)
    assert np.array_equal(there, support.ravel())
    assert np.array_equal(layout.positions[found[there]], everywhere[there])


@pytest.mark.parametrize("population", [CountPopulation, TrajectoryPopulation])
@settings(max_examples=20, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6), users=st.sampled_from([1, 3, 1000]))
def test_what_is_drawn_does_not_depend_on_the_layout(
    population: type[CountPopulation], mdp: MDP, seed: int, users: int
) -> None:
    """The same users do the same whether their MDP, or the learner's problem, knows the support or not."""
    bare = MDP(mdp.transitions, mdp.rewards, mdp.start)
    mixture = random_mixture(mdp, 2, seed)
    first, *others = [
        query.scatter(population(truth, seed).play(Batch(0, users, mixture, query)).values)
        for query in (CountQuery.everything(bare.problem(1)), CountQuery.everything(mdp.problem(1)))
        for truth in (bare, mdp)
    ]
    for other in others:
        assert all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


def test_values_do_not_depend_on_the_layout() -> None:
    mdp = random_mdp(3, horizon=4, states=4, sparse=True)
    bare = MDP(mdp.transitions, mdp.rewards, mdp.start)
    policies = random_mixture(mdp, 5, 1).policies
    assert mdp.optimal_value == bare.optimal_value
    recorder = Recorder(mdp)
    for policy, value in zip(
        policies, policy_values(bare.transitions, bare.rewards, bare.start, policies), strict=True
    ):
        recorder.record(CountPopulation(mdp, 0).play(full_batch(mdp, 1, Mixture.single(policy))))
        assert recorder.finish().reward[-1] == value


def test_a_large_sparse_problem_takes_memory_by_its_counters() -> None:
    """1,000 states with 5 next states each: a table would take 760 MB, its truth values 95 MB."""
    tracemalloc.start()
    mdp = envs.make("random", 1, n_states=1000, n_actions=5, horizon=20, branching=5)
    assert isinstance(mdp, MDP)
    query = CountQuery.everything(mdp.problem(10**5))
    batch = Batch(0, 1000, Mixture.single(np.zeros((20, 1000), dtype=np.int32)), query)
    counts = CountPopulation(mdp, 1).play(batch).checked()
    Recorder(mdp).record(counts)
    assert mdp.optimal_value > 0
    assert query.size == 19 * 1000 * 5 * 5 + 20 * 1000 * 5 * 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_a_learner_that_knows_more_than_is_true_is_refused() -> None:
    sparse = random_mdp(1, sparse=True)
    bare = MDP(sparse.transitions, sparse.rewards, sparse.start)
    learn(UCBVI(sparse.problem(5), 0), CountPopulation(bare, 0), NoPrivacy())
    learn(UCBVI(bare.problem(5), 0), CountPopulation(sparse, 0), NoPrivacy())
    with pytest.raises(InvalidInputError, match="support that the learner was told rules out"):
        learn(UCBVI(sparse.problem(5), 0), CountPopulation(random_mdp(2), 0), NoPrivacy())


GOOD: dict[str, Any] = {
    "successors": [[[[1]], [[0]]]],
    "probabilities": [[[[1.0]], [[1.0]]]],
    "rewards": [[[0.1], [0.9]], [[0.1], [0.9]]],
    "start": [1.0, 0.0],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"successors": [[[[2]], [[0]]]]}, "increasing numbers of states below 2"),
        ({"successors": [[[[-1]], [[0]]]]}, "increasing numbers of states below 2"),
        ({"successors": [[[[1, 0]], [[0, 1]]]]}, "increasing numbers of states below 2"),
        ({"successors": [[[[0.5]], [[0]]]]}, "expected whole numbers"),
        ({"successors": [[[0]]]}, "expected whole numbers"),
        ({"probabilities": [[[[0.5]], [[1.0]]]]}, "sums to 0.5"),
        ({"probabilities": [[[[1.0]]]]}, "probabilities has shape"),
        ({"rewards": [[[0.1], [0.9]]]}, "one layer fewer than rewards"),
    ],
)
def test_bad_rows_are_refused(change: dict[str, Any], message: str) -> None:
    MDP.sparse(**GOOD)
    with pytest.raises(InvalidInputError, match=message):
        MDP.sparse(**GOOD | change)


def test_a_layout_of_another_problem_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"expected \(1, 3, 2\)"):
        Problem(2, 3, 2, 10, support=Layout((1, 2, 2)))


def test_permuted_actions_are_the_same_actions() -> None:
    mdp = random_mdp(4, horizon=5, states=3, actions=3, sparse=True)
    other = permuted_actions(mdp, np.random.default_rng(0))
    assert other.optimal_value == pytest.approx(mdp.optimal_value)
    assert not np.array_equal(other.rewards, mdp.rewards)
    assert other.support is not None
    assert np.array_equal(other.support, other.transitions > 0)
    for h in range(5):
        for x in range(3):
            order = [int(np.flatnonzero(mdp.rewards[h, x] == reward)[0]) for reward in other.rewards[h, x]]
            assert sorted(order) == [0, 1, 2]
            if h < 4:
                assert np.array_equal(other.transitions[h, x], mdp.transitions[h, x, order])
