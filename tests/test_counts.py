from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl.counts import Batch, Counter, CountQuery, Counts, Release, Trajectories
from shufflerl.errors import ContractError, InvalidInputError
from shufflerl.mdp import MDP, Mixture
from shufflerl.noise import NoNoise
from shufflerl.population import TrajectoryPopulation
from tests.support.examples import full_batch, mdps, random_mdp, random_mixture


@st.composite
def queries(draw: st.DrawFn) -> tuple[MDP, CountQuery]:
    mdp = draw(mdps)
    moves = draw(st.sets(st.integers(0, mdp.horizon - 2))) if mdp.horizon > 1 else set()
    pays = draw(st.sets(st.integers(0, mdp.horizon - 1), min_size=0 if moves else 1))
    return mdp, CountQuery(mdp.problem(1), sorted(moves), sorted(pays))


@settings(max_examples=60, deadline=None)
@given(case=queries())
def test_tags_are_a_bijection(case: tuple[MDP, CountQuery]) -> None:
    _, query = case
    counters = [query.counter(tag) for tag in range(query.size)]
    assert len(set(counters)) == query.size
    assert [query.tag(counter) for counter in counters] == list(range(query.size))


@settings(max_examples=60, deadline=None)
@given(case=queries())
def test_rows_list_the_transition_tags(case: tuple[MDP, CountQuery]) -> None:
    _, query = case
    starts, after = query.row_starts, query.successors
    assert [array.dtype.name for array in (starts, after)] == ["int64", "int32"]
    assert len(starts) == len(query.transition_steps) * query.n_states * query.n_actions + 1
    listed = []
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        step, state, action = np.unravel_index(
            row, (max(1, len(query.transition_steps)), query.n_states, query.n_actions)
        )
        listed += [
            Counter("transition", query.transition_steps[step], int(state), int(action), int(y))
            for y in after[begin:end]
        ]
    assert listed == [query.counter(tag) for tag in range(len(after))]
    assert query.size - starts[-1] == len(query.reward_steps) * query.n_states * query.n_actions * 2


@settings(max_examples=60, deadline=None)
@given(case=queries(), seed=st.integers(0, 10**6))
def test_scatter_undoes_gather(case: tuple[MDP, CountQuery], seed: int) -> None:
    _, query = case
    values = np.random.default_rng(seed).normal(size=query.size)
    np.testing.assert_array_equal(query.gather(*query.scatter(values)), values)


@settings(max_examples=60, deadline=None)
@given(case=queries(), seed=st.integers(0, 10**6), users=st.integers(1, 5))
def test_every_user_touches_one_counter_per_family_and_step(
    case: tuple[MDP, CountQuery], seed: int, users: int
) -> None:
    mdp, query = case
    batch = Batch(0, users, random_mixture(mdp, 2, seed), query)
    played = TrajectoryPopulation(mdp, seed).trajectories(batch)
    tags = query.tags(played)
    assert tags.shape == (users, query.touched_counters)
    for i in range(users):
        expected = [
            *(
                Counter("transition", h, played.states[i, h], played.actions[i, h], played.states[i, h + 1])
                for h in query.transition_steps
            ),
            *(
                Counter("reward", h, played.states[i, h], played.actions[i, h], played.rewards[i, h])
                for h in query.reward_steps
            ),
        ]
        assert [query.counter(tag) for tag in tags[i]] == expected
    assert Counts.of(batch, played).values.sum() == users * query.touched_counters


def test_known_support_removes_counters() -> None:
    mdp = random_mdp(1, sparse=True)
    assert mdp.support is not None
    query = CountQuery.everything(mdp.problem(1))
    assert query.size == mdp.support.sum() + 3 * 3 * 2 * 2
    impossible = np.argwhere(~mdp.support)[0]
    with pytest.raises(InvalidInputError, match="outside the known support"):
        query.tag(Counter("transition", *(int(i) for i in impossible)))


def test_a_replaced_user_changes_two_counters_per_family_and_step() -> None:
    query = CountQuery.everything(random_mdp(0, horizon=6, states=4).problem(1))
    assert query.changed_counters == 4 * 6 - 2
    assert CountQuery(random_mdp(0).problem(1), [1], []).changed_counters == 2


