"""Users who lie: what they may send, how many there are, and what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shufflerl import envs
from shufflerl.attacks import ATTACKS, EARLY, Flooding, LyingPopulation, messages_per_report
from shufflerl.counts import Batch, CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.experiments.setting import Setting, prepare, run
from shufflerl.mdp import MDP, Mixture
from shufflerl.network.protocol.sources import Users
from shufflerl.planning import optimal_q, policy_values
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import ShuffledPoisson

ENVIRONMENTS = ("riverswim", "deepsea", "spectrum", "bandit")


def environment(name: str) -> MDP:
    mdp = envs.make(name, 0)
    assert isinstance(mdp, MDP)
    return mdp


def batch_of(mdp: MDP, users: int, index: int = 0) -> Batch:
    policies = np.zeros((1, mdp.horizon, mdp.n_states), dtype=np.int32)
    return Batch(index, users, Mixture(policies, [1.0]), CountQuery.everything(mdp.problem(20_000)))


@pytest.mark.parametrize("env", ENVIRONMENTS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_liars_move_no_counter_by_more_than_their_number(attack: str, env: str) -> None:
    """Beside the counts of the honest, who are those of the same draw: each liar is counted once in each group."""
    mdp = environment(env)
    population, batch = LyingPopulation(mdp, attack, 0.2, 20_000, seed=3), batch_of(mdp, 500)
    counts = population.play(batch).checked()
    liars, lies = population.lies_told
    assert 50 < liars <= 250
    assert lies.max() <= liars
    assert (np.add.reduceat(lies, batch.query.group_starts) == liars).all()
    honest = CountPopulation(mdp, 3).play(Batch(0, 500 - liars, batch.mixture, batch.query))
    np.testing.assert_array_equal(counts.values - lies, honest.values)


def test_who_lies_of_moves_alone_is_paid_as_where_it_says_it_ended() -> None:
    """A lake pays where the goal is reached, which cannot be told twice."""
    lake = envs.make("FrozenLake-v1", horizon=20)
    assert isinstance(lake, MDP)
    told = 0
    for attack, make in ATTACKS.items():
        lie = make(lake).mdp
        if len(lie.transition_rewards):
            told += 1
            np.testing.assert_array_equal(lie.transition_rewards, lake.transition_rewards, err_msg=attack)
    assert told > 0


def test_where_nobody_lies_all_is_as_without_liars() -> None:
    mdp = environment("riverswim")
    batch = batch_of(mdp, 500)
    for attack in ATTACKS:
        played = LyingPopulation(mdp, attack, 0.0, 20_000, seed=3).play(batch)
        np.testing.assert_array_equal(played.values, CountPopulation(mdp, 3).play(batch).values)


@pytest.mark.parametrize("env", ENVIRONMENTS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_who_believes_the_liars_plays_worse(attack: str, env: str) -> None:
    """What is best in the environment that liars tell of is not best in the true one."""
    mdp = environment(env)
    lie = ATTACKS[attack](mdp)
    believed = optimal_q(lie.mdp.transitions, lie.mdp.rewards)
    ties = believed >= believed.max(axis=2, keepdims=True) - 1e-12
    truth = optimal_q(mdp.transitions, mdp.rewards)
    policy = np.where(ties, -truth, -np.inf).argmax(axis=2).astype(np.int32)  # of equals, the worse
    value = float(policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0])
    assert value < mdp.optimal_value - 1e-9 or (attack, mdp.horizon) == ("hidden way", 1)  # without moves, none to hide


def test_who_lies_early_stops_and_a_crowd_comes_first() -> None:
    mdp = environment("riverswim")
    early, crowd = (LyingPopulation(mdp, attack, 0.05, 2000, seed=1) for attack in ("early lies", "early crowd"))
    said = []
    for index in range(8):
        for population in (early, crowd):
            population.play(batch_of(mdp, 100, index))
        said.append((early.lies_told[0], crowd.lies_told[0]))
    assert [one > 0 for one, _ in said] == [100 * index < EARLY * 2000 for index in range(8)]
    assert [other for _, other in said] == [50, 50, 0, 0, 0, 0, 0, 0]


def test_a_crowd_that_is_drawn_by_lot_is_no_larger_than_the_lot_allows() -> None:
    """Twice the batch's users are drawn: a tenth of the batch while the liars last, and all of them in the end."""
    mdp = environment("riverswim")
    said = []
    for seed in range(200):
        population = LyingPopulation(mdp, "early crowd", 0.05, 2000, seed=seed, admission=2)
        said.append([population.lies_told[0] for index in range(20) if population.play(batch_of(mdp, 100, index))])
    means = np.mean(said, axis=0)
    assert abs(means[0] - 10) < 5 * np.sqrt(9 / 200)  # of seeds that are fixed
    assert (np.diff(means) < 1).all()
    assert (np.sum(said, axis=1) == 100).all()
    assert np.max(said) <= 50


@pytest.mark.parametrize("users", [100, 1000, 10_000])
def test_a_report_holds_as_many_messages_as_the_networks(users: int) -> None:
    query = CountQuery.everything(environment("riverswim").problem(users))
    noise = ShuffledPoisson(Budget(1.0, 1e-5)).noise(query)
    assert messages_per_report(query, users, noise.mean) == Users(query, users, noise).tags_per_report


def setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {
        "env": "riverswim",
        "learner": "optimistic",
        "privatizer": "shuffle",
        "episodes": 2000,
        "epsilon": 1.0,
    }
    return Setting(**(fields | {"delta": 1e-5} | changes))


def test_liars_flood_where_users_add_the_noise_and_nowhere_else() -> None:
    liars = {"attack": "rewards of one action", "share": 0.1}
    users, servers = (
        prepare(setting(liars=liars, privatizer_parameters={"noise": source}), 0) for source in ("users", "servers")
    )
    assert isinstance(users.privatizer, Flooding)
    assert not isinstance(servers.privatizer, Flooding)
    assert users.certificate is not None
    assert isinstance(users.population, LyingPopulation)
    batch = batch_of(environment("riverswim"), 1000)
    counts = users.population.play(batch)
    released = users.privatizer.release(counts)
    most = messages_per_report(batch.query, 1000, released.noise.variance)
    beyond = released.values.sum() - counts.values.sum()
    expected = users.population.lies_told[0] * (most - batch.query.touched_counters)
    assert beyond == pytest.approx(expected, abs=6 * released.noise.sd * batch.query.size**0.5)


def test_a_run_with_liars_is_a_run() -> None:
    liars = {"attack": "false episodes", "share": 0.5}
    lied, told = (run(setting(liars=some, privatizer_parameters={"noise": "servers"}), 0) for some in (liars, {}))
    assert lied.history.total_regret > told.history.total_regret


def test_unknown_attacks_and_simulators_without_a_table_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="attack is 'flood'"):
        prepare(setting(liars={"attack": "flood", "share": 0.1}), 0)
    with pytest.raises(InvalidInputError, match="share of liars"):
        prepare(setting(liars={"attack": "hidden way", "share": 1.5}), 0)
