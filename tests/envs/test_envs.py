"""Every registered environment goes through the same checks; each is then held against numbers known otherwise."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import norm

from shufflerl.envs import ENVIRONMENTS, make
from shufflerl.envs.bandit import clipped_normal_mean
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.mdp import MDP
from shufflerl.planning import optimal_q, policy_values
from shufflerl.seeding import stream

#: Parameters that an environment cannot do without.
NEEDED: dict[str, dict[str, Any]] = {"gymnasium": {"id": "FrozenLake-v1", "horizon": 5}}
NAMES = [name for name, _ in ENVIRONMENTS if name not in ("spectrum-sensing", "spectrum-tiles")]  # these have no table
DRAWN_AT_RANDOM = ["bandit", "deepsea", "random"]


def build(name: str, seed: int | np.random.SeedSequence | None = 0, **parameters: Any) -> MDP:
    environment = make(name, seed, **{**NEEDED.get(name, {}), **parameters})
    assert isinstance(environment, MDP)
    return environment


def value_of(mdp: MDP, policy: NDArray[Any]) -> float:
    return float(policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None].astype(np.int32))[0])


def random_value(mdp: MDP) -> float:
    """Expected reward of an episode of uniformly random actions."""
    value = mdp.rewards[-1].mean(axis=-1)
    for h in range(mdp.horizon - 2, -1, -1):
        value = (mdp.rewards[h] + mdp.transitions[h] @ value).mean(axis=-1)
    return float(mdp.start @ value)


def same(one: MDP, other: MDP) -> bool:
    return all(np.array_equal(getattr(one, f), getattr(other, f)) for f in ("transitions", "rewards", "start"))


class TestEveryEnvironment:
    @pytest.mark.parametrize("name", NAMES)
    def test_optimum_is_attained_and_beats_chance(self, name: str) -> None:
        mdp = build(name)
        best = optimal_q(mdp.transitions, mdp.rewards).argmax(axis=-1)
        assert value_of(mdp, best) == pytest.approx(mdp.optimal_value)
        assert random_value(mdp) <= mdp.optimal_value <= mdp.horizon
        problem = mdp.problem(episodes=10)
        assert (problem.horizon, problem.n_states, problem.n_actions) == mdp.rewards.shape

    @pytest.mark.parametrize("name", NAMES)
    def test_same_seed_same_mdp(self, name: str) -> None:
        assert same(build(name, 7), build(name, 7))
        assert same(build(name, np.random.SeedSequence(7)), build(name, np.random.SeedSequence(7)))
        assert same(build(name, 7), build(name, 8)) == (name not in DRAWN_AT_RANDOM)
        assert same(build(name, None), build(name, None)) == (name not in DRAWN_AT_RANDOM)

    @pytest.mark.parametrize("name", NAMES)
    def test_parameters_are_annotated_and_have_a_summary(self, name: str) -> None:
        assert ENVIRONMENTS.entry(name).summary
        for parameter in ENVIRONMENTS.parameters(name).values():
            assert parameter.annotation is not parameter.empty
            assert parameter.kind is parameter.KEYWORD_ONLY

    @pytest.mark.parametrize("name", NAMES)
    def test_unknown_parameter(self, name: str) -> None:
        with pytest.raises(UnknownNameError, match=f"environment '{name}' has no parameter 'colour'. .*Known: "):
            build(name, colour=3)

    @pytest.mark.parametrize(
        ("name", "parameter", "wrong"),
        [
            (name, parameter, wrong)
            for name in NAMES
            for parameter, declared in ENVIRONMENTS.parameters(name).items()
            if declared.annotation in (int, int | None)
            for wrong in (0, -3, 2.5, True, "many")
        ],
    )
    def test_sizes_are_positive_whole_numbers(self, name: str, parameter: str, wrong: Any) -> None:
        with pytest.raises(InvalidInputError, match=f"^{parameter} is {wrong!r}; expected a whole number of at least "):
            build(name, **{parameter: wrong})

    @pytest.mark.parametrize("name", [name for name in NAMES if "horizon" in ENVIRONMENTS.parameters(name)])
    def test_horizon_is_obeyed(self, name: str) -> None:
        assert build(name, horizon=1).transitions.shape[0] == 0
        assert build(name, horizon=3).rewards.shape[0] == 3

    @pytest.mark.parametrize(
        ("name", "parameters", "message"),
        [
            ("riverswim", {"n_states": 1}, "n_states is 1; expected a whole number of at least 2"),
            ("riverswim", {"permuted": 1}, "permuted is 1; expected True or False"),
            ("bandit", {"sigma": -0.1}, "sigma is -0.1; expected a finite number"),
            ("bandit", {"sigma": float("nan")}, "sigma is nan; expected a finite number"),
            ("spectrum", {"n_channels": 1}, "n_channels is 1; expected a whole number of at least 2"),
            ("spectrum", {"memory": 1.0}, "memory is 1.0; expected a finite number in \\[0, 0.99\\]"),
            ("deepsea", {"randomize_actions": "yes"}, "randomize_actions is 'yes'; expected True or False"),
            ("random", {"branching": 6}, "branching is 6; expected a whole number of at least 1 and at most 5"),
            ("random", {"homogeneous": 1}, "homogeneous is 1; expected True or False"),
        ],
    )
    def test_bad_parameters(self, name: str, parameters: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            build(name, **parameters)


class TestMake:
    def test_unknown_environment_suggests_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match=r"no environment 'riverswin'\. Did you mean 'riverswim'\?"):
            make("riverswin")

    @pytest.mark.parametrize("name", [5, None, ["riverswim"]])
    def test_a_name_that_is_none(self, name: Any) -> None:
        with pytest.raises(UnknownNameError, match=r"There is no environment .* Known: bandit"):
            make(name)

    def test_what_the_caller_gives_is_not_the_users_to_choose(self) -> None:
        with pytest.raises(UnknownNameError, match="environment 'random' has no parameter 'rng'"):
            make("random", rng=np.random.default_rng(0))

    @pytest.mark.parametrize("wrong", [-1, 1.5, "7", True])
    def test_bad_seed(self, wrong: Any) -> None:
        with pytest.raises(InvalidInputError, match=f"^seed is {wrong!r}; expected a whole number of at least 0"):
            make("bandit", wrong)

    def test_required_parameter(self) -> None:
        with pytest.raises(InvalidInputError, match="environment 'gymnasium' needs the parameter 'id'"):
            make("gymnasium", horizon=5)

    def test_gymnasiums_ids_are_names_and_bring_their_time_limit(self) -> None:
        lake = make("FrozenLake8x8-v1")
        assert isinstance(lake, MDP)
        assert (lake.horizon, lake.n_states) == (200, 65)
        with pytest.raises(InvalidInputError, match="has no time limit of its own; give horizon"):
            make("Blackjack-v1")

    def test_an_id_without_version_is_the_newest_that_gymnasium_has(self) -> None:
        import gymnasium

        newest = max(spec.version or 0 for spec in gymnasium.registry.values() if spec.name == "Taxi")
        taxi = make("Taxi", horizon=3)
        assert isinstance(taxi, MDP)
        assert np.array_equal(taxi.transitions, make(f"Taxi-v{newest}", horizon=3).transitions)  # type: ignore[union-attr]
        with pytest.raises(UnknownNameError, match="There is no environment 'Cab'"):
            make("Cab")

    def test_parameters_from_the_command_line(self) -> None:
        chosen = ENVIRONMENTS.parse("random", ["n_states=3", "branching=none", "homogeneous=true"])
        assert chosen == {"n_states": 3, "branching": None, "homogeneous": True}
        chosen = ENVIRONMENTS.parse(
            "gymnasium", ['options={"is_slippery": false}', "reward_low=-1", "id=FrozenLake-v1"]
        )
        assert chosen == {"options": '{"is_slippery": false}', "reward_low": -1.0, "id": "FrozenLake-v1"}

    def test_whole_numbers_are_read_exactly(self) -> None:
        assert ENVIRONMENTS.parse("random", ["n_states=9007199254740993"]) == {"n_states": 9007199254740993}
        assert ENVIRONMENTS.parse("random", ["n_states=1e3"]) == {"n_states": 1000}
        with pytest.raises(InvalidInputError, match=r"is '2\.5'; expected int"):
            ENVIRONMENTS.parse("random", ["n_states=2.5"])

    def test_a_repeated_parameter_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="'n_states' of environment 'random' is given twice"):
            ENVIRONMENTS.parse("random", ["n_states=3", "n_states=4"])

    def test_importing_environments_imports_nothing_heavy(self) -> None:
        program = (
            "import sys, shufflerl.envs; shufflerl.envs.make('riverswim'); "
            "print([name for name in ('gymnasium', 'numba', 'scipy') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestRiverSwim:
    def test_is_the_papers(self) -> None:
        mdp = build("riverswim")
        assert mdp.rewards.shape == (6, 4, 2)
        assert mdp.support is None
        assert round(mdp.optimal_value, 4) == 0.4758
        left, right = mdp.transitions[0, :, 0], mdp.transitions[0, :, 1]
        assert left.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
        assert right.tolist() == [[0.4, 0.6, 0, 0], [0.05, 0.6, 0.35, 0], [0, 0.05, 0.6, 0.35], [0, 0, 0.4, 0.6]]
        assert mdp.rewards[0].tolist() == [[0.005, 0], [0, 0], [0, 0], [0, 1]]

    def test_two_states_have_ends_only(self) -> None:
        mdp = build("riverswim", n_states=2, horizon=2)
        assert mdp.transitions[0, :, 1].tolist() == [[0.4, 0.6], [0.4, 0.6]]
        assert mdp.optimal_value == pytest.approx(0.6 + 0.4 * 0.005)

    @pytest.mark.parametrize("n_states", [3, 6, 12])
    def test_other_lengths(self, n_states: int) -> None:
        mdp = build("riverswim", n_states=n_states, horizon=4 * n_states)
        assert mdp.transitions[0, 1, 1, :3].tolist() == [0.05, 0.6, 0.35]
        assert mdp.transitions[0, -1, 1, -2:].tolist() == [0.4, 0.6]
        assert value_of(mdp, np.ones((mdp.horizon, n_states))) > value_of(mdp, np.zeros((mdp.horizon, n_states)))

    def test_permuted_is_the_same_river(self) -> None:
        plain, permuted = build("riverswim"), build("riverswim", 3, permuted=True)
        assert permuted.optimal_value == pytest.approx(plain.optimal_value)
        assert np.array_equal(np.sort(permuted.rewards, axis=-1), np.sort(plain.rewards, axis=-1))
        flipped = [permuted.rewards[h, -1].argmax() for h in range(6)]
        assert set(flipped) == {0, 1}
        assert not same(permuted, build("riverswim", 4, permuted=True))


class TestBandit:
    @settings(max_examples=60, deadline=None)
    @given(mean=st.floats(-0.5, 1.5), sigma=st.floats(0.01, 2.0))
    def test_closed_form_is_the_integral(self, mean: float, sigma: float) -> None:
        # E[clip(Z, 0, 1)] is the integral of P(Z > t) over [0, 1]: another way to the same number.
        integral = quad(lambda t: norm.sf(t, mean, sigma), 0, 1, epsabs=1e-10, points=[min(max(mean, 0.0), 1.0)])[0]
        assert clipped_normal_mean(np.array([mean]), sigma)[0] == pytest.approx(integral, abs=1e-8)

    def test_closed_form_is_what_users_see(self) -> None:
        # 200,000 users per arm play the paper's own words; 5 standard errors: fails by chance once in 1e5 runs.
        rng, users, means = np.random.default_rng(1), 200_000, np.array([0.02, 0.5, 0.97])
        own = np.clip(means + 0.1 * rng.standard_normal((users, 3)), 0, 1)
        seen = (rng.random((users, 3)) < own).mean(axis=0)
        expected = clipped_normal_mean(means, 0.1)
        assert (np.abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / users)).all()
        assert abs(expected[2] - 0.97) > 0.01, "clipping matters, so that the test would notice its absence"

    def test_without_differences_the_means_are_the_draw(self) -> None:
        drawn = stream(3, "environment").uniform(0, 0.99, 20)
        assert np.array_equal(build("bandit", 3, sigma=0).rewards[0, 0], drawn)
        assert np.allclose(build("bandit", 3, sigma=1e-200).rewards[0, 0], drawn, atol=1e-12)

    def test_shape_and_order(self) -> None:
        mdp = build("bandit", 3)
        assert mdp.rewards.shape == (1, 1, 20)
        assert mdp.rewards.argmax() == build("bandit", 3, sigma=0).rewards.argmax()


class TestSpectrum:
    def test_learning_matters(self) -> None:
        mdp = build("spectrum")
        shape = (mdp.horizon, mdp.n_states)
        own = np.broadcast_to(np.arange(mdp.n_states) // 2, shape)
        fixed = [np.full(shape, channel) for channel in range(mdp.n_actions)]
        flee = np.where(np.arange(mdp.n_states) % 2 == 0, mdp.n_actions - 1, own)
        optimal, stay = mdp.optimal_value, value_of(mdp, own)
        best_fixed = max(value_of(mdp, policy) for policy in fixed)
        assert optimal == pytest.approx(4.1677, abs=1e-4)
        assert optimal > value_of(mdp, flee) + 0.3 > best_fixed + 0.5
        assert best_fixed > stay + 0.5
        assert stay == pytest.approx(8 * np.mean([0.2 * 0.95, 0.5 * 0.775, 0.8 * 0.6]))
        assert stay > 2 * random_value(mdp)

    @pytest.mark.parametrize("memory", [0.0, 0.6, 0.99])
    def test_channels_are_gilbert_elliott(self, memory: float) -> None:
        mdp = build("spectrum", n_channels=4, memory=memory)
        for c, share in enumerate(np.linspace(0.2, 0.8, 4)):
            chain = mdp.transitions[0, 2 * c : 2 * c + 2, c, 2 * c : 2 * c + 2]
            assert np.allclose([1 - share, share] @ chain, [1 - share, share])
            assert np.allclose(np.sort(np.linalg.eigvals(chain)), [memory, 1])
            tuned = np.delete(mdp.transitions[0, :, c], [2 * c, 2 * c + 1], axis=0)
            assert np.allclose(tuned[:, 2 * c + 1], share)

    def test_only_a_free_channel_that_one_stays_on_pays(self) -> None:
        paying = np.argwhere(build("spectrum").rewards[0] > 0)
        assert paying.tolist() == [[1, 0], [3, 1], [5, 2]]

    def test_known_support_is_the_tuner(self) -> None:
        mdp = build("spectrum")
        assert mdp.support is not None
        for x, a in itertools.product(range(6), range(3)):
            assert np.flatnonzero(mdp.support[0, x, a]).tolist() == [2 * a, 2 * a + 1]


class TestDeepSea:
    @pytest.mark.parametrize("size", [1, 2, 8, 20])
    @pytest.mark.parametrize("randomize", [True, False])
    def test_only_all_right_finds_the_treasure(self, size: int, randomize: bool) -> None:
        mdp = build("deepsea", 5, size=size, randomize_actions=randomize)
        assert (mdp.horizon, mdp.n_states, mdp.n_actions) == (size, size, 2)
        right = mdp.rewards.argmin(axis=-1)
        right[:, -1] = mdp.rewards[:, -1].argmax(axis=-1)
        assert mdp.optimal_value == pytest.approx(1.0)
        assert value_of(mdp, right) == pytest.approx(1.0)
        assert value_of(mdp, 1 - right) == pytest.approx(0.01)
        if size > 1:
            right[0, 0] = 1 - right[0, 0]
            assert value_of(mdp, right) == pytest.approx(0.01 / size)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_is_bsuites_up_to_a_hundredth(self, seed: int) -> None:
        # bsuite's step function, played on every sequence of actions: values differ by the same 0.01 always.
        size = 4
        mdp = build("deepsea", seed, size=size)
        meaning = stream(seed, "environment").integers(2, size=(size, size))
        for actions in itertools.product((0, 1), repeat=size):
            column, total = 0, 0.0
            for row, action in enumerate(actions):
                moves_right = action == meaning[row, column]
                if column == size - 1 and moves_right:
                    total += 1
                total -= 0.01 / size if moves_right else 0
                column = min(column + 1, size - 1) if moves_right else max(column - 1, 0)
            policy = np.repeat(np.array(actions)[:, None], size, axis=1)
            assert value_of(mdp, policy) == pytest.approx(total + 0.01)

    def test_actions_mean_what_they_say(self) -> None:
        plain = build("deepsea", size=3, randomize_actions=False)
        assert plain.transitions[0, :, 1].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1]]
        assert plain.transitions[0, :, 0].tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
        drawn = build("deepsea", size=20).rewards.argmin(axis=-1)[:, :-1]
        assert 0.35 < drawn.mean() < 0.65


class TestRandom:
    def test_branching_is_the_known_support(self) -> None:
        mdp = build("random", n_states=7, n_actions=2, horizon=4, branching=3)
        assert mdp.support is not None
        assert (mdp.support.sum(axis=-1) == 3).all()
        assert np.array_equal(mdp.support, mdp.transitions > 0)
        assert build("random").support is None

    def test_every_set_of_next_states_is_as_likely(self) -> None:
        # 3 of 5 states: ten sets in 60,000 rows; a chi-square of 9 degrees above 40 has a chance below 1e-5.
        layout = build("random", n_states=5, n_actions=1000, horizon=13, branching=3).layout
        sets, seen = np.unique(layout.successors.reshape(-1, 3), axis=0, return_counts=True)
        assert len(sets) == 10
        assert ((seen - 6000) ** 2 / 6000).sum() < 40

    @pytest.mark.parametrize("name", ["random", "bandit"])
    def test_an_instance_is_one_draw_for_all_seeds(self, name: str) -> None:
        assert same(build(name, 1, instance=7), build(name, 2, instance=7))
        assert same(build(name, 1, instance=7), build(name, 7))
        assert not same(build(name, 1, instance=7), build(name, 1, instance=8))

    def test_homogeneous_steps_are_alike(self) -> None:
        alike = build("random", homogeneous=True, branching=2)
        assert (alike.transitions == alike.transitions[0]).all()
        assert (alike.rewards == alike.rewards[0]).all()
        assert not np.array_equal(build("random").rewards[0], build("random").rewards[1])

    def test_rows_are_uniform_over_the_simplex(self) -> None:
        # Of 3 states, each probability is Beta(1, 2): mean 1/3, variance 1/18; 5 standard errors of 90,000 rows.
        rows = build("random", n_states=3, n_actions=1000, horizon=31).transitions.reshape(-1, 3)
        error = 5 / np.sqrt(len(rows))
        assert np.abs(rows.mean(axis=0) - 1 / 3).max() < error * np.sqrt(1 / 18)
        assert np.abs(rows.var(axis=0) - 1 / 18).max() < error * 0.1