@pytest.mark.parametrize(
    ("states", "actions", "rewards", "message"),
    [
        ([[0, 1]], [[0, 0]], [[0, 0]], "2 steps.* expected 3 steps"),
        ([[0, 1, 3]], [[0, 0, 0]], [[0, 0, 0]], "states below 3"),
        ([[0, 1, 2]], [[0, 2, 0]], [[0, 0, 0]], "actions below 2"),
        ([[0, -1, 2]], [[0, 1, 0]], [[0, 0, 0]], "do not fit"),
        ([[0, 1, 2]], [[0, 1, 0]], [[0, 2, 0]], "not a bit"),
        ([[0, 1, 2]], [[0, 1, 0]], [[0, 1]], "all of one shape"),
        ([[0.5, 1, 2]], [[0, 1, 0]], [[0, 1, 0]], "whole numbers"),
    ],
)
def test_trajectories_that_do_not_fit_are_refused(
    states: object, actions: object, rewards: object, message: str
) -> None:
    query = CountQuery.everything(random_mdp(0).problem(1))
    with pytest.raises(InvalidInputError, match=message):
        query.tags(Trajectories(states, actions, rewards))  # type: ignore[arg-type]


def test_a_trajectory_outside_the_support_is_refused() -> None:
    mdp = random_mdp(1, sparse=True)
    assert mdp.support is not None
    h, x, a, y = (int(i) for i in np.argwhere(~mdp.support[0:1])[0])
    states, actions = [[0, 0, 0]], [[0, 0, 0]]
    states[0][h], states[0][h + 1], actions[0][h] = x, y, a
    with pytest.raises(InvalidInputError, match="support rules out"):
        CountQuery.everything(mdp.problem(1)).tags(Trajectories(states, actions, [[0, 0, 0]]))


@pytest.mark.parametrize("steps", [[2], [-1], [1, 0], [0, 0], ["a"]])
def test_bad_steps_are_refused(steps: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="transition_steps"):
        CountQuery(random_mdp(0).problem(1), steps, [])


def test_a_query_for_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no counter"):
        CountQuery(random_mdp(0).problem(1), [], [])


@pytest.mark.parametrize("users", [0, -3, 1.5])
def test_bad_numbers_of_users_are_refused(users: object) -> None:
    batch = full_batch(random_mdp(0), 1)
    with pytest.raises(InvalidInputError, match="users is"):
        Batch(0, users, batch.mixture, batch.query)  # type: ignore[arg-type]


def test_a_mixture_of_another_problem_is_refused() -> None:
    batch = full_batch(random_mdp(0), 1)
    with pytest.raises(InvalidInputError, match="actions below 2"):
        Batch(0, 1, Mixture.single(np.full((3, 3), 2)), batch.query)
    with pytest.raises(InvalidInputError, match=r"expected \(3, 3\)"):
        Batch(0, 1, Mixture.single(np.zeros((3, 4), dtype=int)), batch.query)


@pytest.mark.parametrize("tag", [-1, 10**6])
def test_tags_out_of_range_are_refused(tag: int) -> None:
    with pytest.raises(InvalidInputError, match="tag is"):
        CountQuery.everything(random_mdp(0).problem(1)).counter(tag)


def test_what_was_asked_for_in_full_is_not_copied() -> None:
    """A release of millions of counters would spend its time in copies."""
    mdp = random_mdp(0)
    batch = full_batch(mdp, 5)
    given = np.arange(float(batch.query.size))
    release = Release(batch, given, NoNoise(), 0.0)
    assert release.values is given
    assert all(np.shares_memory(table, given) for table in release.tables)
    with pytest.raises(ValueError, match="read-only"):
        release.tables[0][0, 0, 0, 0] = 1.0


@pytest.mark.parametrize("states", [[[0, 1], [0]], [[0j]]])
def test_trajectories_that_are_no_arrays_of_numbers_are_refused(states: object) -> None:
    with pytest.raises(InvalidInputError, match="states is not an array of numbers"):
        Trajectories(states, [[0]], [[0]])  # type: ignore[arg-type]


def test_a_release_must_answer_the_batch_that_waits() -> None:
    mdp = random_mdp(0)
    batch, other = full_batch(mdp, 5), full_batch(mdp, 5, index=1)
    release = Release(batch, np.zeros(batch.query.size), NoNoise(), 0.0)
    release.check_answers(full_batch(mdp, 5))
    with pytest.raises(ContractError, match="answers batch 0"):
        release.check_answers(other)
    with pytest.raises(ContractError, match="No batch is waiting"):
        release.check_answers(None)
    with pytest.raises(InvalidInputError, match="released values"):
        Release(batch, np.zeros(3), NoNoise(), 0.0)
